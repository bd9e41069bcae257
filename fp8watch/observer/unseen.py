"""What observing computes in a forward, kept from modes of torch that write down or replay what is computed there.

Thread:     training

Selective activation checkpointing keeps outputs of chosen operators by their number, and hands them out again in backward. A
product of ours among them, made in the forward and not again in its recomputation, would shift those of the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch

P = ParamSpec("P")
R = TypeVar("R")

num_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
"""How many see what is computed now; a torch without this way to ask is taken to have none."""
without_modes: Any = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose operators no mode sees."""

    @functools.wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
        if not num_dispatch_modes():
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return hidden
