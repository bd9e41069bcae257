"""Transformer Engine that is missing, broken or of an unknown version is a reason, never an error."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from te.conftest import forget
from torch import nn

from fp8watch.integrations import te_modules
from fp8watch.integrations.te_recipe import observing_recipe, operand_of
from fp8watch.integrations.transformer_engine import TeObserver, load
from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.guard import Guard
from fp8watch_agent.record import Measured


def nobody(row: int, shape: tuple[int, int], stats: TileStats) -> None:
    raise AssertionError("nothing can be seen")


@pytest.mark.parametrize("error", ["ImportError", "OSError", "FileNotFoundError", "RuntimeError", "AttributeError"])
def test_any_failure_to_import_is_a_reason(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"raise {error}('libtransformer_engine.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package, reason = load()
    assert package is None
    assert reason == f"transformer_engine cannot be imported ({error}: libtransformer_engine.so)"
    assert TeObserver([], 0, nobody, Guard()).start() == reason
    forget()


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert "cannot be imported (" in load()[1]
    with pytest.raises(RuntimeError, match="a custom recipe cannot be made: transformer_engine cannot be imported"):
        observing_recipe(lambda role: None, TeObserver([], 0, nobody, Guard()))


def test_an_unknown_version_is_a_reason(te: ModuleType) -> None:
    from transformer_engine.pytorch.module import grouped_linear, layernorm_linear, layernorm_mlp, linear

    for module in (linear, layernorm_linear, layernorm_mlp):
        del module.general_gemm
    del grouped_linear.general_grouped_gemm
    reason = TeObserver([], 0, nobody, Guard()).start()
    assert "transformer_engine 2.20.imitation has no general_gemm" in str(reason)


class Role:
    """What a factory is asked with from 2.16 on."""

    def __init__(self, tensor_type: str) -> None:
        self.tensor_type = tensor_type


@pytest.mark.parametrize("word", [Role, "linear_{}".format], ids=["objects", "words"])
@pytest.mark.parametrize("kind", ["block", "mx"])
def test_the_custom_recipe_shows_every_operand(te: ModuleType, kind: str, word: Any) -> None:
    from transformer_engine.pytorch.quantized_tensor import DType, Float8BlockQuantizer, MXFP8Quantizer

    model = nn.Sequential(te.Linear(128, 128), te.LayerNormMLP(128, 384))  # with a bias, as is the default
    seen: dict[int, TileStats] = {}
    guard = Guard()
    modules = te_modules.find(model.named_modules())
    observer = TeObserver(modules, 0, lambda row, shape, stats: seen.__setitem__(row, stats), guard)
    assert observer.start() is None

    def stock(role: Any) -> Any:
        if kind == "mx":
            return MXFP8Quantizer(DType.kFloat8E4M3)
        return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2 if operand_of(role) == "weight" else 1)

    recipe = observing_recipe(stock, observer, backward_override=None)
    for module in model:
        module.make_quantizers(recipe.qfactory, word)
    model(torch.randn(64, 128, requires_grad=True)).square().sum().backward()
    assert dict(guard.errors) == {}
    assert len(seen) == 15
    assert all(stats.measured & Measured.ENERGIES for stats in seen.values())  # all exact, those inside the MLP too


def test_a_shown_quantiser_is_of_its_own_class_and_its_copies_are_plain(te: ModuleType) -> None:
    from transformer_engine.pytorch.quantized_tensor import DType, Float8BlockQuantizer

    observer = TeObserver([], 0, nobody, Guard())
    made = observing_recipe(lambda role: Float8BlockQuantizer(DType.kFloat8E4M3), observer).qfactory(None)
    assert type(made) is Float8BlockQuantizer
    assert made.make_empty((1, 128))._rowwise_data.shape == (1, 128)
    made.set_usage(rowwise=True, columnwise=False)
    for again in (made.copy(), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(again) is Float8BlockQuantizer
        assert vars(again) == {name: value for name, value in vars(made).items() if name in vars(again)}
        assert not {"quantize_impl", "update_quantized", "custom", "make_empty", "copy"} & set(vars(again))
        assert again.columnwise_usage is False


def test_on_real_transformer_engine() -> None:
    """Where it is installed with a GPU: the same sites as in the imitation, without errors inside."""
    forget()
    package, reason = load()
    if package is None or not torch.cuda.is_available():
        pytest.skip(f"needs Transformer Engine and a GPU: {reason}")
    from transformer_engine.common.recipe import Float8BlockScaling

    model = nn.Sequential(
        package.LayerNormLinear(512, 1024), package.Linear(1024, 512), package.LayerNormMLP(512, 2048)
    ).cuda()
    modules = te_modules.find(model.named_modules())
    seen: set[int] = set()
    guard = Guard()
    observer = TeObserver(modules, 0, lambda row, shape, stats: seen.add(row), guard)
    assert observer.start() is None
    with package.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        out = model(torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True))
    out.float().square().mean().backward()
    observer.stop()
    assert dict(guard.errors) == {}
    assert seen == set(range(20))
