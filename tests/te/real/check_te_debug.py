"""Debug mode shows every operand before its cast, in the turn of a module alone, and training goes on as without."""

import importlib
from dataclasses import replace

import pytest
import torch
from check_observed import RECIPES, chain, recipe_of
from torch import nn
from watched import FEATURES, TOKENS

import fp8watch
from fp8watch.integrations import te_debug as debug
from fp8watch.integrations.te_stats import DERIVED
from fp8watch.observer.step_sample import EVERYTHING, Each

debug_api = pytest.importorskip("nvdlfw_inspect.api")
EACH = replace(EVERYTHING, full=Each(1))  # all sites, but nothing out of the ordinary: modules have their turns


@pytest.fixture
def shown(te):
    """te_debug(...), with whatever it set up taken away afterwards."""
    state = importlib.import_module("transformer_engine.debug.pytorch.debug_state").TEDebugState
    state._reset()
    yield fp8watch.te_debug
    debug_api.end_debug()
    state._reset()
    debug._mode = None


def calls(te, monkeypatch):
    """How often anything was quantised for debug mode, by step."""
    quantizer = importlib.import_module("transformer_engine.debug.pytorch.debug_quantization").DebugQuantizer
    seen, made = [], quantizer.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        seen.append(self.layer_name)

    monkeypatch.setattr(quantizer, "__init__", init)
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_site_is_exact(te, watched, shown, recipe):
    shown()
    watch = watched(chain(te))
    watch.train(recipe_of(recipe))
    watch.clean()
    sites = 12 if recipe in ("Float8CurrentScaling", "DelayedScaling") else 20
    assert (len(watch.seen), watch.exact()) == (sites, sites)
    assert all(watch.evidence().values())
    for found in watch.seen.values():
        for _, stats in found:
            summary = stats.summary()
            assert summary["num_underflow"] is not None
            if recipe != "DelayedScaling":
                assert 0 < summary["noise_energy"] < 0.01 * summary["signal_energy"]


def test_an_mlp_as_wide_inside_as_outside_mixes_nothing_up(te, watched, shown):
    shown()
    model = te.LayerNormMLP(FEATURES, FEATURES, params_dtype=torch.bfloat16)
    with torch.no_grad():
        model.fc2_weight.mul_(64.0)
    watch = watched(model)
    watch.train(recipe_of("Float8BlockScaling"))
    watch.clean()
    assert watch.exact() == 10
    for found in watch.seen.values():
        for _, stats in found:
            assert stats.summary()["noise_energy"] < 0.01 * stats.summary()["signal_energy"]


def test_between_its_turns_a_module_is_not_in_debug_mode(te, watched, shown, monkeypatch):
    shown(every=3)
    seen = calls(te, monkeypatch)
    alone = te.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16)  # nobody watches it
    watch = watched(chain(te))
    by_step, alone_by_step = [], []
    for _ in range(7):
        watch.observer.begin_step(EACH)
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe_of("Float8BlockScaling")), torch.no_grad():
            watch.model.eval()(torch.ones(TOKENS, FEATURES, dtype=torch.bfloat16))  # an evaluation costs no turn
        watch.model.train()
        assert seen == []
        watch.train(recipe_of("Float8BlockScaling"), steps=1)
        by_step.append(len({name.removesuffix(".fc1").removesuffix(".fc2") for name in seen}))
        seen.clear()
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe_of("Float8BlockScaling")):
            alone(torch.ones(TOKENS, FEATURES, dtype=torch.bfloat16))
        alone_by_step.append(len(seen))
        seen.clear()
    assert by_step == [1] * 7
    assert alone_by_step[1:] == [0] * 6
    assert watch.missing() == []
    from_codes = [stats.measured == DERIVED for _, stats in watch.seen["0", "input", "rowwise"]]
    assert len(from_codes) == 7
    assert from_codes.count(False) in (2, 3)
    assert dict(watch.guard.errors) == {}


