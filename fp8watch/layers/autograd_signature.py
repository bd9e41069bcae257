"""The signature of a forward, said once: torch asks for it in each call of an autograd.Function that has a setup_context.

Thread:     import

Working it out takes longer than all else that a small Linear does in Python.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

F = TypeVar("F", bound=type[torch.autograd.Function])


def signature_known(function: F) -> F:
    """Class decorator: its `forward` carries its own signature."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function
