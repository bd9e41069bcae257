"""Each operand of each module arrives, under each recipe, as its site claims; or the reason is told."""

import importlib

import pytest
import torch
from torch import nn
from watched import FEATURES, HIDDEN

from fp8watch.integrations import te_modules

RECIPES = ("Float8BlockScaling", "Float8CurrentScaling", "DelayedScaling", "MXFP8BlockScaling")
PER_TENSOR = RECIPES[1:3]


def recipe_of(name):
    return getattr(importlib.import_module("transformer_engine.common.recipe"), name)()


def module_of(te, kind, bias):
    options = {"bias": bias, "params_dtype": torch.bfloat16}
    if kind == "GroupedLinear":
        return te.GroupedLinear(3, FEATURES, HIDDEN, **options)
    return getattr(te, kind)(FEATURES, HIDDEN, **options)


def call_of(kind):
    return (lambda m, x: m(x, [64, 128, 64])) if kind == "GroupedLinear" else (lambda m, x: m(x))


def chain(te):
    options = {"params_dtype": torch.bfloat16}
    return nn.Sequential(
        te.LayerNormLinear(FEATURES, HIDDEN, **options), te.Linear(HIDDEN, FEATURES, **options),
        te.LayerNormMLP(FEATURES, HIDDEN, **options),
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_of_a_first_layer_is_seen_in_its_wgrad(te, watched, recipe):
    """Where the input asks for no gradient, nothing reads the rowwise copy, which is all that there is of one tensor's codes."""
    watch = watched(nn.Sequential(te.Linear(FEATURES, HIDDEN, params_dtype=torch.bfloat16)))
    watch.train(recipe_of(recipe), lambda model, x: model(x.detach()))
    direction = "rowwise" if recipe in PER_TENSOR else "columnwise"
    assert len(watch.seen["0", "grad_output", direction]) == 2
    assert dict(watch.guard.errors) == {}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("kind", te_modules.KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_claimed_is_seen(te, watched, recipe, kind, bias):
    watch = watched(module_of(te, kind, bias))
    watch.train(recipe_of(recipe), call_of(kind))
    watch.clean()
    # the codes of a whole tensor are the same in both directions: one site has them
    expected = [k for k in watch.missing() if k[2] == "columnwise"] if recipe in PER_TENSOR else []
    assert watch.missing() == expected
    assert len(watch.seen) == len(watch.sites) * (3 if recipe in PER_TENSOR else 5) // 5
    assert all(watch.evidence().values())
    kinds = {"Float8BlockScaling": "blockwise", "Float8CurrentScaling": "current", "DelayedScaling": "delayed"}
    assert {facts.recipe for facts in watch.observer.numerics.values()} == {kinds.get(recipe, "mxfp8")}
    for calls in watch.seen.values():
        for row, stats in calls:
            if recipe != "DelayedScaling":  # what the collector's invariant allows
                low = 0.5 if watch.observer.numerics[row].power_2_scale else 1 - 2**-20
                summary = stats.summary()
                assert low * (1 - 2**-20) <= summary["scale_ratio_min"] <= summary["scale_ratio_max"] <= 1 + 2**-20
            if watch.observer.numerics[row].evidence["energies"] == "exact":
                summary = stats.summary()
                first_of_delayed = recipe == "DelayedScaling"  # before it has a history
                assert first_of_delayed or 0 < summary["noise_energy"] < 0.01 * summary["signal_energy"]


def test_the_assignment_that_fixes_name_is_what_quantisers_read(te, watched, monkeypatch):
    recipes = importlib.import_module("transformer_engine.common.recipe")
    monkeypatch.setenv("FP8_QUANT_FWD_WEIGHT_AMAX_EPS", "1e-10")  # LoongForge's: nothing here reads it
    recipe = recipe_of("Float8BlockScaling")
    recipe.fp8_quant_fwd_inp = recipes.QParams(power_2_scale=False, amax_epsilon=1e-12)
    watch = watched(module_of(te, "Linear", True))
    watch.train(recipe)
    held = {site.operand: watch.observer.numerics[i] for i, site in enumerate(watch.sites)}
    assert watch.observer.backend == "transformer_engine"
    assert (held["input"].eps, held["input"].power_2_scale) == (1e-12, False)
    assert (held["weight"].eps, held["weight"].power_2_scale) == (0.0, True)


@pytest.mark.parametrize("recipe", ["Float8BlockScaling", "MXFP8BlockScaling"])
def test_an_expert_without_tokens_costs_its_own_sites_alone(te, watched, recipe):
    watch = watched(module_of(te, "GroupedLinear", True))
    watch.train(recipe_of(recipe), lambda m, x: m(x, [128, 0, 128]))
    watch.clean()
    assert {key[0] for key in watch.missing()} == {"1"}
    assert {key[1] for key in watch.missing()} == {"input", "grad_output"}
    assert all(watch.evidence().values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_costs_no_site(te, watched, reentrant):
    watch = watched(chain(te))
    checkpoint = importlib.import_module("transformer_engine.pytorch.distributed").checkpoint
    watch.train(recipe_of("Float8BlockScaling"), lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    watch.clean()
    assert watch.missing() == []
    assert all(watch.evidence().values())


def test_without_autocast_the_reason_is_told_once(te, watched):
    watch = watched(chain(te))
    watch.train(None)
    assert watch.seen == {}
    assert dict(watch.guard.errors) == {}
    [(line, facts)] = watch.said
    assert line.startswith(
        f"Transformer Engine {te.version}: 20 of 20 GEMM operands cannot be read: 20 of Tensor (not in FP8"
    )
    assert line.endswith("not observed: 0, 1, 2.fc1, 2.fc2")
    assert facts["te_unread"] == line


def test_operations_of_te_ops_are_left_out_with_the_reason(te):
    ops = importlib.import_module("transformer_engine.pytorch.ops")
    model = nn.Sequential(
        ops.Linear(FEATURES, FEATURES, device="cpu"), ops.Sequential(ops.Linear(FEATURES, HIDDEN, device="cpu"))
    )
    assert te_modules.find(model.named_modules()) == []
    left_out = te_modules.unseen(model.named_modules())
    assert [fqn for fqn, _ in left_out] == ["0", "1.0"]
    assert all("te.ops" in reason for _, reason in left_out)
