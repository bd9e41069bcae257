"""Transformer Engine that is missing, broken or of an unknown version is a reason, never an error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from te.conftest import forget
from torch import nn

from fp8watch.integrations import te_modules
from fp8watch.integrations.te_recipe import observing_recipe
from fp8watch.integrations.transformer_engine import TeObserver, load
from fp8watch.quantize.stats import TileStats
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


def test_the_custom_recipe_shows_every_operand(te: ModuleType) -> None:
    from transformer_engine.pytorch.quantized_tensor import DType, Float8BlockQuantizer

    mlp = te.LayerNormMLP(128, 384)
    seen: dict[int, TileStats] = {}
    modules = te_modules.find(nn.Sequential(mlp).named_modules())
    guard = Guard()
    observer = TeObserver(modules, 0, lambda row, shape, stats: seen.__setitem__(row, stats), guard)
    assert observer.start() is None

    class Role:
        def __init__(self, tensor_type: str) -> None:
            self.tensor_type = tensor_type

    def stock(role: Role) -> Float8BlockQuantizer:
        return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2 if role.tensor_type == "weight" else 1)

    recipe = observing_recipe(stock, observer, backward_override=None)
    mlp.make_quantizers(lambda kind: recipe.qfactory(Role(kind)))
    mlp(torch.randn(64, 128, requires_grad=True)).square().sum().backward()
    assert dict(guard.errors) == {}
    assert len(seen) == 10
    assert all(stats.measured & Measured.ENERGIES for stats in seen.values())  # all exact, those inside the MLP too
    quantizer = mlp.quantizers[0][0]
    quantizer.internal = True
    assert quantizer.inner.internal
    assert quantizer.copy().inner is not quantizer.inner
    assert quantizer.amax_epsilon == 0.0


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
