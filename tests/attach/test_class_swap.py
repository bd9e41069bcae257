"""Linears whose class mixes others in are taken over too, and one whose class lets nobody is left out and said."""

from __future__ import annotations

import abc
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Plain:
    """A mixin with a dict."""


class Abstract(abc.ABC):  # noqa: B024
    """One without."""


class Own:
    def forward(self, x):
        return F.linear(x, self.weight * 1.0, self.bias)


class Behind(nn.Linear, Plain): ...


class Before(Plain, nn.Linear): ...


class OfAbstract(Abstract, nn.Linear): ...


class OwnForward(Own, nn.Linear): ...


class OwnOfAbstract(Own, Abstract, nn.Linear): ...


CLASSES = [nn.Linear, Behind, Before, OfAbstract, OwnForward, OwnOfAbstract]


def trained(cls, attach=None, **how):
    torch.manual_seed(0)
    model = nn.Sequential(cls(64, 64), nn.ReLU(), cls(64, 64))
    watch = attach(model, **how) if attach is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    return model, watch


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_a_linear_that_mixes_others_in_is_watched_and_given_back(attach, cls, recipe) -> None:
    model, watch = trained(cls, attach, recipe=recipe)
    assert watch.summary()["internal_errors"] == {}
    looked_at = {module for module, operand, *_ in watch._recorder.step(-1)[1] if operand == "weight"}
    assert {"0", "2"} == looked_at or (recipe == "blockwise" and cls in (OwnForward, OwnOfAbstract))
    if recipe == "observe":
        assert all(map(torch.equal, model.parameters(), trained(cls)[0].parameters()))
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(same[0]) is cls
    watch.detach()
    assert type(model[0]) is cls
    assert not any("_fp8watch" in key for key in model[0].__dict__)


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_a_class_that_lets_nobody_subclass_it_is_left_out(attach, recipe, capsys) -> None:
    class Final(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    model, watch = trained(Final, attach, recipe=recipe)
    assert type(model[0]) is Final
    assert watch.summary()["num_steps"] == 3
    assert "the class of a Final cannot be swapped" in capsys.readouterr().err
