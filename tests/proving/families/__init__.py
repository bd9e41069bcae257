"""Families of trainings, one file each. A family is a module with `build(seed, rank) -> Training`; `NEEDS` names what pip must bring."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import lru_cache
from types import ModuleType

from proving.training import Training

SHARED = ("optimizers", "parts")
"""Files that are no family."""


@lru_cache(maxsize=1)
def families() -> dict[str, ModuleType]:
    """Name -> module, in name order."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name not in SHARED)
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def missing(name: str) -> list[str]:
    """Packages that the family needs and that are not installed."""
    needs: tuple[str, ...] = getattr(families()[name], "NEEDS", ())
    return [package for package in needs if importlib.util.find_spec(package) is None]


def build(name: str, seed: int, rank: int = 0) -> Training:
    """A training of this family with fresh weights; equal for equal arguments."""
    training: Training = families()[name].build(seed, rank)
    return training
