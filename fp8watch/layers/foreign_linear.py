"""A Linear with a forward of its own, which computes as before: its operands, output and gradient are looked at.

Shapes:     x [..., K] -> y [..., N], whatever the module makes of it
Thread:     training, and autograd's
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.computed_weight import is_computed
from fp8watch.layers.custom_ops import plan_of
from fp8watch.layers.foreign_turn import Turn, begin_turn, behind, enter, leave
from fp8watch.layers.fp8_linear import SITE_KEY, WatchedLinear, observed


class ForeignLinear(WatchedLinear):
    """Mixin over the class of a Linear with a forward of its own. Without its site it is that module again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the module's own forward takes and gives; looked at where that is one operand and one product."""
        site, own = self.__dict__.get(SITE_KEY), self._fp8watch_base.forward
        if not args and not torch.compiler.is_compiling() and (name := _first_name(own)) in kwargs:
            args = (kwargs.pop(name),)
        if not args:
            return own(self, **kwargs)
        input, args = args[0], args[1:]
        computed = "parametrizations" in self._modules and is_computed(self)  # to be read by its own forward alone
        if site is None or not self.training or computed or not self._is_operand(input):
            return own(self, input, *args, **kwargs)
        turn = None
        if not torch.compiler.is_compiling():
            plan = plan_of(site)
            turn = (
                None
                if plan is None
                else plan.guard.call("turn", lambda: begin_turn(site, input, self.weight, self.bias), None)
            )
        if turn is None:
            y = own(self, input, *args, **kwargs)
        else:
            seen_input = behind(turn, input)
            enter(turn)
            try:
                y = own(self, seen_input, *args, **kwargs)
            finally:
                leave()
        if not isinstance(y, Tensor) or y.shape != (*input.shape[:-1], self.out_features) or not y.is_floating_point():
            return y
        if turn is not None:
            turn.plan.guard.run("foreign", _begin_watching, turn, y, self.weight)
        return observed(self, input, self.weight, y, site)

    def _is_operand(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and not x.is_nested
            and x.layout == torch.strided
            and x.dim() > 0
            and x.shape[-1] == self.in_features
        )


@lru_cache
def _first_name(forward: Callable[..., Any]) -> str | None:
    """How a module's own forward calls what it is given first; None where it does not say, as one that is no Python."""
    try:
        first = list(inspect.signature(forward).parameters.values())[1:2]
    except (TypeError, ValueError):
        return None
    return first[0].name if first and first[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None


def _begin_watching(turn: Turn, y: Tensor, weight: Tensor) -> None:
    turn.saw_output(y)
    if y.requires_grad:
        y.register_hook(lambda gradient: turn.plan.guard.run("foreign gradient", turn.saw_gradient, gradient))  # type: ignore[no-untyped-call]
        turn.watch_weight(weight)
