"""Which pass a call belongs to: the outermost forward, or one backward. Delayed scales roll once for each.

Thread:     training, and autograd's

A backward is one of autograd's graph tasks, which have numbers. A forward ends where the module that was given to
attach returns: a hook says so, through an op, so that it is said in compiled graphs too. Where the hook does not run
(compiled before attach, or training that calls parts of the model), a forward has ended when one begins after a
backward. Forwards without gradients and recomputations are no passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs now in this thread, -1 outside of one. A forward operand inside of a backward is a
recomputation by activation checkpointing."""


def in_backward() -> bool:
    """Whether this runs inside of a backward."""
    return graph_task() != -1


class _Forward(Enum):
    OVER = "over"
    RUNNING = "running, or nobody said that it ended"
    WITHOUT_GRAD = "ended without gradients: a pass only if it is recomputed, as reentrant checkpointing does"


@dataclass
class Passes:
    """Numbers of the running passes. A quantiser that sees another number than at its last call is in a new pass."""

    forward: int = 0
    backward: int = 0
    _state: _Forward = _Forward.OVER
    _backward_since: bool = False
    _recomputed: bool = False
    _task: int = -1

    def in_forward(self) -> int:
        """A forward operand is quantised, and it counts."""
        if self._backward_since and self._ended():
            self.forward += 1
        self._backward_since = self._recomputed = False
        self._state = _Forward.RUNNING
        return self.forward

    def in_backward(self) -> int:
        """A gradient is quantised."""
        task = graph_task()
        if task != self._task:
            self._task = task
            self.backward += 1
        self._backward_since = True
        return self.backward

    def recomputes(self) -> None:
        """A forward operand is quantised again, inside a backward."""
        self._recomputed = True

    def forward_ended(self, *, grad: bool) -> None:
        """The outermost forward returned, with gradients enabled or not."""
        if self._state is _Forward.OVER:
            return
        if grad:
            self.forward += 1
            self._state = _Forward.OVER
        elif self._state is _Forward.RUNNING:
            self._state = _Forward.WITHOUT_GRAD

    def close_passes(self) -> int:
        """Between steps: the number that the next forward would have."""
        if self._backward_since and self._ended():
            self.forward += 1
            self._state = _Forward.OVER
        return self.forward

    def _ended(self) -> bool:
        return self._state is _Forward.RUNNING or (self._state is _Forward.WITHOUT_GRAD and self._recomputed)


MAX_PARTS = 4096


def first_tensor(output: Any, *, with_gradient: bool = False) -> Tensor | None:
    """Some tensor of a forward's output, so that what is called with it comes after the forward in every graph; the
    first that a gradient comes to, where that is asked for and there is one.

    An output may hold itself: after MAX_PARTS parts nothing more is looked for.
    """
    waiting: list[Any] = [output]
    found: Tensor | None = None
    for _ in range(MAX_PARTS):
        if not waiting:
            break
        part = waiting.pop()
        if isinstance(part, Tensor):
            found = part if found is None or part.requires_grad else found
            if not with_gradient or found.requires_grad:
                return found
            continue
        if isinstance(part, Mapping):
            part = tuple(part.values())
        if isinstance(part, (tuple, list)):
            waiting.extend(reversed(part))
    return found
