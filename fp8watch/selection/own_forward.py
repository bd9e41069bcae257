"""Linears with a forward of their own: which of them compute in FP8, and what of that can be told.

Thread:     training, once

A subclass of nn.Linear that takes the operand and returns the product can be observed like a Linear, whatever it computes.
That it computes in FP8 is told by its class, by a switch that it holds, or by what its forward calls. torchao's says in its
configuration how each operand is cast; of others a format is assumed, the coarsest that is usual.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from fp8watch.observer.foreign import Foreign
from fp8watch.recipe import Recipe
from fp8watch.recipe.torchao import TorchaoCasts, is_cast_config, read_torchao

FP8_NAME = re.compile(r"fp8|float8|fp4|float4|mx_?linear|mxfp", re.IGNORECASE)
FOUR_BITS = re.compile(r"fp4|float4", re.IGNORECASE)
OWN_FORWARD, TORCHAO = "own forward", "torchao"
"""Names of the backend of a site whose operand its module quantises by itself."""

ASSUMED_FORMATS = ("E4M3", "E4M3", "E5M2")
_SWITCHES = ("use_fp8", "enable_fp8", "fp8")
_CODE_NAME = re.compile(r"fp8|float8|_scaled_mm", re.IGNORECASE)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Class of a module, without what attach puts on top of it."""
    for cls in type(module).__mro__:
        if (base := cls.__dict__.get("_fp8watch_base")) is not None:
            found: type[nn.Module] = base
            return found
    return type(module)


def has_own_forward(module: nn.Linear) -> bool:
    """Whether its class computes by a forward of its own; one that was put on the instance is not looked at."""
    return own_class(module).forward is not nn.Linear.forward


def computes_in_fp8(module: nn.Module) -> bool:
    """Whether a Linear with a forward of its own multiplies in FP8, as far as that can be told from outside."""
    if not isinstance(module, nn.Linear) or not has_own_forward(module):
        return False
    cls = own_class(module)
    if FP8_NAME.search(cls.__name__):
        return True
    said = [getattr(module, name) for name in _SWITCHES if isinstance(getattr(module, name, None), bool)]
    return any(said) if said else any(_CODE_NAME.search(name) for name in _called(cls.forward))


def foreign_linears(model: nn.Module) -> dict[int, Foreign]:
    """Linears of a model that compute in FP8 by a forward of their own, by the id of the module."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and computes_in_fp8(m)]
    if not linears:
        return {}
    # not by named_parameters, which models of others give arguments of their own (torchrl's losses)
    each = (m for _, m in model.named_modules(remove_duplicate=False))
    uses = Counter(id(p) for m in each for p in m._parameters.values() if p is not None)
    return {id(m): foreign_of(m, tied=uses[id(m._parameters.get("weight"))] > 1) for m in linears}


def foreign_of(module: nn.Linear, *, tied: bool) -> Foreign:
    """What is known of one of them.

    Args:
        module: as `computes_in_fp8` says.
        tied: another module reads its weight as well, so that the weight's gradient is not of its wgrad alone.
    """
    cls, config = own_class(module), getattr(module, "config", None)
    backend = TORCHAO if cls.__module__.startswith("torchao.") else OWN_FORWARD
    formats = None if FOUR_BITS.search(cls.__name__) else ASSUMED_FORMATS
    if not is_cast_config(config):
        return Foreign(backend, formats, reason="it does not say how it casts", tied=tied)
    read = read_torchao(config)
    if not isinstance(read, TorchaoCasts):
        return Foreign(backend, formats, reason=read, tied=tied)
    casts = dict(read.casts)
    a, b, c = (casts[operand, False].format for operand in range(3))
    return Foreign(backend, (a, b, c), read.recipe, casts=casts, slack=read.slack, tied=tied)


def recipe_of(foreign: Iterable[Foreign]) -> Recipe | None:
    """The recipe of most of these modules, to be observed by; None where none of them tells."""
    known = Counter(f.recipe for f in foreign if f.recipe is not None)
    return known.most_common(1)[0][0] if known else None


def _called(forward: Any) -> set[str]:
    """Names that a function reads, and those that the functions which it calls by name read."""
    names = set(_names(forward))
    held = getattr(getattr(forward, "__wrapped__", forward), "__globals__", {})
    for name in list(names):
        other = held.get(name)
        if isinstance(other, type) and issubclass(other, torch.autograd.Function):
            names.update(_names(other.forward))
        elif callable(other):
            names.update(_names(other))
    return names


def _names(function: Any) -> tuple[str, ...]:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return (*code.co_names, *code.co_varnames) if isinstance(code, CodeType) else ()
