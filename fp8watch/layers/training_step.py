"""The loss of a LightningModule, which it returns from `training_step` and not from `forward`.

Shapes:     loss []     Thread: training

Lightning calls `training_step` itself, so a forward hook sees the loss under some strategies only. The class of the module
is swapped, as that of a Linear is, for one that looks at what `training_step` returns, or, under manual optimization, at
what `manual_backward` is given. Its copies and pickles are of the plain class.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.layers.custom_ops import note_loss
from fp8watch.observer.step_state import StepState
from fp8watch_agent.guard import Guard

_KEY = "_fp8watch_training_step"


class LossOfTrainingStep:
    """What one watch sees of a LightningModule's loss; `remove` gives the module its class back.

    Args:
        module: the LightningModule.
        step: of the watch.
        site: any of the watch.
        guard: counts what goes wrong.
    """

    def __init__(self, module: nn.Module, step: StepState, site: Tensor, guard: Guard) -> None:
        self._module, self._step, self._site, self._guard = module, step, site, guard
        module.__dict__[_KEY] = self
        if not isinstance(module, _WatchedTrainingStep):
            module.__class__ = _watched_class(type(module))

    def num_losses(self) -> int:
        """How many were seen in the step that runs."""
        return len(self._step.losses)

    def note(self, loss: Any, before: int | None = None) -> None:
        """Keep a loss; those that were seen since there were `before` are parts of it."""
        self._guard.run("loss", self._note, loss, before)

    def _note(self, loss: Any, before: int | None) -> None:
        if isinstance(loss, Mapping):
            loss = loss.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return
        if before is not None:
            del self._step.losses[before:]
        note_loss(loss.detach().reshape(()), self._site, False, torch.is_grad_enabled())

    def remove(self) -> None:
        """Undo it. When another class came on top since, the class stays and only this goes."""
        if self._module.__dict__.get(_KEY) is not self:
            return
        del self._module.__dict__[_KEY]
        plain = type(self._module).__dict__.get("_fp8watch_plain")
        if plain is not None:
            self._module.__class__ = plain


class _WatchedTrainingStep(nn.Module):
    """Mixin over the class of a LightningModule; without its entry it is the plain module."""

    _fp8watch_plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the plain class, and report to nobody."""
        own = getattr(self, "__getstate__", None)
        state = self.__dict__ if own is None else own()
        if isinstance(state, dict):
            state = {k: v for k, v in state.items() if k != _KEY}
        return copyreg._reconstructor, (self._fp8watch_plain, object, None), state  # type: ignore[attr-defined]


def _watched_step(own: Callable[..., Any]) -> Callable[..., Any]:
    """A `training_step` that shows what it returns. Lightning looks up what a step takes, and finds it in what is wrapped."""

    @functools.wraps(own)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = self.__dict__.get(_KEY)
        if seen is None or not self.automatic_optimization:
            return own(self, *args, **kwargs)
        before = seen.num_losses()
        output = own(self, *args, **kwargs)
        seen.note(output, before)
        return output

    return training_step


def _watched_backward(own: Callable[..., Any]) -> Callable[..., Any]:
    """A `manual_backward` that shows what it is given."""

    @functools.wraps(own)
    def manual_backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        seen = self.__dict__.get(_KEY)
        if seen is not None and not self.automatic_optimization:
            seen.note(loss)
        return own(self, loss, *args, **kwargs)

    return manual_backward


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _watched_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The watched subclass of a LightningModule's own class, made once."""
    if plain not in _classes:
        lightning: Any = plain
        names = {
            "_fp8watch_plain": plain,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "training_step": _watched_step(lightning.training_step),
            "manual_backward": _watched_backward(lightning.manual_backward),
        }
        _classes[plain] = type(plain.__name__, (_WatchedTrainingStep, plain), names)
    return _classes[plain]
