"""The gradient norm of a step, seen where training clips it: what torch's `clip_grad_norm_` returned.

Shapes:     norms [] as torch returns them     Thread: training

Trainers clip with that function (Hugging Face, Lightning, accelerate), and so do most loops of one's own. A norm of
another order, of another model's parameters, or one that its ranks have still to add up (DTensor) is left alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

MIN_CLIPPED, MEASURED_STEPS = 16, 8
"""After so many steps in a row that were clipped, so many that are not have their norm measured here."""
Clipped = Callable[[list[Tensor], Tensor, float], None]
"""Is told of (parameters, their norm, what it is clipped to)."""


class GradientNorm:
    """Norms of the step that runs, of one watched model.

    Args:
        model: whose gradients they are of.
        holds: whether an optimizer that owns the step has a parameter, by its id: copies are clipped too.
    """

    def __init__(self, model: nn.Module, holds: Callable[[int], bool]) -> None:
        self._model, self._holds = model, holds
        self._ids: frozenset[int] = frozenset()
        self._norms: dict[int, Tensor] = {}
        self._clipped_to: float | None = None
        self._num_clipped = 0  # steps in a row
        self.to_measure = 0  # steps

    def see(self, parameters: list[Tensor], norm: Tensor, max_norm: float = math.inf) -> None:
        """Keep a norm of order 2, as it is: it is read when the step closes."""
        if not parameters or type(norm) not in (Tensor, nn.Parameter) or norm.dim() or torch.compiler.is_compiling():
            return
        first = id(parameters[0])
        if first not in self._ids and not self._holds(first):
            self._ids = frozenset(id(p) for p in self._model.parameters())  # FSDP2 replaces them
            if first not in self._ids:
                return
        self._norms[first] = norm.detach().clone()
        if 0 < max_norm < math.inf:  # trainers that only measure give Inf
            self._clipped_to = max_norm

    def take_limit(self) -> float | None:
        """What gradients were clipped to in this step; None where nothing clipped them."""
        limit, self._clipped_to = self._clipped_to, None
        if limit is not None:
            self._num_clipped, self.to_measure = self._num_clipped + 1, 0
        else:
            self.to_measure = MEASURED_STEPS if self._num_clipped >= MIN_CLIPPED else max(0, self.to_measure - 1)
            self._num_clipped = 0
        return limit

    @torch.no_grad()
    def measure(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. Where training has just stopped to clip, nobody says the norm any more: it is measured
        for some steps. Gradients that a GradScaler has not unscaled, and those of other kinds of tensors, are left alone."""
        if not self.to_measure or getattr(optimizer, "grad_scale", None) is not None:
            return
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not held or id(held[0]) in self._norms or not (id(held[0]) in self._ids or self._holds(id(held[0]))):
            return
        if any(type(p.grad) is not Tensor or p.grad.is_sparse for p in held):
            return
        norms = torch._foreach_norm([p.grad.detach() for p in held])
        if len({n.device for n in norms}) == 1:
            self._norms[id(held[0])] = torch.stack([n.float() for n in norms]).square().sum().sqrt()

    def take(self) -> Tensor | None:
        """The norm of all gradients that were clipped in this step; None where none were. [] as it was returned"""
        norms, self._norms = list(self._norms.values()), {}
        if len(norms) < 2:
            return norms[0] if norms else None
        return torch.stack([n.float().to(norms[0].device) for n in norms]).square().sum().sqrt()


def wrap_clipping(tell: Clipped) -> Callable[[], None]:
    """Let `tell` know of each call of `clip_grad_norm_` with norms of order 2; returns what undoes it."""
    original = clip_grad.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or norm_type not in (2, 2.0, "2"):
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        again: Iterable[Tensor] = (p for p in given) if isinstance(parameters, GeneratorType) else given
        norm = original(again, max_norm, norm_type, *args, **kwargs)
        tell(given, norm, _number(max_norm))
        return norm

    places: tuple[Any, ...] = (clip_grad, torch.nn.utils)
    for place in places:
        place.clip_grad_norm_ = clip_grad_norm_

    def undo() -> None:
        for place in places:
            if place.clip_grad_norm_ is clip_grad_norm_:
                place.clip_grad_norm_ = original

    return undo


def _number(x: Any) -> float:
    """A number as it is; NaN for one that lies on a device."""
    return math.nan if isinstance(x, Tensor) else float(x)
