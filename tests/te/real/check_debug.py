"""Tensors of Transformer Engine's debug mode and of its hybrid quantisers are read too."""

import importlib

import pytest
import torch
from check_observed import chain, recipe_of
from check_recipes import factory_of

debug_api = pytest.importorskip("nvdlfw_inspect.api")
EVERY_TENSOR = """
stats:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, weight, gradient]
      stats: [max]
      freq: 1
"""


def test_debug_mode_hides_nothing(te, watched, tmp_path):
    (tmp_path / "config.yaml").write_text(EVERY_TENSOR)
    features = importlib.import_module("transformer_engine.debug").__path__[0] + "/features"
    debug_api.initialize(
        config_file=str(tmp_path / "config.yaml"), feature_dirs=[features], log_dir=str(tmp_path),
        default_logging_enabled=False,
    )  # fmt: skip
    try:
        model = chain(te)
        debug_api.infer_and_assign_layer_names(model)
        watch = watched(model)
        seen = []
        read = watch.observer._look
        watch.observer._look = lambda *a, **k: (seen.append(type(a[2]).__name__), read(*a, **k))[1]
        watch.train(recipe_of("Float8BlockScaling"))
        watch.clean()
        assert "DebugQuantizedTensor" in seen
        assert watch.missing() == []
    finally:
        debug_api.end_debug()


def test_hybrid_tensors_are_read_direction_by_direction(te, watched):
    try:
        hybrid = importlib.import_module("transformer_engine.pytorch.tensor.hybrid_tensor").HybridQuantizer
    except ImportError:
        pytest.skip(f"transformer_engine {te.version} has no hybrid quantisers")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    block = factory_of(te, "block")
    recipe = recipes.CustomRecipe(
        qfactory=lambda role: hybrid(rowwise_quantizer=block(role), columnwise_quantizer=block(role))
    )
    watch = watched(te.Linear(128, 128, params_dtype=torch.bfloat16))
    watch.train(recipe)
    watch.clean()
    assert watch.missing() == []
