"""Kernels that broke their contract in public, rebuilt: named in the first step in which the site is looked at."""

from __future__ import annotations

import pytest
import torch
from canary import faults, own_forward
from canary.expert_models import Experts
from canary.faults import break_site, by_codes
from torch import nn

from fp8watch import recipe as recipes
from fp8watch.kernels import emulated_gemm, scaled_mm

CASES = {
    "codes all zero": ("b", "grad_output", False, faults.zeroed, "num_zeroed_tiles", {}),
    "codes at the wrong place": ("c", "input", False, faults.elsewhere, "num_off_grid", {}),
    "a transposed copy that is garbage": ("b", "input", True, faults.garbage, "num_off_grid", {}),
    "FP32 scales read as powers of two": ("b", "input", False, faults.powers_of_two, "num_wrong_scales", {"power_2_scale": False}),
    "stale scales of the padding": ("c", "grad_output", True, faults.stale_scales, "num_wrong_scales", {}),
}  # fmt: skip
NEEDS_CODES = (faults.powers_of_two, faults.stale_scales)


@pytest.mark.parametrize("gemm", ["emulated", "scaled_mm"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_broken_quantiser_is_named_at_its_site(train, case, gemm) -> None:
    fqn, operand, columnwise, fault, count, how = CASES[case]
    dequantised = by_codes(fault) if gemm == "emulated" and fault in NEEDS_CODES else None
    line, _ = train(
        3,
        gemm=gemm,
        recipe=recipes.blockwise(environ={}, **how),
        before=lambda watch: break_site(watch, fqn, operand, columnwise, fault, dequantised=dequantised),
    )
    first = line.said()[0]  # in the first step, in which each site has a full sample
    assert first == ("quantiser-fault", "critical", 0, fqn, operand, "columnwise" if columnwise else "rowwise")
    assert {e.field for e in line.findings[0].evidence} >= {count, "num_checked_tiles"}
    others = [row[count] for i, row in line.rows[0].items() if line.sites[i].id != line.findings[0].site]
    assert not any(others)


@pytest.mark.parametrize(
    ("recipe", "operand", "columnwise", "backward"),
    [("blockwise", "input", True, True), ("blockwise", "weight", False, True), ("current", "input", False, False)],
)
def test_values_that_are_not_what_their_codes_stand_for_are_named_at_their_site(
    train, recipe, operand, columnwise, backward
) -> None:
    """What a forward keeps for backward are codes; another kernel makes values of them, there or at once for both."""
    line, _ = train(
        3,
        recipe=recipe,
        before=lambda watch: faults.break_dequantisation(
            watch, "b", operand, columnwise, faults.elsewhere, backward=backward
        ),
    )
    said = line.said()[0]
    assert said[:5] == ("quantiser-fault", "critical", 0, "b", operand)


def only_turns(watch) -> None:
    watch._plan.canary.reads_rows = False


def test_what_no_full_sample_reads_is_named_in_the_modules_turn(train) -> None:
    """Each step of the first ones is one module's turn."""

    def broken(watch) -> None:
        only_turns(watch)
        break_site(watch, "b", "input", False, faults.elsewhere)

    line, _ = train(3, before=broken)
    assert line.said()[0] == ("quantiser-fault", "critical", 1, "b", "input", "rowwise")


def test_scales_read_as_powers_of_two_inside_of_the_gemm_are_the_kernels(train, monkeypatch) -> None:
    """What is handed over is right, and the product is not: 8.5 dB and a gain in the threads."""
    right = scaled_mm._mm

    def reads_powers(a, b, *, block_b, dtype):
        if a.data.shape == (96, 272):  # fprop of b
            a = a._replace(scale_inv=torch.exp2(torch.floor(torch.log2(a.scale_inv))))
        return right(a, b, block_b=block_b, dtype=dtype)

    monkeypatch.setattr(scaled_mm, "_mm", reads_powers)
    recipe = recipes.blockwise(environ={}, power_2_scale=False)
    line, _ = train(3, gemm="scaled_mm", recipe=recipe)
    assert line.said()[0] == ("kernel-output-fault", "critical", 1, "b", "input", "rowwise")


@pytest.mark.parametrize("left", ["zero", "what was there before"])
@pytest.mark.parametrize(("which", "fqn", "operand", "direction"), [
    ("fprop", "a", "input", "rowwise"), ("dgrad", "c", "grad_output", "rowwise"), ("wgrad", "c", "grad_output", "columnwise"),
])  # fmt: skip
def test_rows_that_nobody_wrote_are_the_kernels(train, monkeypatch, which, fqn, operand, direction, left) -> None:
    right = getattr(emulated_gemm, which)
    shape = {"fprop": (96, 272), "dgrad": (96, 144), "wgrad": (160, 144)}[which]

    def unwritten(*args):
        out = right(*args)
        if tuple(out.shape) == shape:
            out[-20:] = 0 if left == "zero" else out[:20]
        return out

    monkeypatch.setattr(emulated_gemm, which, unwritten)
    line, _ = train(3)
    assert line.said()[0] == ("kernel-output-fault", "critical", 0, fqn, operand, direction)
    if fqn == "c":  # in its turn, which reads some rows: the last ones are among them
        line, _ = train(3, before=only_turns)
        assert line.said()[0] == ("kernel-output-fault", "critical", 2, fqn, operand, direction)


@pytest.mark.parametrize("whose", ["ours", "own forward"])
@pytest.mark.parametrize("broken", [True, False])
def test_the_weight_gradient_of_an_expert_without_tokens_is_zero(train, monkeypatch, whose, broken) -> None:
    """What nobody wrote is finite, and enters the optimizer."""
    if broken and whose == "ours":
        right = emulated_gemm.wgrad
        monkeypatch.setattr(emulated_gemm, "wgrad", lambda g, *a: right(g, *a) + (0 if g.numel() else 1e-3))
    elif broken:
        made = own_forward.product
        monkeypatch.setattr(own_forward, "product", lambda a, *rest: made(a, *rest) + (0 if a.numel() else 1e-3))
    expert = nn.Linear if whose == "ours" else own_forward.ScriptFloat8Linear
    turn = 2 if whose == "ours" else 1  # of e1: a Linear in high precision has none
    line, _ = train(4, model=Experts(expert, turn))
    if broken:
        assert line.said()[0] == ("kernel-output-fault", "critical", turn, "e1", "grad_output", "columnwise")
        line, _ = train(4, model=Experts(expert, turn), before=only_turns)
        assert line.said()[0] == ("kernel-output-fault", "critical", turn, "e1", "grad_output", "columnwise")
    else:
        assert line.said() == []
