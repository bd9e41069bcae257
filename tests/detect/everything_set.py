"""A part of an engine's state with everything set that its annotations allow, so that no rare branch is needed to see it saved.

Attributes are read from the source: those of a class, and those that its methods annotate (`self.x: T = …`).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp8watch_server.detect import state
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.thresholds import DEFAULTS

EACH_WAY = 3
"""Sites, and rows of an array."""


@functools.cache
def _classes_of(file: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.ClassDef)}


def annotated(kind: type) -> Iterator[tuple[str, Any]]:
    """Attributes of an object of a class that are annotated, with what they may be."""
    for base in reversed(kind.__mro__[:-1]):
        if base.__module__ not in sys.modules or not base.__module__.startswith("fp8watch"):
            continue
        node, names = _classes_of(inspect.getfile(base))[base.__name__], vars(sys.modules[base.__module__])
        for got in ast.walk(node):
            if not isinstance(got, ast.AnnAssign):
                continue
            of_self = isinstance(got.target, ast.Attribute) and isinstance(got.target.value, ast.Name)
            if not of_self and got not in node.body:
                continue
            name = got.target.attr if isinstance(got.target, ast.Attribute) else got.target.id  # type: ignore[union-attr]
            means = eval(ast.unparse(got.annotation), dict(names))
            if typing.get_origin(means) is not typing.ClassVar and name not in state._SKIPPED:
                yield name, means


def full(means: Any) -> Any:
    """Something that an annotation allows: never None where there is a choice, never empty."""
    if isinstance(means, types.UnionType) or typing.get_origin(means) is typing.Union:
        return full(next(arg for arg in reversed(typing.get_args(means)) if arg not in (type(None), tuple[()])))
    origin, args = typing.get_origin(means), typing.get_args(means)
    if origin is np.ndarray:
        of = typing.get_args(args[1])[0]
        return np.ones(EACH_WAY, dtype=np.float64 if of is Any else of)
    if origin is typing.Literal:
        return args[0]
    if origin is tuple:
        return (full(args[0]),) if args[1:] == (...,) else tuple(full(arg) for arg in args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return (dict if inspect.isabstract(origin) else origin)({full(args[0]): full(args[1])})
    if origin is not None:
        return origin([full(args[0])]) if origin in (list, set, frozenset) else [full(args[0])]
    if means in (Any, Hashable) or isinstance(means, typing.TypeVar):
        return "any"
    return full_of(means) if means.__module__.startswith("fp8watch") else means(1)


def full_of(kind: type) -> Any:
    """One of a class, as it is made where that needs nothing but a number of sites, with all of its annotated attributes set."""
    made = kind.__new__(kind)
    if issubclass(kind, Detector):
        made = kind.make(EACH_WAY, DEFAULTS)
    elif not dataclasses.is_dataclass(kind):
        for args in ((EACH_WAY,), ()):
            with contextlib.suppress(TypeError):
                made = kind(*args)
                break
    made.__dict__.update({name: full(means) for name, means in annotated(kind)})
    return made
