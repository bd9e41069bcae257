"""A fix as a file, read by Transformer Engine's debug mode."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
from check_recipes import factory_of  # noqa: F401  the room's imports, in its order

sys.path.insert(0, str(Path(__file__).parents[3] / "server"))
from fp8watch_server.incidents.fix_files import fix_file

debug_api = pytest.importorskip("nvdlfw_inspect.api")


def test_the_named_layers_leave_fp8_and_no_others(te, tmp_path):
    config = tmp_path / "fix.yaml"
    config.write_text(fix_file("te-debug", ["1.up", "0.down.grad_output"], "why", {}))
    features = importlib.import_module("transformer_engine.debug").__path__[0] + "/features"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions have another name for the same
        debug_api.initialize(
            config_file=str(config), feature_dirs=[features], log_dir=str(tmp_path), default_logging_enabled=False
        )
    try:
        block = {"up": torch.nn.Linear(16, 16), "down": torch.nn.Linear(16, 16)}
        model = torch.nn.ModuleList([torch.nn.ModuleDict(block), torch.nn.ModuleDict(block)])
        debug_api.infer_and_assign_layer_names(model)

        def in_fp8(layer, gemm):
            answer = debug_api.transformer_engine.fp8_gemm_enabled(layer_name=layer, gemm=gemm, iteration=0)
            return answer[0] if isinstance(answer, tuple) else answer

        for gemm in ("fprop", "dgrad", "wgrad"):
            assert not in_fp8(".1.up", gemm)
            assert in_fp8(".0.up", gemm)
            assert in_fp8(".0.down", gemm) is (gemm == "fprop")
    finally:
        debug_api.end_debug()