def test_the_weights_learn_the_same_with_and_without(te, watched, shown):
    def trained(observe):
        torch.manual_seed(3)
        model = nn.Sequential(
            te.Linear(FEATURES, 256, params_dtype=torch.bfloat16), te.Linear(256, FEATURES, params_dtype=torch.bfloat16)
        )
        watch = watched(model)
        if not observe:
            watch.observer.stop()
        watch.train(recipe_of("Float8BlockScaling"), steps=3)
        return [p.grad.clone() for p in model.parameters()]

    plain = trained(False)
    importlib.import_module("transformer_engine.debug.pytorch.debug_state").TEDebugState._reset()
    shown()
    assert all(torch.equal(a, b) for a, b in zip(plain, trained(True), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_costs_no_site(te, watched, shown, reentrant):
    shown()
    watch = watched(chain(te))
    checkpoint = importlib.import_module("transformer_engine.pytorch.distributed").checkpoint
    watch.train(recipe_of("Float8BlockScaling"), lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    watch.clean()
    assert (watch.missing(), watch.exact()) == ([], 20)


def test_cached_weights_and_grouped_experts(te, watched, shown):
    shown(every=2)
    options = {"params_dtype": torch.bfloat16}
    watch = watched(
        nn.ModuleList([te.Linear(FEATURES, FEATURES, **options), te.GroupedLinear(3, FEATURES, 256, **options)])
    )

    def call(model, x):
        y = model[0](x, is_first_microbatch=True) + model[0](x, is_first_microbatch=False)
        return model[1](y, [128, 0, 128])

    for _ in range(5):
        watch.observer.begin_step(EACH)
        watch.train(recipe_of("Float8BlockScaling"), call, steps=1)
    assert dict(watch.guard.errors) == {}
    assert {key[0] for key in watch.missing()} == {"1.1"}
    assert watch.exact() == len(watch.seen)


def test_modules_that_debug_mode_refuses_train_as_before(te, watched, shown):
    shown()
    options = {"params_dtype": torch.bfloat16}
    late = te.Linear(FEATURES, FEATURES, delay_wgrad_compute=True, **options)
    with te.fp8_model_init(enabled=True, recipe=recipe_of("Float8BlockScaling")):
        stored = te.Linear(FEATURES, FEATURES, **options)
    watch = watched(nn.Sequential(late, stored))
    watch.train(recipe_of("Float8BlockScaling"))
    watch.train(None, steps=1)  # and outside of autocast
    assert dict(watch.guard.errors) == {}
    assert ("1", "weight", "rowwise") in watch.seen


def test_what_cannot_work_is_refused_with_its_remedy(te, shown, tmp_path):
    with pytest.raises(ValueError, match="every=0: must be a whole number"):
        shown(every=0)
    with pytest.raises(FileNotFoundError):
        shown(tmp_path / "none.yaml")
    te.Linear(FEATURES, FEATURES)
    with pytest.raises(RuntimeError, match="before the first is built"):
        shown()
    importlib.import_module("transformer_engine.debug.pytorch.debug_state").TEDebugState._reset()
    shown()
    with pytest.raises(RuntimeError, match="initialised already"):
        shown()


def test_other_features_run_beside(te, watched, shown, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "stats:\n  enabled: True\n  layers:\n    layer_name_regex_pattern: Layer_.*\n  transformer_engine:\n"
        "    LogTensorStats:\n      enabled: True\n      tensors: [activation]\n      stats: [max]\n      freq: 1\n"
    )
    shown(config, log_dir=str(tmp_path))
    watch = watched(chain(te))
    watch.train(recipe_of("Float8BlockScaling"), steps=1)
    debug_api.step()
    watch.train(recipe_of("Float8BlockScaling"), steps=1)
    debug_api.step()
    watch.clean()
    assert watch.exact() == 20
    logged = [p.read_text() for p in tmp_path.rglob("*.log")]
    assert any("activation_max" in text for text in logged)
