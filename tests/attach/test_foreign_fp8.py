"""A model that computes in FP8 by somebody else's modules is watched as it is: nothing of it is converted unasked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attach.stored_linear import StoredLinear
from torch import nn

from fp8watch.selection.foreign_fp8 import foreign_fp8


class Float8Linear(nn.Linear):
    """As torchao's: a Linear with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


Float8Linear.__module__ = "torchao.float8.float8_linear"


class MXWeight(torch.Tensor):
    """As a wrapper around a parameter."""


MXWeight.__module__ = "torchao.prototype.moe_training.tensor"


def wrapped() -> nn.Linear:
    module = nn.Linear(64, 64)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(MXWeight))
    return module


ASSUMED = ", 1 of them observed as blockwise: it does not say how it casts"
FOREIGN = {
    "own forward": (lambda: Float8Linear(64, 64), "torchao Float8Linear", ASSUMED),
    "float8 dtype": (StoredLinear, "float8_e4m3fn", ""),
    "wrapped parameter": (wrapped, "torchao MXWeight", ""),
}


class Model(nn.Module):
    def __init__(self, foreign: nn.Module) -> None:
        super().__init__()
        self.foreign = foreign
        self.adapter, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.adapter(x)).square().mean()


@pytest.mark.parametrize("name", FOREIGN)
def test_its_linears_are_left_in_the_numerics_they_have(name: str, attach: Any, capsys: Any) -> None:
    make, told, how = FOREIGN[name]
    model = Model(make())
    x = torch.randn(32, 64)
    before = model(x)
    watch = attach(model)
    assert capsys.readouterr().err.startswith(
        f"fp8watch: model computes in FP8 already ({told}): nothing is converted{how}, 2 Linears observed as they are; "
        "recipe='blockwise' to convert them"
    )
    loss = model(x)
    assert torch.equal(loss, before)
    loss.backward()
    watch.step()
    assert {s.module for s in watch._recorder.sites} == {"adapter", "out"}


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_recipe_that_is_asked_for_converts_them(
    by: str, attach: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(StoredLinear())
    x = torch.randn(32, 64)
    before = model(x)
    if by == "variable":
        monkeypatch.setenv("FP8WATCH_RECIPE", "blockwise")
        attach(model)
    else:
        attach(model, recipe="blockwise")
    assert "2 Linears now compute in FP8 (blockwise" in capsys.readouterr().err
    assert not torch.equal(model(x), before)


def test_a_model_without_any_is_converted_as_before(attach: Any, capsys: Any) -> None:
    attach(Model(nn.LayerNorm(64)))
    assert "2 Linears now compute in FP8 (blockwise" in capsys.readouterr().err


def test_what_is_found_is_counted_by_kind() -> None:
    class FP8ColumnParallelLinear(nn.Module):
        pass

    model = nn.Sequential(Float8Linear(16, 16), Float8Linear(16, 16), FP8ColumnParallelLinear(), nn.Linear(16, 16))
    assert foreign_fp8(model) == "torchao Float8Linear, 2 of them, 1 of other kinds"
    assert foreign_fp8(nn.Sequential(nn.Linear(16, 16), nn.Embedding(4, 16))) is None


def test_a_model_of_linears_is_not_foreign_for_its_name(attach: Any, capsys: Any) -> None:
    class FP8LinearNet(Model):
        pass

    attach(FP8LinearNet(nn.Identity()))
    assert "2 Linears now compute in FP8 (blockwise" in capsys.readouterr().err


def test_a_model_attached_before_is_not_foreign(attach: Any) -> None:
    model = Model(nn.Identity())
    attach(model)
    assert foreign_fp8(model) is None


def test_a_module_may_call_a_list_of_its_own_buffers(attach):
    class Buckets(torch.nn.Module):  # as Megatron's data parallelism does
        def __init__(self):
            super().__init__()
            self.module, self.buffers = torch.nn.Linear(32, 32), []

        def forward(self, x):
            return self.module(x).square().mean()

    model = Buckets()
    watch = attach(model)
    model(torch.randn(8, 32)).backward()
    watch.step()
    assert len(watch._recorder.steps) == 1
    assert not watch.guard.errors
