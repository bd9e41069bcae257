"""The loss of transformers' Trainer where it smooths labels: the model returns none then.

Shapes:     the loss of a micro-batch [], where it lies     Thread: training

With `label_smoothing_factor` the Trainer takes the labels from the model and gives its logits to a LabelSmoother. What that
returns is a mean, or a share of the whole step's where it is given the tokens of that, before anything is divided or scaled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MODULE, NAME = "transformers.trainer_pt_utils", "LabelSmoother"
PLACE = 3  # of num_items_in_batch, where it is given by its place
Loss = Callable[[Tensor, bool], None]
"""Is told of (loss, whether it is a share that adds up)."""


def wrap_label_smoother(tell: Loss) -> Callable[[], None]:
    """Let `tell` know of each smoothed loss with gradients; returns what undoes it. Who trains with it has imported it."""
    cls: Any = getattr(sys.modules.get(MODULE), NAME, None)
    if cls is None:
        return lambda: None
    original = cls.__call__

    @functools.wraps(original)
    def smoothed(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad and not torch.compiler.is_compiling():
            num_items = args[PLACE] if len(args) > PLACE else kwargs.get("num_items_in_batch")
            tell(loss, num_items is not None)
        return loss

    cls.__call__ = smoothed

    def undo() -> None:
        if cls.__call__ is smoothed:
            cls.__call__ = original

    return undo
