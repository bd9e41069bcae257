"""What rounding can take of a row is a bound that no right quantiser passes, whatever the data; what breaks it is a fault."""

from __future__ import annotations

import math

import pytest
import torch
from canary.quantised_operands import BLOCK, COLUMN, REFERENCE, ROW, operand, quantised, spec_of

from fp8watch.kernels import cpu, resolve
from fp8watch.layers.random_projection import check_product, signs
from fp8watch.numerics.formats import fp8_format
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.observer.step_sample import EVERYTHING as EVERYTHING_OF_A_STEP
from fp8watch.observer.step_state import StepState
from fp8watch.quantize.rounding_bound import HALF_STEP, check_rounding, part_of_rows, rows_hold
from fp8watch.quantize.self_consistency import Reads
from fp8watch.quantize.site_quantizer import places, site_quantizer
from fp8watch.recipe import build
from fp8watch.sketch.slab import Slab
from fp8watch_agent.guard import Guard

EVERYTHING = slice(0, None, 1)
RECIPES = [build.blockwise(), build.current(), build.mxfp8(), build.rowwise()]


def finite(*shape, dtype=torch.float32):
    """An operand of any spread."""
    return operand(*shape, dtype=dtype).nan_to_num(0.0, 0.0)


def amax_of(x):
    return x.float().abs().amax()


def values(x, tile, fmt="E4M3", power_2=True, eps=0.0):
    return quantised(x, tile, fmt, power_2, eps)[1].data


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("tile", [ROW, COLUMN, BLOCK])
def test_a_right_quantiser_stays_within_the_bound(tile, power_2, fmt):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (1.0, 1e-12, 1e-25):
            x = finite(dtype=dtype) * size
            read = values(x, tile, fmt, power_2)
            assert check_rounding(x, read, EVERYTHING, spec_of(tile, fmt, power_2), tile, amax_of(x)) is None


@pytest.mark.parametrize("recipe", RECIPES, ids=[r.name for r in RECIPES])
def test_rows_of_any_spread_stay_within_it_under_every_recipe(recipe):
    """Elements on the middle between two codes, where rounding takes most; rows that are tiny beside their block."""
    backend = resolve("reference", "cpu")
    g = torch.Generator().manual_seed(1)
    middle = torch.randint(8, 16, (256, 320), generator=g) + 0.5  # of E4M3: 8 codes an octave
    for x in (middle, middle * torch.exp2(torch.randint(-40, 1, (256, 1), generator=g)), finite(256, 320)):
        for place in places(recipe):
            quantizer = site_quantizer(recipe, place, backend, torch.device("cpu"))
            tile = quantizer.tile_for((256, 320))
            read, _ = quantizer(x, stats=False, heavy=False)
            assert check_rounding(x, read, EVERYTHING, quantizer.spec, tile, amax_of(x)) is None


def _zeroed(v):
    v[33] = 0


def _elsewhere(v):
    v[40:44] = v[40:44].roll(32, 1)


def _another_format(v):
    v[7:9] *= 2


def _few(v):
    v[100, 17] += 0.5 * v[100].norm()


