"""The targets of a loss, seen where training calls torch's `cross_entropy`.

Shapes:     targets [any] integers, as given     Thread: training

`nn.CrossEntropyLoss` and the losses of transformers call the same function. Targets that are probabilities, and losses
that are not torch's, show nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8watch.observer.pass_counter import graph_task

Targets = Callable[[Tensor, int], None]
"""Is told of (targets, the one that is not scored)."""


def wrap_cross_entropy(tell: Targets) -> Callable[[], None]:
    """Let `tell` know of each call in a forward pass with gradients; returns what undoes it."""
    original = F.cross_entropy

    @functools.wraps(original)
    def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = original(input, target, *args, **kwargs)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and graph_task() == -1:
            ignored = args[2] if len(args) > 2 else kwargs.get("ignore_index", -100)
            tell(target, ignored if isinstance(ignored, int) else -100)
        return loss

    F.cross_entropy = cross_entropy

    def undo() -> None:
        if F.cross_entropy is cross_entropy:
            F.cross_entropy = original

    return undo
