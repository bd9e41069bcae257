"""Which libraries fp8watch was tried with, in which versions: the table that attach, the extras and the docs share.

Thread:     training, once

`make test-stacks` runs the newest version of each; the oldest was run by hand; `make test-te` runs Transformer Engine's six versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Stack:
    """A library that people train with."""

    package: str  # as the package index calls it
    modules: tuple[str, ...]  # as Python imports it
    oldest: str
    newest: str
    extra: str | None  # of pyproject.toml
    how: str  # what was done with these versions


STACKS: tuple[Stack, ...] = (
    Stack("transformers", ("transformers",), "4.57.1", "5.23.0", "transformers", "run on a CPU"),
    Stack("lightning", ("lightning", "pytorch_lightning"), "2.4.0", "2.6.6", "lightning", "run on a CPU"),
    Stack("accelerate", ("accelerate",), "1.1.0", "1.15.0", "accelerate", "run on a CPU"),
    Stack("deepspeed", ("deepspeed",), "0.19.8", "0.19.8", "deepspeed", "run on a CPU"),
    Stack(
        "megatron-core", ("megatron",), "0.16.1", "0.16.1", "megatron", "run on a CPU that it takes for a CUDA device"
    ),
    Stack("torchtitan", ("torchtitan",), "0.3.0", "0.3.0", "torchtitan", "run on a CPU, with dense attention"),
    Stack("peft", ("peft",), "0.21.2", "0.21.2", None, "run on a CPU"),
    Stack(
        "transformer-engine", ("transformer_engine",), "2.9.0", "2.20.2", "te", "run over a stand-in for its extension"
    ),
)

_said: set[str] = set()


def untested(modules: Iterable[str], *, again: bool = False) -> list[str]:
    """A sentence for each of these top-level modules whose installed version is outside of the table, once a process.

    Args:
        modules: as Python imports them; what the table does not have is passed over.
        again: also those that were said before.
    """
    asked = set(modules)
    lines = []
    for stack in STACKS:
        if not asked.intersection(stack.modules) or (stack.package in _said and not again):
            continue
        installed = _installed(stack)
        if installed is None or _release(stack.oldest) <= _release(installed) <= _release(stack.newest):
            continue
        _said.add(stack.package)
        lines.append(f"{stack.package} {installed} was not tested with this version of fp8watch; {_range(stack)} was")
    return lines


def _range(stack: Stack) -> str:
    return stack.newest if stack.oldest == stack.newest else f"{stack.oldest} to {stack.newest}"


def _installed(stack: Stack) -> str | None:
    """Its version; None where no distribution of this name is installed, as in a source tree."""
    names = (stack.package, *(m.replace("_", "-") for m in stack.modules))
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers: "2.9.0rc1" -> (2, 9, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in found[0].split(".")) if found else ()
