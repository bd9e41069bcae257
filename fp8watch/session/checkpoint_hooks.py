"""Notices where training writes a checkpoint: `torch.save` and `torch.distributed.checkpoint`.

Thread:     training; another where training saves from one

What is saved counts as a checkpoint where it holds weights of the watched model under their names, at most three mappings
deep. Nothing of it is kept, and nothing in it is changed. What cannot be noticed (a function that was imported by itself
before attach, another library) is told by `watch.checkpoint_saved()`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fp8watch.session.sites import SlabSite

DCP = "torch.distributed.checkpoint"
MAX_DEPTH = 3
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
MAX_KEYS = 100_000
Told = Callable[[Any], Callable[[], None]]
"""Is shown what is about to be saved; what it returns is called when that has been written."""


def holds_weights(saved: object, table: Sequence[SlabSite]) -> bool:
    """Whether what is saved holds the weight of one of these sites by its name, wrappers in front of it aside."""
    names = frozenset(f"{site.fqn}.weight" for site in table)
    return bool(names) and _holds(saved, names, MAX_DEPTH)


def _holds(saved: object, names: frozenset[str], depth: int) -> bool:
    if isinstance(saved, torch.nn.Module):
        saved = dict(saved.named_parameters())
    if not isinstance(saved, Mapping) or depth < 1 or len(saved) > MAX_KEYS:
        return False
    for key, value in saved.items():
        if isinstance(key, str) and isinstance(value, torch.Tensor) and _is_one(key, names):
            return True
    return any(_holds(value, names, depth - 1) for value in saved.values() if not isinstance(value, torch.Tensor))


def _is_one(key: str, names: frozenset[str]) -> bool:
    parts = [part for part in key.split(".") if part not in WRAPPERS]
    return any(".".join(parts[i:]) in names for i in range(len(parts) - 1))


def wrap_saving(tell: Told) -> Callable[[], None]:
    """Let `tell` know of each checkpoint that is written; returns what undoes it."""
    undo = [_wrap(torch, "save", tell)]
    loaded = sys.modules.get(DCP)
    if loaded is not None:  # who saves with it has imported it
        undo += [_wrap(loaded, name, tell) for name in ("save", "async_save") if hasattr(loaded, name)]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _wrap(module: Any, name: str, tell: Told) -> Callable[[], None]:
    original = getattr(module, name)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        what = args[0] if args else kwargs.get("obj", kwargs.get("state_dict"))
        written = tell(what)
        result = original(*args, **kwargs)
        written()
        return result

    setattr(module, name, save)

    def undo() -> None:
        if getattr(module, name) is save:
            setattr(module, name, original)

    return undo
