"""Passes that are no training: torch's pipelining learns the shapes between its stages from a forward, and a backward, of them.

Thread:     training

Each stage but the first runs it on memory that nothing was written into, in training mode and with gradients, before the
first micro-batch and again behind an evaluation. NaN in there is of no weight and no data, and no scale may remember it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from fp8watch.layers.custom_ops import nothing_counts

_STAGES = "torch.distributed.pipelining.stage"
_PREPARES = ("_prepare_forward_infra", "_prepare_backward_infra")


def wrap_shape_inference() -> Callable[[], None]:
    """Let nothing count while a stage finds its shapes; returns what undoes it. Where pipelining was not imported before attach
    there is nothing to wrap: it takes more than a second to import."""
    stage: Any = getattr(sys.modules.get(_STAGES), "PipelineStage", None)
    undo = [_wrap(stage, name) for name in _PREPARES if callable(getattr(stage, name, None))]

    def undo_all() -> None:
        for back in undo:
            back()

    return undo_all


def _wrap(cls: Any, name: str) -> Callable[[], None]:
    own = cls.__dict__.get(name)  # None: of a base class
    original = getattr(cls, name)

    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        with nothing_counts():
            return original(*args, **kwargs)

    setattr(cls, name, prepare)

    def undo() -> None:
        if cls.__dict__.get(name) is not prepare:
            return
        if own is None:
            delattr(cls, name)
        else:
            setattr(cls, name, own)

    return undo
