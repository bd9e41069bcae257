"""What is known of each optimizer, for as long as it lives and no longer.

Shapes:     id of an optimizer -> what one look keeps of it     Thread: training; an entry goes where its optimizer is collected

It is looked up several times around each step, when nothing of it is in a processor's caches: by the id, in a dict, and not
by a reference that is made and hashed in Python for each question. An id comes again only where its optimizer is gone, and
the entry with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class ByOptimizer(dict[int, T]):
    """Entries by the ids of optimizers, which they do not keep alive. `put` makes them; one that is there may be replaced.

    Args:
        on_gone: is given the entry of an optimizer that was collected, in whatever thread that happens.
    """

    def __init__(self, on_gone: Callable[[T], None] | None = None) -> None:
        super().__init__()
        self._on_gone = on_gone
        self._alive: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def put(self, optimizer: torch.optim.Optimizer, entry: T) -> None:
        """Know it from now on; where it was taken out in between, it is known who it is."""
        number = id(optimizer)
        if number not in self._alive:
            self._alive[number] = weakref.ref(optimizer, partial(_gone, weakref.ref(self), number))
        self[number] = entry


def _gone(known: weakref.ref[ByOptimizer[Any]], number: int, _reference: Any) -> None:
    if (entries := known()) is not None:
        entries._alive.pop(number, None)
        if number in entries:
            entry = entries.pop(number)
            if entries._on_gone is not None:
                try:  # noqa: SIM105 - where the interpreter shuts down, what it calls is gone, and contextlib as well
                    entries._on_gone(entry)
                except TypeError:
                    pass
