"""Custom ops that do something on the host in each call: note a row, count a call, look at an operand.

Shapes:     a function of tensors -> the op that torch.compile and autograd know     Thread: training

A CUDA graph replays what the device did, and nothing of what the host did beside it; and what is allocated while one is
recorded belongs to it. So such an op stays out of the graphs that `torch.compile(mode="reduce-overhead")` records: they are
cut around it, and it runs in each step. (Seen on an H200, torch 2.11: without the tag its first step raised "tensors in the
cudagraph pool not tracked as outputs".)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_HAS_TAGS = hasattr(torch.Tag, "cudagraph_unsafe") and "tags" in inspect.signature(torch.library.custom_op).parameters
_TAGS: dict[str, Any] = {"tags": [torch.Tag.cudagraph_unsafe]} if _HAS_TAGS else {}
"""A torch that has no such tag records what it records."""


def host_op(name: str, function: Callable[..., Any]) -> CustomOpDef:
    """Return `torch.library.custom_op` of the function, which writes to none of its arguments.

    Args:
        name: "fp8watch::" and the op's.
        function: of tensors, numbers and texts, annotated as `custom_op` wants it.
    """
    return torch.library.custom_op(name, mutates_args=(), **_TAGS)(function)
