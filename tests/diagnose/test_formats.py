"""What a what-if reads is, bit by bit, what the quantiser of that format gives: ours, torchao's, torch's own casts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8watch
from fp8watch.diagnose.candidates import CANDIDATES, candidates_of
from fp8watch.diagnose.diagnosis_copy import LinearCall
from fp8watch.diagnose.number_grid import E2M1, E5M6, GRIDS, Grid
from fp8watch.diagnose.nvfp4 import hadamard, quantize_nvfp4, random_signs
from fp8watch.diagnose.readers import Reader, RecipeReader, round_e5m6
from fp8watch.recipe import OPERANDS

CPU = torch.device("cpu")


def operands() -> list[Tensor]:
    """Of many sizes: normal data, wide data, an outlier, zeros, bfloat16."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 256, generator=g)
    wide = normal * torch.exp(4 * torch.randn(64, 256, generator=g))
    outlier = normal.clone()
    outlier[3, 7], outlier[5] = 3e4, 0
    return [normal, wide, outlier, normal.bfloat16(), torch.zeros(32, 64), wide * 1e-9]


def reader(name: str) -> Reader:
    return CANDIDATES[name].make(CPU, None, None)


def read(name: str, x: Tensor, *, operand: str = "input", columnwise: bool = False) -> Tensor:
    return reader(name).see("m", operand, x, columnwise).values


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == torch.float32
    assert torch.equal(a, b.float()), (a - b.float()).abs().max()


@pytest.mark.parametrize("columnwise", [False, True])
def test_our_recipes_are_read_as_our_quantisers_give_them(columnwise: bool) -> None:
    for x in operands():
        turned = x.t().contiguous() if columnwise else x
        for name, given in {
            "blockwise": {}, "blockwise-fp32-scales": {"power_2_scale": False}, "blockwise-e5m2": {"fp8_format": "E5M2"},
        }.items():  # fmt: skip
            expected = fp8watch.quantize_blockwise(turned, backend="reference", **given).dequantize()
            same(read(name, x, columnwise=columnwise), expected.t() if columnwise else expected)
        expected = fp8watch.quantize_mxfp8(turned, backend="reference").dequantize()
        same(read("mxfp8", x, columnwise=columnwise), expected.t() if columnwise else expected)
        same(read("current", x, columnwise=columnwise), fp8watch.quantize_per_tensor(x).dequantize())
        square = fp8watch.quantize_blockwise(x, (128, 128), backend="reference").dequantize()
        same(read("blockwise", x, operand="weight", columnwise=columnwise), square)
        grad = fp8watch.quantize_per_tensor(x, "E5M2").dequantize()
        same(read("current", x, operand="grad_output", columnwise=columnwise), grad)


def test_a_delayed_scale_follows_the_passes_before_with_margin_and_history() -> None:
    recipe = fp8watch.delayed(margin=1, amax_history_len=2)
    delayed = RecipeReader(recipe, CPU)
    xs = [operands()[0] * factor for factor in (8.0, 2.0, 1.0, 1.0)]
    for x in xs[:3]:
        delayed.note(LinearCall("m", 0, x, x, None, x.dtype, True), x)
        delayed.end_pass()
    largest = max(float(x.abs().max()) for x in xs[1:3])  # the first has left the history
    scale = torch.tensor([[224.0]]) / torch.tensor([[largest]])
    expected = fp8watch.quantize_per_tensor(xs[3] * 20, scale=scale)
    seen = delayed.see("m", "input", xs[3] * 20, False)
    same(seen.values, expected.dequantize())
    assert seen.num_saturated == int(expected.stats.num_saturated.sum()) > 0


@pytest.mark.parametrize("columnwise", [False, True])
def test_mxfp8_and_nvfp4_are_torchaos(columnwise: bool) -> None:
    pytest.importorskip("torchao.prototype.mx_formats", reason="torchao is not installed")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    for x in operands()[:5]:
        turned = x.t().contiguous() if columnwise else x
        theirs = {
            name: MXTensor.to_mx(turned, torch.float8_e4m3fn, 32, mode).dequantize(torch.float32)
            for name, mode in (("mxfp8", ScaleCalculationMode.RCEIL), ("mxfp8-floor", ScaleCalculationMode.FLOOR))
        }
        if x.any():
            whole = per_tensor_amax_to_scale(x.abs().max())
            theirs["nvfp4"] = NVFP4Tensor.to_nvfp4(turned, per_tensor_scale=whole).dequantize(torch.float32)
        for name, expected in theirs.items():
            same(read(name, x, columnwise=columnwise), expected.t() if columnwise else expected)


def test_half_precisions_are_torchs_casts_and_what_overflows_is_counted() -> None:
    for x in operands():
        same(read("bf16", x), x.bfloat16())
        same(read("fp16", x), x.half())
    seen = reader("fp16").see("m", "input", torch.tensor([[1e5, -1e5, 1.0]]), False)
    assert seen.num_saturated == 2


def values_of(grid: Grid) -> np.ndarray:
    """Every number of a format, from its definition."""
    step = 2.0**grid.min_exponent / 2**grid.mantissa_bits
    found = [k * step for k in range(2**grid.mantissa_bits)]
    exponent = grid.min_exponent
    while 2.0**exponent <= grid.max_finite:
        found += [2.0**exponent * (1 + k / 2**grid.mantissa_bits) for k in range(2**grid.mantissa_bits)]
        exponent += 1
    return np.array([v for v in found if v <= grid.max_finite])


