"""What a diagnosis runs on: a model, a batch and a loss, from arguments, or from a function that a command names.

Thread:     the caller's
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LossFn = Callable[[nn.Module, Any], Tensor]

SUBJECT_HELP = (
    "MODULE:FUNCTION, called without arguments; returns (model, batch), (model, batch, loss_fn) or "
    "(model, batch, loss_fn, optimizer). A batch that is an iterator gives one batch a step"
)


class Subject(NamedTuple):
    """What a function named on a command line returned."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None = None
    optimizer: torch.optim.Optimizer | None = None

    def batches(self) -> Iterator[Any]:
        """The batches of an iterator; of anything else the same one again and again."""
        if isinstance(self.batch, Iterator):
            yield from self.batch
        else:
            while True:
                yield self.batch

    def one(self) -> Any:
        """The first batch.

        Raises:
            ValueError: the iterator is empty.
        """
        for batch in self.batches():
            return batch
        raise ValueError("batch is an iterator without batches: give at least one")


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that computes it itself: called with the batch's items, its output is 0-d, or has `.loss`.

    Raises:
        TypeError: the output is no loss.
    """
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, (tuple, list)):
        out = model(*batch)
    else:
        out = model(batch)
    found = getattr(out, "loss", None)
    if found is None and isinstance(out, Mapping):
        found = out.get("loss")
    if found is None:
        found = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"the model returned {what}: must be a loss of one element, or have one as .loss; give loss_fn=(model, batch) -> loss"
        )
    return found


def checked_loss(loss: Any) -> Tensor:
    """What a loss function returned.

    Raises:
        TypeError: not a tensor of one element.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn returned {shape}: must be a Tensor of one element")
    return loss


OF_THEIRS = "install what your own code needs, or set PYTHONPATH; --traceback shows where it is asked for"


def load_subject(name: str) -> Subject:
    """Import and call a function "module:function"; the working directory is searched, too.

    Raises:
        ValueError: the name cannot be found or called, or what it returns is no model with a batch; name, rule, remedy.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"{name!r}: must be MODULE:FUNCTION, such as my_training:build")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise ValueError(f"{name!r}: {module_name} cannot be imported: {e}; {OF_THEIRS}") from e
        raise ValueError(
            f"{name!r}: there is no module {module_name}; run from the folder that holds it, or set PYTHONPATH"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ValueError(
            f"{name!r}: {module_name} has no function {function_name}; it has {', '.join(known) or 'none'}"
        )
    try:
        made = function()
    except ModuleNotFoundError as e:
        raise ValueError(f"{name!r}: {function_name} failed: {e}; {OF_THEIRS}") from e
    return as_subject(made, name)


def as_subject(made: Any, name: str) -> Subject:
    """A function's result as a Subject.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
        raise ValueError(f"{name!r} returned {type(made).__name__}: must be (model, batch[, loss_fn[, optimizer]])")
    subject = Subject(*made)
    if not isinstance(subject.model, nn.Module):
        raise ValueError(f"{name!r} returned a {type(subject.model).__name__} first: must be a torch.nn.Module")
    if subject.loss_fn is not None and not callable(subject.loss_fn):
        raise ValueError(f"{name!r} returned loss_fn={subject.loss_fn!r}: must be a function (model, batch) -> loss")
    if subject.optimizer is not None and not isinstance(subject.optimizer, torch.optim.Optimizer):
        raise ValueError(f"{name!r} returned optimizer={type(subject.optimizer).__name__}: must be a torch optimizer")
    return subject
