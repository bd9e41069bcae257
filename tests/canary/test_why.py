"""Why a quantiser is wrong: each hypothesis on real quantiser output with the fault made here, and none where none holds."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import pytest
import torch
from canary.hypothesis_faults import BLOCK, COLUMN, ROW, SPEC, case, codes, gradient, of_bytes, tensorwise, with_spec

from fp8watch.quantize.why.ask import ask
from fp8watch.recipe import OperandRecipe
from fp8watch_agent.fault_names import TOLD_SHARE

X = gradient()
CODES, SCALES = codes(X)
EXPONENT = torch.log2(SCALES).floor()
OLD = codes(X * torch.exp2(torch.randn(256, 1, generator=torch.Generator().manual_seed(5))))


def shuffled(scale_inv):
    order = torch.randperm(scale_inv.numel(), generator=torch.Generator().manual_seed(2))
    return scale_inv.flatten()[order].view_as(scale_inv)


def random_bytes(b, share=1.0):
    g = torch.Generator().manual_seed(3)
    other = torch.randint(0, 120, b.shape, dtype=torch.uint8, generator=g)
    return torch.where(torch.rand(b.shape, generator=g) < share, other, b)


FAULTS = {
    "eps": (with_spec(X, eps=1e-2), "eps", {"eps": 448 * 2.0**-15}),
    "one-scale": (tensorwise(X), "tile", {"rows": -1.0, "columns": -1.0}),
    "one-FP32-scale": (tensorwise(X, power=False), "tile", {"rows": -1.0, "power_2_scale": 0.0}),
    "FP32-scales": (with_spec(X, power_2_scale=False), "scale-kind", {"power_2_scale": 0.0}),
    "E5M2": (with_spec(X, format="E5M2"), "format", {"exponent_bits": 5.0}),
    "scales-of-the-step-before": ((CODES, OLD[1]), "scales-stale", {"what": 0.0}),
    "codes-by-the-scales-before": ((OLD[0], SCALES), None, {}),
    "scales-a-row-off": ((CODES, SCALES.roll(1, 0)), "scales-rolled", {"axis": 0.0, "by": 1.0}),
    "scales-a-column-off": ((CODES, SCALES.roll(-1, 1)), "scales-rolled", {"axis": 1.0, "by": -1.0}),
    "scales-swizzled": ((CODES, shuffled(SCALES)), "scales-permuted", {"scales": 768.0}),
    "scales-times-four": ((CODES, SCALES * 4), "scales-factor", {"factor": 4.0}),
    "scale-for-scale_inv": ((CODES, 1 / SCALES), "scales-inverse", {}),
    "exponent-bytes-as-numbers": ((CODES, EXPONENT + 127), "scales-as-bytes", {"as": 0.0}),
    "exponent-bytes-as-E4M3": (
        (CODES, (EXPONENT + 127).to(torch.uint8).view(torch.float8_e4m3fn).float()), "scales-as-bytes", {"as": 2.0},
    ),
    "codes-16-columns-off": ((of_bytes(CODES, lambda b: b.roll(16, 1)), SCALES), "codes-rolled", {"axis": 1.0, "by": 16.0}),
    "codes-3-rows-off": ((of_bytes(CODES, lambda b: b.roll(3, 0)), SCALES), "codes-rolled", {"axis": 0.0, "by": 3.0}),
    "codes-transposed": ((of_bytes(CODES, lambda b: b.t().reshape(b.shape)), SCALES), "codes-transposed", {"way": 0.0}),
    "codes-not-transposed": (
        (of_bytes(CODES, lambda b: b.reshape(b.shape[1], b.shape[0]).t()), SCALES), "codes-transposed", {"way": 1.0},
    ),
    "E4M3-read-as-E5M2": ((CODES.view(torch.float8_e5m2), SCALES), "codes-as-format", {"written": 0.0}),
    "codes-all-zero": ((of_bytes(CODES, torch.zeros_like), SCALES), None, {}),
    "bytes-that-nobody-wrote": ((of_bytes(CODES, random_bytes), SCALES), None, {}),
    "few-bytes-that-nobody-wrote": ((of_bytes(CODES, lambda b: random_bytes(b, 0.002)), SCALES), None, {}),
    "rows-that-nobody-wrote": ((of_bytes(CODES, lambda b: torch.cat((b[:-20], b[:20]))), SCALES), None, {}),
}  # fmt: skip


def asked(made, **how):
    """Kind and numbers of what holds; None for nothing."""
    found = ask(made, **how)
    assert len(found) <= 1
    if not found:
        return None, {}
    numbers = {name: float(value) for name, value in found[0].numbers.items()}
    assert numbers["share"] >= TOLD_SHARE
    return found[0].kind, numbers


@pytest.mark.parametrize("as_values", [False, True], ids=["codes", "values"])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_is_told_as_what_it_is_and_one_that_is_none_of_them_as_nothing(fault, as_values) -> None:
    made, kind, numbers = FAULTS[fault]
    before = OLD[1] if kind == "scales-stale" else None
    found, said = asked(case(X, *made, as_values=as_values, before=before))
    assert found == kind
    assert {name: said[name] for name in numbers} == pytest.approx(numbers)


def test_what_the_recipe_gives_is_no_fault_of_any_kind() -> None:
    assert asked(case(X, CODES, SCALES, as_values=False), is_weight=True) == (None, {})


def test_scales_of_the_step_before_are_told_from_codes_and_from_both() -> None:
    for what, made in ((1.0, (OLD_CODES, SCALES)), (2.0, (OLD_CODES, OLD[1]))):
        kind, numbers = asked(case(X, *made, as_values=True, before=OLD[1]))
        assert (kind, numbers["what"]) == ("scales-stale", what)


def with_old_scales():
    """Codes of this operand, made with the scales of the step before."""
    from fp8watch.kernels import reference
    from fp8watch.numerics.quantize_job import quantize_jobs

    return reference.quantize(X, quantize_jobs(ROW, "E4M3", True, 0.0)[0], 1 / OLD[1])[0]


OLD_CODES = with_old_scales()


@pytest.mark.parametrize(
    ("eps", "share", "tile"),
    [(1e-3, 0.0, ROW), (1e-1, 1e-4, ROW), (10.0, 1e-3, COLUMN)],
    ids=["small", "large", "columnwise"],
)
def test_an_eps_is_told_with_how_much_became_zero(eps, share, tile) -> None:
    spec = replace(SPEC, power_2_scale=False)
    data, scale_inv = codes(X, replace(spec, eps=eps), tile)
    for as_values in (False, True):
        kind, numbers = asked(case(X, data, scale_inv, as_values=as_values, spec=spec, tile=tile))
        lost = ((data.float() == 0) & (X != 0)).float().mean()
        assert kind == "eps"
        assert numbers["eps"] == pytest.approx(eps, rel=1e-4)
        assert numbers["zeroed"] == pytest.approx(float(lost), abs=1e-6)
        assert numbers["zeroed"] >= share


def test_an_eps_of_which_nothing_is_left_is_not_told() -> None:
    """Any larger one would do as well, and so would a kernel that writes zeros."""
    for as_values in (False, True):
        assert asked(case(X, *with_spec(X, eps=1e30), as_values=as_values))[0] is None


def test_a_small_eps_that_floors_no_tile_is_none() -> None:
    assert asked(case(X, *with_spec(X, eps=1e-9), as_values=True)) == (None, {})


@pytest.mark.parametrize("as_values", [False, True], ids=["codes", "values"])
@pytest.mark.parametrize("moved", [1e-3, 1e-2, 0.1])
def test_codes_of_an_older_weight_are_told_with_its_distance_in_updates(moved, as_values) -> None:
    g = torch.Generator().manual_seed(7)
    w, spec = torch.randn(256, 384, generator=g) * 0.02, OperandRecipe((128, 128))
    old = w - moved * 0.02 * torch.randn(w.shape, generator=g)
    made = case(w, *codes(old, spec, BLOCK), as_values=as_values, spec=spec, tile=BLOCK, update=torch.tensor(5e-4))
    kind, numbers = asked(made, is_weight=True)
    assert kind == "copy-stale"
    assert numbers["distance"] == pytest.approx(moved, rel=0.1)
    assert numbers["updates"] == pytest.approx(moved / 5e-4, rel=0.1)
    assert asked(made)[0] is None, "an input has no older one that is near"


def test_another_weight_is_not_an_older_one() -> None:
    g, spec = torch.Generator().manual_seed(7), OperandRecipe((128, 128))
    w, other = torch.randn(256, 384, generator=g), torch.randn(256, 384, generator=g)
    assert asked(case(w, *codes(other, spec, BLOCK), as_values=False, spec=spec, tile=BLOCK), is_weight=True)[0] is None
    stray = of_bytes(codes(w, spec, BLOCK)[0], lambda b: random_bytes(b, 0.03))
    made = case(w, stray, codes(w, spec, BLOCK)[1], as_values=False, spec=spec, tile=BLOCK)
    assert asked(made, is_weight=True)[0] is None


def test_a_part_of_the_operand_is_no_setting_of_it() -> None:
    """Half of the rows have an eps: it explains what is wrong, but nobody sets it for half of an operand."""
    data, scale_inv = with_spec(X, eps=1e-1)
    mixed = data.view(torch.uint8).clone()
    mixed[::2] = CODES.view(torch.uint8)[::2]
    of_mixed = scale_inv.clone()
    of_mixed[::2] = SCALES[::2]
    assert asked(case(X, mixed.view(data.dtype), of_mixed, as_values=False))[0] != "eps"


def test_of_a_large_operand_a_window_at_the_tile_is_asked_in_bounded_time() -> None:
    x = gradient(4096, 2048)
    data, scale_inv = with_spec(x, eps=1e-1)
    right, right_inv = codes(x)
    late = data.view(torch.uint8).clone()
    late[:2048] = right.view(torch.uint8)[:2048]
    inverse = scale_inv.clone()
    inverse[:2048] = right_inv[:2048]
    made = case(x, late.view(data.dtype), inverse, as_values=False)
    at_it = replace(made, at=torch.tensor([3000, 4], dtype=torch.int32))
    assert asked(at_it)[0] == "eps"
    assert at_it.x_mk.numel() <= 1 << 18
    garbage = replace(made, reads=made.reads._replace(data=of_bytes(right, random_bytes)))
    began = process_time()
    assert asked(garbage)[0] is None
    assert process_time() - began < 2.0


@pytest.mark.parametrize("columns", [300, 2500])
def test_an_operand_that_is_no_multiple_of_a_tile_is_asked_too(columns) -> None:
    x = gradient(260, columns)
    made = case(x, *with_spec(x, eps=1e-1), as_values=True)
    at_the_end = replace(made, at=torch.tensor([259, -(-columns // 128) - 1], dtype=torch.int32))
    assert asked(at_the_end)[0] == "eps"
