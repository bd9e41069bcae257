"""What a block keeps for its backward pass, and keeps too coarsely: activations that are compressed with one scale for a whole tensor.

Severity is the relative error of what comes back.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from proving.faults._base import ERRORS, Lasting, log_uniform, onset, relative_error, role, some_of, until
from proving.training import Expected, Training
from torch import Tensor, nn

_NARROWEST = 16
"""Rows shorter than this are statistics of norms and sums of attention, and are kept as they are."""


class SavedWithOneScale(Lasting):
    """Activations wait for the backward pass in eight bits, with one scale for a whole tensor that some large number has set, so that few of
    the levels are left for all others (COAT, arXiv 2410.19313, takes a scale a group for that; megablocks #23, pytorch #64729). The loss
    of the step is right, the gradients of norms and activations are not: operands of the GEMMs have their own copies. How coarse the
    levels are follows from the error that was drawn."""

    name = "saved-with-one-scale"

    def __init__(self, *, modules: list[str], error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.error = modules, error
        self.spared = 0
        """How many modules that keep their own copies are running."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> SavedWithOneScale | None:
        blocks = role(training, "blocks")
        if not blocks:
            return None
        modules = some_of(rng, blocks, 1, len(blocks))
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.7),
            severity=severity,
            expected=Expected(
                ("silent-data-corruption", "recipe-mismatch", "scalar-shift"), tuple(modules), None, None
            ),
            drawn={"asked_error": round(error, 3), "num_modules": len(modules), "module": modules[0]},
            modules=modules,
            error=error,
        )

    def begin(self, t: Training) -> None:
        attention = set(role(t, "attention")) - set(role(t, "blocks"))
        for name in self.modules:
            block = t.model.get_submodule(name)
            for inner, module in block.named_modules(prefix=name):
                if isinstance(module, nn.Linear) or inner in attention:
                    self.later(module.register_forward_pre_hook(self._enters).remove)
                    self.later(module.register_forward_hook(self._leaves, always_call=True).remove)
            own = block.__dict__.get("forward")
            block.forward = functools.partial(self._compressed, block, block.forward)  # type: ignore[method-assign]
            if own is None:
                self.later(functools.partial(block.__dict__.pop, "forward", None))
            else:
                self.later(functools.partial(setattr, block, "forward", own))

    def _enters(self, *_: Any) -> None:
        self.spared += 1

    def _leaves(self, *_: Any) -> None:
        self.spared -= 1

    def _compressed(self, block: nn.Module, forward: Any, *given: Any, **named: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*given, **named)
        with torch.autograd.graph.saved_tensors_hooks(self.kept, lambda x: x):
            return forward(*given, **named)

    def kept(self, x: Tensor) -> Tensor:
        """A saved tensor as it comes back."""
        if self.spared or not x.is_floating_point() or x.ndim < 2 or x.shape[-1] < _NARROWEST:
            return x
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            return x
        coarse = self.levels(x.detach())
        if float(x.detach().abs().max()) > 0:
            self.note(error=relative_error(coarse, x.detach()))
        return coarse

    def levels(self, x: Tensor) -> Tensor:
        """Rounded to equal steps; of a normal distribution the error is the one that was drawn."""
        rms = float(x.float().square().mean().sqrt())
        if not (rms > 0 and math.isfinite(rms)):
            return x
        step = math.sqrt(12) * self.error * rms
        return ((x.float() / step).round() * step).to(x.dtype)
