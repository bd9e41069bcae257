"""Products with weights that a model computes: asked of the first forward whose activations are known, told at the end of its step.

Shapes:     what the root module returned -> weights [N, K] and what they are made of
Thread:     training, once
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.unseen import unseen
from fp8watch.selection.computed_weights import ComputedWeight, computed_weights
from fp8watch.selection.flop_coverage import Coverage
from fp8watch.selection.wrappers import named_modules
from fp8watch.session.sites import SlabSite

WEIGHT = "weight"
"""Operand whose rows are no tokens."""


class ComputedProducts:
    """What the model multiplies with besides its parameters, once a forward ran."""

    def __init__(self, model: nn.Module, plan: ObservationPlan, table: Sequence[SlabSite]) -> None:
        self._model, self._plan, self._table = model, plan, table
        self._weights: set[ComputedWeight] = set()
        self._names: dict[int, str] = {}
        self.is_news = False  # some were found, and nobody has been told
        self.hook = model.register_forward_hook(FirstForward(self))

    def see(self, returned: Any) -> None:
        """A forward of training has returned this."""
        shapes, table = self._plan.sites.shapes, self._table
        rows = {shape[0] for row, shape in shapes.items() if table[row].operand != WEIGHT}
        if not rows:
            return
        self.hook.remove()
        names = {
            id(p): f"{fqn}.{name}".lstrip(".")
            for fqn, module in named_modules(self._model)
            for name, p in module.named_parameters(recurse=False)
        }
        if found := computed_weights(returned, names, rows):
            self._weights, self._names, self.is_news = found, names, True

    def besides(self, covered: Coverage) -> Coverage:
        """What is observed, where these products are FLOPs as well."""
        return covered.besides(self._weights, self._names)

    def failed(self, error: Exception) -> None:
        """Asked no more."""
        self.hook.remove()
        self._plan.guard.swallow("computed weights", error)


class FirstForward:
    """Forward hook of the root module, until one has shown what it multiplies with. A copy or a pickle of the model gets a hook of the
    standard library that does nothing."""

    def __init__(self, products: ComputedProducts) -> None:
        self._products = products

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not module.training or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        try:
            unseen(self._products.see)(output)
        except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
            self._products.failed(error)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