@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
def test_rounding_takes_the_nearest_number_and_of_two_the_even_one(grid: Grid) -> None:
    known = values_of(grid)
    assert known[-1] == grid.max_finite
    middles = (known[:-1] + known[1:]) / 2
    g = np.random.default_rng(0)
    tries = np.concatenate([known, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9), g.normal(0, 3, 500),
                            [grid.max_finite * 4, 0.0]]).astype(np.float32)  # fmt: skip
    at = np.clip(np.searchsorted(known, np.abs(tries)), 1, len(known) - 1)
    low, high = known[at - 1], known[at]
    magnitude = np.abs(tries).astype(np.float64)
    to_high = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (at % 2 == 0))
    nearest = np.where(magnitude >= grid.max_finite, grid.max_finite, np.where(to_high, high, low))
    expected = np.copysign(nearest, tries)
    got = grid.round(torch.from_numpy(tries))
    assert np.array_equal(got.numpy(), expected.astype(np.float32))
    if grid.name in ("E4M3", "E5M2"):
        dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[grid.name]
        inside = torch.from_numpy(tries[np.abs(tries) <= grid.max_finite])
        assert torch.equal(grid.round(inside), inside.to(dtype).float())


def test_e5m6_inputs_have_power_of_two_scales_by_tile_and_the_rest_is_blockwise() -> None:
    for x, columnwise in itertools.product(operands(), (False, True)):
        got = read("e5m6-input", x, columnwise=columnwise)
        same(got, round_e5m6(x, columnwise=columnwise))
        turned = (x.t() if columnwise else x).float()
        for row, values in zip(turned[:4], (got.t() if columnwise else got)[:4], strict=True):
            for tile, seen in zip(row.split(128), values.split(128), strict=True):
                amax = float(tile.abs().max())
                scale = 2.0 ** math.floor(math.log2(65024 / amax)) if amax else 1.0
                assert torch.equal(seen, E5M6.round(tile * scale) / scale)
        same(read("e5m6-input", x, operand="weight"), read("blockwise", x, operand="weight"))
    assert E5M6.round(torch.tensor(7e4)) == 65024
    assert E5M6.round(torch.tensor(1.0078125)) == 1.0  # half a step above 1


def test_square_blocks_of_nvfp4_share_a_scale_and_are_the_same_transposed() -> None:
    x = operands()[0]
    square = quantize_nvfp4(x, square=True).values
    assert torch.equal(square, quantize_nvfp4(x, square=True, columnwise=True).values)
    whole = torch.tensor(float(x.abs().max())) / (448 * 6)
    block = x[:16, :16]
    scale = (block.abs().max() / 6 / whole).to(torch.float8_e4m3fn).float()
    assert torch.equal(square[:16, :16], E2M1.round(block * (1 / whole / scale)) * (whole * scale))
    odd = torch.randn(20, 37)
    assert quantize_nvfp4(odd, square=True).values.shape == odd.shape


def test_stochastic_rounding_is_unbiased_and_takes_a_neighbour() -> None:
    x = torch.full((4096, 16), 0.7)
    x[:, 0] = 6.0  # sets the scale
    g = torch.Generator().manual_seed(3)
    got = quantize_nvfp4(x, generator=g).values[:, 1:]
    scale = 6.0 / 6.0
    assert set((got / scale).unique().tolist()) == {0.5, 1.0}
    assert float(got.mean()) == pytest.approx(0.7, abs=0.005)
    seen = reader("nvfp4-stochastic")
    assert torch.equal(seen.see("m", "input", x, False).values, read("nvfp4", x))
    assert not torch.equal(seen.see("m", "grad_output", x, False).values, read("nvfp4", x))


def test_the_hadamard_transform_leaves_the_product_as_it_is_and_spreads_an_outlier() -> None:
    matrix = hadamard(random_signs(0, CPU))
    assert torch.allclose(matrix @ matrix.t(), torch.eye(16), atol=1e-6)
    x = operands()[0].clone()
    x[:, 5] *= 100
    plain, turned = quantize_nvfp4(x).values, quantize_nvfp4(x, signs=random_signs(0, CPU)).values
    others = torch.ones(256, dtype=torch.bool)
    others[5] = False
    zeros = [float((v[:, :16][:, others[:16]] == 0).double().mean()) for v in (plain, turned)]
    assert zeros[1] < 0.6 * zeros[0]
    same(read("nvfp4-rht", x), read("nvfp4", x))  # fprop has no transform
    assert not torch.equal(read("nvfp4-rht", x, columnwise=True), read("nvfp4", x, columnwise=True))


def test_every_format_reads_every_operand_and_keeps_shape_and_nan() -> None:
    x = torch.randn(33, 50)
    x[2, 3] = math.nan
    for name in CANDIDATES:
        for operand, columnwise in itertools.product(OPERANDS, (False, True)):
            got = read(name, x, operand=operand, columnwise=columnwise)
            assert (got.shape, got.dtype) == (x.shape, torch.float32), name
            assert torch.isnan(got[2, 3]), (name, operand, columnwise)


def test_formats_are_named_or_refused() -> None:
    mine = {"mine": fp8watch.delayed(margin=3)}
    assert [(c.name, c.recipe) for c in candidates_of(mine)] == [("mine", mine["mine"])]
    assert [c.name for c in candidates_of(["bf16", fp8watch.current()])] == ["bf16", "current"]
    for wrong, word in (
        (["fp3"], "unknown"), ([], "empty"), (["bf16", "bf16"], "twice"), ([3], "must be a name"), ({"a": 3}, "must be a name"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=word):
            candidates_of(wrong)  # type: ignore[arg-type]
