"""In its turn a module's codes are held against its operands, and its products against the codes."""

import sys

import pytest
import torch
from check_observed import PER_TENSOR, RECIPES, call_of, module_of, recipe_of
from watched import FEATURES, HIDDEN, TOKENS

from fp8watch.integrations.te_turns import TeTurns
from fp8watch.observer.canary import Canary
from fp8watch.session.site_placement import _check_codes
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import QUANTISER_FAULTS, Measured


def looked_at(watch, recipe, kind="Linear"):
    """One step in which each module has its turn; (operand, direction) -> row."""
    slab, canary = Slab(len(watch.sites), next(watch.model.parameters()).device), Canary()
    canary.cover([rows[0] for rows in watch.observer.rows_of.values()], 1)
    watch.observer.turns = TeTurns(canary, slab, _check_codes, lambda: True)
    canary.begin_step(0.0)
    watch.train(recipe_of(recipe), call_of(kind), steps=1)
    assert dict(watch.guard.errors) == {}
    return {(s.operand, s.direction): row for s, row in zip(watch.sites, slab.copy_rows(), strict=True)}


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_healthy_module_is_looked_at_and_silent(te, watched, recipe, kind):
    rows = looked_at(watched(module_of(te, kind, True)), recipe, kind)
    assert not any(row[name] for row in rows.values() for name in QUANTISER_FAULTS)
    multiplied = {place for place, row in rows.items() if row["measured"] & Measured.GEMM}
    assert {("input", "rowwise"), ("grad_output", "rowwise")} <= multiplied
    assert (("grad_output", "columnwise") in multiplied) is (recipe not in PER_TENSOR)  # else both are told at one row
    assert {(float(rows[p]["gemm_error"]), float(rows[p]["gemm_gain_max"])) for p in multiplied} == {(0.0, 1.0)}
    checked = {place[0] for place, row in rows.items() if row["measured"] & Measured.QUANTISER}
    delayed, seen = recipe == "DelayedScaling", {"weight", "grad_output"} | ({"input"} if kind == "Linear" else set())
    assert checked == (set() if delayed else seen)


def test_gradient_codes_that_are_all_zero_are_counted(te, watched, monkeypatch):
    extension = sys.modules["transformer_engine_torch"]
    right = extension.quantize

    def quantize(x, *args, **kwargs):
        made = right(x, *args, **kwargs)
        if tuple(x.shape) == (TOKENS, HIDDEN):
            made._rowwise_data.zero_()
        return made

    monkeypatch.setattr(extension, "quantize", quantize)
    rows = looked_at(watched(module_of(te, "Linear", False)), "Float8BlockScaling")
    assert rows["grad_output", "rowwise"]["num_zeroed_tiles"] > 0
    assert rows["input", "rowwise"]["num_zeroed_tiles"] == 0


def test_rows_of_a_product_that_nobody_wrote_are_the_kernels(te, watched, monkeypatch):
    extension = sys.modules["transformer_engine_torch"]
    right = extension.generic_gemm

    def gemm(*args, **kwargs):
        out, *rest = right(*args, **kwargs)
        if tuple(out.shape) == (TOKENS, HIDDEN):
            out[-40:] = out[:40].clone()
        return (out, *rest)

    monkeypatch.setattr(extension, "generic_gemm", gemm)
    rows = looked_at(watched(module_of(te, "Linear", False)), "Float8BlockScaling")
    assert rows["input", "rowwise"]["gemm_error"] > 0.1
    assert rows["grad_output", "rowwise"]["gemm_error"] == 0
    assert torch.finfo(torch.float32).max > rows["grad_output", "columnwise"]["gemm_gain_max"] == 1
    assert FEATURES < HIDDEN
