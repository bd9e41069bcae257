"""The custom recipe of fp8watch trains what Transformer Engine's own quantisers train, and shows its operands."""

import copy
import importlib
import pickle

import pytest
import torch
from check_observed import chain
from torch import nn
from watched import FEATURES

from fp8watch.integrations.te_recipe import observing_recipe, operand_of

FUSED_NORMS = 4  # operands behind norms, which 2.9 keeps fused: two of LayerNormLinear, two of LayerNormMLP


def factory_of(te, kind):
    tensors = "transformer_engine.pytorch.tensor."
    dtype = getattr(te, "DType", None) or importlib.import_module("transformer_engine_torch").DType
    e4m3 = dtype.kFloat8E4M3
    if kind == "block":
        cls = importlib.import_module(f"{tensors}float8_blockwise_tensor").Float8BlockQuantizer
        return lambda role: cls(
            fp8_dtype=e4m3, rowwise=True, columnwise=True, block_scaling_dim=2 if operand_of(role) == "weight" else 1
        )
    if kind == "mx":
        cls = importlib.import_module(f"{tensors}mxfp8_tensor").MXFP8Quantizer
        return lambda role: cls(fp8_dtype=e4m3)
    cls = importlib.import_module(f"{tensors}float8_tensor").Float8CurrentScalingQuantizer
    return lambda role: cls(fp8_dtype=e4m3, device=torch.device("cpu"))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("kind", ["block", "mx", "current"])
def test_every_operand_is_exact(te, watched, kind, bias):
    options = {"bias": bias, "params_dtype": torch.bfloat16}
    model = nn.Sequential(
        te.LayerNormLinear(FEATURES, 256, **options), te.Linear(256, FEATURES, **options),
        te.LayerNormMLP(FEATURES, 256, **options),
    )  # fmt: skip
    watch = watched(model)
    watch.train(observing_recipe(factory_of(te, kind), watch.observer))
    watch.clean()
    sites = 20 if kind != "current" else 12
    assert len(watch.seen) == sites
    fused = 0 if not te.version.startswith("2.9") else FUSED_NORMS if kind != "current" else FUSED_NORMS // 2
    assert watch.exact() == sites - fused
    assert all(p.grad is not None for p in model.parameters())


def test_training_is_that_of_the_factory_alone(te, watched):
    recipes = importlib.import_module("transformer_engine.common.recipe")

    def losses(observe):
        torch.manual_seed(1)
        watch = watched(nn.Sequential(te.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16)))
        factory = factory_of(te, "block")
        recipe = observing_recipe(factory, watch.observer) if observe else recipes.CustomRecipe(qfactory=factory)
        watch.train(recipe)
        return watch.model[0].weight.grad.clone()

    assert torch.equal(losses(True), losses(False))


def test_a_copy_of_a_quantiser_is_a_plain_one(te, watched):
    watch = watched(chain(te))
    for kind in ("block", "mx", "current"):
        made = observing_recipe(factory_of(te, kind), watch.observer).qfactory("linear_input")
        made.set_usage(rowwise=True, columnwise=False)
        for again in (made.copy(), copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(again) is type(made)
            assert "quantize_impl" not in vars(again)
            assert not getattr(again, "custom", False)
            assert (again.rowwise_usage, again.columnwise_usage) == (True, False)
