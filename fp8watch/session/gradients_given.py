"""Whether autograd gave a parameter a gradient, or `.grad` only holds something: zeros that somebody put there, or what a
wrapper makes of parameters that were not used.

Shapes:     a parameter whose `.grad` is there -> whether backward came to it
Thread:     training; hooks in that of the backward

On the CPU what is there tells: more than zeros. Elsewhere nothing is read back: a hook on the parameter hears of the next steps'
gradients, and is taken off behind them.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn

STEPS = 3
"""Ends of steps that a hook stays: what arrives late of a device may be asked of while the next step is on its way."""
MAX_HOOKS = 64


class GradientsGiven:
    """Of the parameters of one model that were asked for."""

    def __init__(self) -> None:
        self._heard: set[int] = set()
        self._given: dict[int, weakref.ref[Tensor]] = {}
        self._hooks: dict[int, tuple[Tensor, Any]] = {}  # id -> parameter, handle
        self.left = 0  # ends of steps until the hooks are taken off; 0: there is none
        weakref.finalize(self, _let_go, self._hooks).atexit = False

    def came_to(self, p: Tensor) -> bool:
        """Whether backward is known to have come to this parameter; if not, and it cannot be read, it is listened for."""
        known = self._given.get(id(p))
        if known is not None and known() is p:
            return True
        if (here := _on_host(p.grad)) is not None:
            return here
        if type(p) in (Tensor, nn.Parameter) and p.requires_grad and len(self._hooks) < MAX_HOOKS:
            if id(p) not in self._hooks:
                hook = partial(_hear, self._heard, id(p))
                hook.__torch_unserializable__ = True  # type: ignore[attr-defined]
                self._hooks[id(p)] = p, p.register_hook(hook)  # type: ignore[no-untyped-call]
            self.left = STEPS
        return False

    def step_ended(self) -> bool:
        """A step has; whether more is known than before it."""
        news = [p for number, (p, _) in self._hooks.items() if number in self._heard and number not in self._given]
        self._given.update((id(p), weakref.ref(p)) for p in news)
        self.left = max(0, self.left - 1)
        if self._hooks and not self.left:
            self.stop()
        return bool(news)

    def stop(self) -> None:
        """Leave nothing on the parameters."""
        _let_go(self._hooks)
        self._heard.clear()


def _hear(heard: set[int], number: int, _: Tensor) -> None:
    heard.add(number)


def _let_go(hooks: dict[int, tuple[Tensor, Any]]) -> None:
    while hooks:
        hooks.popitem()[1][1].remove()


def _on_host(gradient: Tensor | None) -> bool | None:
    """Whether a gradient holds more than zeros; None where that is not read."""
    if gradient is None:
        return False
    local = getattr(gradient, "_local_tensor", gradient)
    if type(local) not in (Tensor, nn.Parameter) or not local.is_cpu:
        return None
    return bool(local.any())
