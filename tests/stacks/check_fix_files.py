"""A fix as a file, read by Megatron-core itself."""

from __future__ import annotations

import sys
from pathlib import Path

from no_cuda import on_the_cpu

sys.path.insert(0, str(Path(__file__).parents[2] / "server"))

with on_the_cpu():
    from megatron.core.quantization.quant_config import MatchContext
    from megatron.core.quantization.utils import load_quantization_recipe

from fp8watch_server.incidents.fix_files import fix_file

NAMED = "decoder.layers.1.mlp.linear_fc2"


def test_megatron_takes_the_named_module_out_and_no_other(tmp_path):
    path = tmp_path / "precision.yaml"
    path.write_text(fix_file("megatron", [NAMED, "odd[0].*"], "a title: [with] # what YAML reads", {}))
    recipe = load_quantization_recipe(str(path))

    def config(module):
        return recipe.match(MatchContext(module_path=module, layer_number=None))

    for module in (NAMED, f"module.{NAMED}", "odd[0].*"):
        found = config(module)
        assert found.config == {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    for module in ("decoder.layers.11.mlp.linear_fc2", f"{NAMED}.x", "odd0.x", "decoder.layers.1.mlp.linear_fc1"):
        assert config(module) is None
