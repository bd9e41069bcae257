"""Faults that real trainings have had, each drawn from a distribution: what scores the detector.

One file is one generator: faults of one mechanism, which the split into dev and held-out keeps together. A file is found
by being here; a class in it is a fault by having a `name`. Modules whose name begins with an underscore are tools.

The faults were written from FAILURES.md's table, public reports and the way of an operand through fp8watch, without
knowledge of the detectors.
"""

from __future__ import annotations

import importlib
import pkgutil

from proving.faults._base import Lasting


def _found() -> dict[str, type[Lasting]]:
    faults: dict[str, type[Lasting]] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for cls in vars(module).values():
            if not isinstance(cls, type) or not issubclass(cls, Lasting) or cls.__module__ != module.__name__:
                continue
            name = cls.__dict__.get("name")
            if name is None:
                continue  # a base of others
            if name in faults:
                raise ValueError(f"two faults are called {name!r}: {faults[name].__module__} and {cls.__module__}")
            faults[name] = cls
    return faults


FAULTS: dict[str, type[Lasting]] = _found()
"""Name -> fault, generator by generator in alphabetical order."""


def generators() -> dict[str, list[str]]:
    """Generator -> names of its faults."""
    groups: dict[str, list[str]] = {}
    for name, cls in FAULTS.items():
        groups.setdefault(cls.generator, []).append(name)
    return groups
