"""Which optimizers are stepping right now, one inside the other.

Thread:     each has its own

Lookahead, SAM, ZeroRedundancyOptimizer and chains of optimizers call the step of another torch optimizer inside their own,
and torch tells of both. A step that raises has no end that torch tells of: whose step is still running is asked of the call
stack, and only where one begins inside another.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import CodeType, FrameType
from typing import NamedTuple

import torch

Optimizer = torch.optim.Optimizer


class Nesting(NamedTuple):
    """Of a step that has ended."""

    around: tuple[Optimizer, ...] = ()
    """Whose steps go on around it, the outermost first."""
    inside: tuple[Optimizer, ...] = ()
    """Those that have stepped inside it."""


ALONE = Nesting()
_COMPILER = ("/torch/_compile.py", "/torch/_dynamo/eval_frame.py")


class _Stepping(NamedTuple):
    """A step that has begun, and the call that it is."""

    optimizer: weakref.ref[Optimizer]  # a step that raised stays here until the next one, and keeps nothing alive
    frame: int  # id, because a frame that is held keeps all that it has alive
    code: CodeType
    inside: list[weakref.ref[Optimizer]]  # that have stepped in it


class NestedSteps(threading.local):
    """Follows the steps of all optimizers of a thread."""

    def __init__(self) -> None:
        self._running: list[_Stepping] = []

    def begins(self, optimizer: Optimizer) -> bool:
        """It is about to step: called by a hook that torch calls from the step itself. Whether it is not stepping already: a
        step of a subclass that calls its parent's is told of twice."""
        frame = _step(sys._getframe(2))
        if self._running:
            self._running = [s for s in self._running if _is_above(frame, s)]
        is_first = all(s.optimizer() is not optimizer for s in self._running)
        self._running.append(_Stepping(weakref.ref(optimizer), id(frame), frame.f_code, []))
        return is_first

    def ends(self, optimizer: Optimizer) -> Nesting | None:
        """It has stepped; None: its parent's step has, and its own goes on."""
        running = self._running
        at = next((i for i in reversed(range(len(running))) if running[i].optimizer() is optimizer), None)
        if at is None:  # begun before anybody listened
            return ALONE
        inside = running[at].inside
        del running[at:]
        if not running and not inside:
            return ALONE
        if any(one.optimizer() is optimizer for one in running):
            return None
        for one in running:
            one.inside.append(weakref.ref(optimizer))
        return Nesting(_alive([one.optimizer for one in running]), _alive(inside))


def _alive(optimizers: list[weakref.ref[Optimizer]]) -> tuple[Optimizer, ...]:
    return tuple(optimizer for ref in optimizers if (optimizer := ref()) is not None)


def _step(frame: FrameType) -> FrameType:
    """The frame of a step, from that which called its hook: frames of torch's compiler, which hooks are kept from, lie between."""
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_COMPILER):
        frame = frame.f_back
    return frame


def _is_above(frame: FrameType, stepping: _Stepping) -> bool:
    """Whether a call comes out of this step, at any depth."""
    above = frame.f_back
    while above is not None:
        if id(above) == stepping.frame and above.f_code is stepping.code:
            return True
        above = above.f_back
    return False
