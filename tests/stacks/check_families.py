"""Some of the families; `make families` runs all of them, and tells an Inf to a collector."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from stacks.families import STEPS, Arrived, made, measure, train
from stacks.family_models import FAMILIES

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "Llama 4", "GPT-2"])
def test_every_gemm_of_a_family_is_observed_and_no_number_changes(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's packages
        row = measure(BY_NAME[name])
    assert row.identical
    assert row.steps == STEPS
    assert row.meant == pytest.approx(1.0, abs=1e-6)
    assert row.looked_at == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["fused QKV as a Parameter", "nn.MultiheadAttention", "Linears 75 and 50 wide"])
def test_every_gemm_of_plain_torch_is_observed_against_what_its_dispatcher_counts(name: str) -> None:
    row = measure(BY_NAME[name])
    assert (row.identical, row.steps) == (True, STEPS)
    assert row.observed == pytest.approx(1.0, abs=1e-6)


def test_a_head_without_a_linear_is_looked_at_against_what_the_dispatcher_counts() -> None:
    row = measure(BY_NAME["a head without a Linear"])
    assert (row.identical, row.steps) == (True, STEPS)
    assert row.observed == pytest.approx(0.4, abs=1e-6)
    assert row.meant == row.looked_at == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    "name", ["Mixtral", "Mixtral, experts one by one", "Mixtral, experts gathered", "gpt-oss", "Llama 4"]
)
def test_experts_of_a_family_compute_in_fp8_and_the_loss_stays_with_that_of_high_precision(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; make families has it")
    import fp8watch
    import fp8watch.session.start as start

    monkeypatch.setattr(start, "Recorder", Arrived)
    family = BY_NAME[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        high = train(family, made(family), steps=4)
        model = made(family)
        watch = fp8watch.attach(model, recipe="blockwise", overhead_budget=None)
        losses = train(family, model, steps=4)
    kept: Any = watch._recorder
    watch.detach()
    assert watch.summary()["internal_errors"] == {}
    assert losses != high
    assert losses == pytest.approx(high, rel=0.0025)
    recipes = {s.recipe for s in kept.sites.values() if ".experts." in s.module and s.recipe != "probe"}
    assert recipes == {"blockwise"}
    assert {s.direction for s in kept.sites.values() if s.module.endswith("experts.down_proj")} == {
        "rowwise",
        "columnwise",
    }