@pytest.mark.parametrize("tile", [ROW, COLUMN, BLOCK])
@pytest.mark.parametrize(("fault", "row"), [(_zeroed, 33), (_elsewhere, 40), (_another_format, 7), (_few, 100)])
def test_a_row_that_lost_more_is_named(fault, row, tile):
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    read = values(x, tile)
    fault(read)
    found = check_rounding(x, read, EVERYTHING, spec_of(tile), tile, amax_of(x))
    assert found is not None
    assert found.elements[0] == 0
    assert 1 <= found.elements[1] <= 4
    assert found.fault_tile[0] in (range(row, row + 4) if tile == ROW else [row // 128])


@pytest.mark.parametrize("tile", [ROW, COLUMN, BLOCK])
def test_single_bytes_that_nobody_wrote_are_seen(tile):
    """One code in ten thousand, none of them a NaN, as a miscompiled store left them: too little to show in a row's sum."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(1024, 1024, generator=g)
    read = values(x, tile)
    hit = torch.rand(x.shape, generator=g) < 1e-4
    amax = read.abs().amax()
    read[hit] = (torch.rand(int(hit.sum()), generator=g) * 2 - 1) * amax / 8  # within what its neighbours are
    looks = [check_rounding(x, read, part_of_rows(1024, phase), spec_of(tile), tile, amax_of(x)) for phase in range(8)]
    assert all(f is not None and f.elements[1] > 0 for f in looks)
    assert sum(int(f.elements[1]) for f in looks) > 0.7 * int(hit.any(1).sum())


def test_a_nan_of_a_finite_element_is_one_and_a_clip_under_a_history_is_none():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    read = values(x, ROW)
    read[3, 5] = torch.nan
    found = check_rounding(x, read, EVERYTHING, spec_of(ROW), ROW, amax_of(x))
    assert found is not None
    assert found.elements.tolist() == [1, 0]
    assert found.fault_tile.tolist() == [3, 0]

    recipe = build.delayed()
    scale = torch.tensor([[448.0 / 0.5]])  # the history had an amax of 0.5
    job = quantize_jobs((64, 256), "E4M3", False, 0.0)[0]
    clipped, _, _ = REFERENCE.quantize_dequantize(x, job, scale)
    assert recipe.input is not None
    assert check_rounding(x, clipped, EVERYTHING, recipe.input, (64, 256), amax_of(x), scale) is None
    assert check_rounding(x, clipped, EVERYTHING, recipe.input, (64, 256), amax_of(x)) is not None


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
@pytest.mark.parametrize("tile", [ROW, COLUMN, BLOCK])
def test_the_library_says_of_values_and_of_codes_what_the_close_look_does(tile, fmt):
    """Right ones, and one element of one row off by a little more and a little less than the bound."""
    seen = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = finite(dtype=dtype)
        codes, read = quantised(x, tile, fmt)
        spec, amax, part = spec_of(tile, fmt), float(amax_of(x)), part_of_rows(260, 1)
        x[25, 3], x[29, 200] = torch.nan, torch.inf  # such rows are left to the statistics
        for reads in (codes, read):
            assert rows_hold(x, reads, part, spec, amax)
            assert rows_hold(x, reads, part, spec, math.nan), "not finite: nothing is judged"
        for row, column in ((21, 0), (21, 299), (101, 17), (102, 17), (5, 5), (25, 7), (29, 7)):
            for share in (0.99, 1.01):
                off = read.data.clone()
                bound = float(x[row, column].float().abs()) * HALF_STEP[fmt]
                bound += amax * 2 / fp8_format(fmt).max_finite * fp8_format(fmt).min_subnormal / 2
                off[row, column] = x[row, column].float() + share * bound
                holds = rows_hold(x, Reads(off, None, tile), part, spec, amax)
                assert holds == (check_rounding(x, off, part, spec, tile, torch.tensor(amax)) is None)
                seen.add((row, share, holds))
        wrong = codes.data.view(torch.uint8).clone()
        wrong[21] = 0x7F
        assert not rows_hold(x, Reads(wrong.view(codes.data.dtype), codes.scale_inv, tile), part, spec, amax)
    assert {(21, 0.99, True), (21, 1.01, False), (102, 1.01, True), (25, 1.01, True), (29, 1.01, True)} <= seen


def test_what_the_library_does_not_read_is_left_to_the_close_look():
    x = finite(256, 256)
    read = values(x, ROW)
    part, spec, amax = part_of_rows(256, 0), spec_of(ROW), float(amax_of(x))
    assert rows_hold(x, Reads(read, None, ROW), part, spec, amax)
    for of, reads in (
        (x.double(), Reads(read, None, ROW)),
        (x.t().contiguous().t(), Reads(read, None, ROW)),
        (x, Reads(read.t().contiguous().t(), None, ROW)),
        (x, Reads(read.bfloat16(), None, ROW)),
        (x, Reads(read[:128], None, ROW)),
        (x, Reads(read.to(torch.float8_e4m3fn), None, ROW)),
        (x, Reads(read.to(torch.float8_e4m3fn), torch.ones(1, 1), ROW)),
    ):
        assert not rows_hold(of, reads, part, spec, amax)


def test_what_a_history_clips_is_known_to_the_library():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    recipe, scale = build.delayed(), torch.tensor([[448.0 / 0.5]])
    clipped, _, _ = REFERENCE.quantize_dequantize(x, quantize_jobs((64, 256), "E4M3", False, 0.0)[0], scale)
    assert recipe.input is not None
    reads, amax = Reads(clipped, None, (64, 256)), float(amax_of(x))
    assert rows_hold(x, reads, EVERYTHING, recipe.input, amax, scale)
    assert not rows_hold(x, reads, EVERYTHING, recipe.input, amax)
    assert not rows_hold(x, reads, EVERYTHING, recipe.input, amax, torch.zeros(1, 1))


def test_a_product_that_overflows_its_square_is_looked_at_closely():
    a, b = torch.randn(64, 32) * 1e15, torch.randn(32, 48) * 1e10
    assert check_product(a @ b, a, b) is None or not torch.isfinite((a @ b).square().sum())
    found = check_product((a @ b) * 3, a, b)
    assert found is not None


def test_rows_are_read_in_parts_and_all_of_them_in_turn():
    parts = [part_of_rows(700, phase) for phase in range(8)]
    assert sorted(i for part in parts for i in range(700)[part]) == list(range(700))
    assert part_of_rows(100, 7) == slice(0, 100, 1)
    x = torch.randn(700, 384, generator=torch.Generator().manual_seed(4))
    for tile in (ROW, COLUMN, BLOCK):
        read = values(x, tile)
        assert all(check_rounding(x, read, part, spec_of(tile), tile, amax_of(x)) is None for part in parts)
        read[603] = 0
        found = [check_rounding(x, read, part, spec_of(tile), tile, amax_of(x)) for part in parts]
        assert [f is not None for f in found] == [603 in range(700)[part] for part in parts]
        assert [f.fault_tile[0] for f in found if f is not None] == [603 // tile[0]]


def test_where_something_is_not_finite_the_statistics_judge():
    slab = Slab(1, torch.device("cpu"))
    for value, amax in ((2.0, 2.0), (torch.nan, torch.inf), (torch.inf, torch.inf)):
        slab.clear()
        operand = torch.tensor([[1.0, value]])
        quantizer = site_quantizer(build.blockwise(), places(build.blockwise())[0], REFERENCE, operand.device)
        _, stats = quantizer(operand, stats=True, heavy=False)
        assert stats is not None
        slab.accumulate(0, stats, 0)
        assert slab.amax_if_finite(0).tolist() == [amax]
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    read = values(x, ROW)
    read[3] = 0
    assert check_rounding(x, read, EVERYTHING, spec_of(ROW), ROW, torch.tensor([torch.inf])) is None


def test_the_second_call_of_a_step_is_read_too() -> None:
    state = StepState(Guard())
    assert [state.holds(0, "operand") for _ in range(9)] == [True, True, False, True, False, False, False, True, False]
    assert state.holds(0, "GEMM")
    state.begin(EVERYTHING_OF_A_STEP)
    assert state.holds(0, "operand")


def test_a_projection_sees_what_a_right_product_never_shows() -> None:
    g = torch.Generator().manual_seed(5)
    a, b, bias = torch.randn(200, 512, generator=g), torch.randn(512, 96, generator=g), torch.randn(96, generator=g)
    right = a @ b + bias
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert check_product(right.to(dtype), a, b, bias) is None
        unwritten = right.to(dtype).clone()
        unwritten[-20:] = unwritten[:20]
        found = check_product(unwritten, a, b, bias)
        assert found is not None
        true = (unwritten.float() - right).norm() / right.norm()
        assert found.error == pytest.approx(float(true), rel=0.35)  # one draw of signs over 20 rows
    scaled = check_product(right / 128, a, b, bias / 128 * 128)
    assert scaled is not None
    assert scaled.gain == pytest.approx(2.0**-7, abs=1e-4)
    cancelled = torch.cat((a, -a * (1 + 1e-6)), 1)
    assert check_product(cancelled @ torch.cat((b, b)), cancelled, torch.cat((b, b))) is None
    broken = a.clone()
    broken[3, 4] = torch.inf
    assert check_product(broken @ b, broken, b) is None
    assert check_product(torch.zeros(8, 4), torch.zeros(8, 16), torch.ones(16, 4)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_the_library_tells_right_products_however_their_operands_lie(dtype, transposed) -> None:
    if cpu.probe(torch.device("cpu")) is not None:
        pytest.skip("no compiler here")
    g = torch.Generator().manual_seed(7)
    for m, k, n in ((1, 1, 1), (65, 130, 33), (256, 96, 200)):
        a, b = (
            torch.randn(y, x, generator=g).t() if across else torch.randn(x, y, generator=g)
            for across, (x, y) in zip(transposed, ((m, k), (k, n)), strict=True)
        )
        bias, r = torch.randn(n, generator=g), signs(n, torch.device("cpu"))
        allowed = 8 * torch.finfo(dtype).eps
        for added in (None, bias):
            right = (a @ b if added is None else a @ b + added).to(dtype)
            for rows in (slice(0, m, 1), slice(m // 2, m, 8)):
                assert cpu.product_holds(right, a, b, added, r, rows, allowed)
                wrong = right.clone()
                wrong[rows.start] *= 8
                assert not cpu.product_holds(wrong, a, b, added, r, rows, allowed)
                wrong[rows.start] = torch.nan
                assert not cpu.product_holds(wrong, a, b, added, r, rows, allowed)
    assert not cpu.product_holds(
        torch.zeros(8, 4),
        torch.zeros(8, 16),
        torch.ones(16, 4),
        None,
        signs(4, torch.device("cpu")),
        slice(0, 8, 1),
        1.0,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_are_one_vector_at_right_angles_to_the_signs_are_no_error(dtype) -> None:
    """As what attention gives early in training: every row is nearly the mean of all values."""
    g = torch.Generator().manual_seed(6)
    r, v = signs(96, torch.device("cpu")), torch.randn(96, generator=g)
    v -= 0.998 * (v @ r) / 96 * r
    a, b = 1 + 0.001 * torch.randn(200, 64, generator=g), torch.outer(torch.rand(64, generator=g), v)
    right = a @ b
    assert (right @ r).norm() < 0.05 * right.norm()
    assert check_product(right.to(dtype), a, b) is None
    assert check_product((1.1 * right).to(dtype), a, b) is not None


def test_what_float16_rounds_below_its_normal_numbers_is_no_error() -> None:
    g = torch.Generator().manual_seed(8)
    a, b = torch.randn(200, 64, generator=g) * 1e-4, torch.randn(64, 96, generator=g) * 4e-4
    right = a @ b
    rounded = right.to(torch.float16)
    assert (rounded.float() - right).norm() > 0.02 * right.norm()
    assert check_product(rounded, a, b) is None
    assert check_product((4 * right).to(torch.float16), a, b) is not None
    assert check_product(right.to(torch.bfloat16), a, b) is None
    assert check_product((1.1 * right).to(torch.bfloat16), a, b) is not None


def test_a_few_rows_that_nobody_wrote_are_no_narrow_accumulator() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(256, 96), torch.randn(96, 64)
    right = a @ b
    stale = right.clone()
    stale[7] = (a[8] * 0.3) @ b  # what was there before, of a row that is small
    found = check_product(stale, a, b)
    assert found is not None
    assert float(torch.linalg.vector_norm(stale - right) / torch.linalg.vector_norm(right)) < 0.1
    assert float(found.error) > 0.5
    mantissa, exponent = torch.frexp(right)
    narrow = torch.ldexp(torch.trunc(mantissa * 2.0**4) / 2.0**4, exponent)
    found = check_product(narrow, a, b)
    assert found is not None
    assert float(found.error) < 0.1
