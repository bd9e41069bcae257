"""What a field of the sketch still lacks, a sentence each: where, and what to do there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from house.released_fields import RELEASED
from quantize import oracle
from quantize.backends import USABLE
from quantize.operands import operand

from fp8watch.kernels import resolve
from fp8watch.numerics.formats import FORMATS
from fp8watch_agent.record import EVERY_CALL, FIELDS, Field, Measured
from fp8watch_server.pages.formatting import FIELD_LABELS

DOCS = Path(__file__).parents[2] / "docs"
NOT_FILLED: dict[str, Sequence[str]] = {}
"""Fields that some backends leave absent on purpose, and those backends."""


def gaps(field: Field) -> list[str]:
    """Sentences about one field; none where nothing is missing."""
    missing = [*_code(field), *_docs(field)]
    if _is_later(field):
        own = bool(field.group & EVERY_CALL)
        missing += [*_backends(field), *_pages(field)] if own else [_group(field)]
    return [f"field {field.name}: {sentence}" for sentence in missing]


def _is_later(field: Field) -> bool:
    return field.name not in RELEASED or bool(field.group & EVERY_CALL)


def _names(group: Measured) -> str:
    return "|".join(bit.name or "" for bit in Measured if bit in group)


def _code(field: Field) -> list[str]:
    now = (field.code, _names(field.group))
    if field.name not in RELEASED:
        return [f'tests/house/released_fields.py does not freeze its code: add "{field.name}": {now}']
    if RELEASED[field.name] != now:
        return [f"it is {now}, and stored blocks know it as {RELEASED[field.name]}: put that back"]
    return []


def _group(field: Field) -> str:
    return (
        f"backends that do not know it set its group {_names(field.group)}, and would report {field.default:g} as "
        "measured: give it a bit of Measured above CAST"
    )


def _docs(field: Field) -> list[str]:
    missing = []
    if f"| `{field.name}` |" not in (DOCS / "glossary.md").read_text():
        missing.append("docs/glossary.md does not name it")
    bits = [bit for bit in Measured if bit in field.group]
    page = (DOCS / "wire.md").read_text()
    missing += [
        f"docs/wire.md does not name its group: add `{int(bit)} {bit.name.lower()}`"
        for bit in bits
        if bit.name is not None and f"{int(bit)} {bit.name.lower()}" not in page
    ]
    return missing


def _pages(field: Field) -> list[str]:
    return [] if field.size > 1 or field.name in FIELD_LABELS else ["pages have no label: give it one in FIELDS"]


@cache
def _sketch_by(backend: str) -> dict[str, Any]:
    """Of an operand with a bit of everything but NaN and Inf, with all statistics."""
    x = operand("gradient", "float32", (16, 300), 1)
    stats = resolve(backend, "cpu").quantize(x, (1, 128), FORMATS["E4M3"], True, 0.0)[2]
    assert stats is not None
    return stats.summary()


@cache
def _sketch_of_the_oracle() -> dict[str, Any]:
    x = operand("gradient", "float32", (16, 300), 1)
    return oracle.sketch(oracle.quantize(x.numpy(), (1, 128), "E4M3", True, 0.0), "E4M3", True, 0.0)


def _backends(field: Field) -> list[str]:
    bits, missing = int(field.group & EVERY_CALL), []
    truth = _sketch_of_the_oracle().get(field.name)
    if truth is None:
        missing.append("tests/quantize/oracle.py does not count it: nothing says what is right")
    for backend in USABLE:
        sketch = _sketch_by(backend)
        if sketch["measured"] & bits != bits:
            if backend not in NOT_FILLED.get(field.name, ()):
                missing.append(f"backend {backend} does not fill it: fill it there, or name {backend} in NOT_FILLED")
        elif truth is not None and not torch.allclose(
            torch.tensor(sketch[field.name]).double(), torch.tensor(truth).double(), 1e-6
        ):
            missing.append(f"backend {backend} says {sketch[field.name]}, tests/quantize/oracle.py says {truth}")
    return missing


def all_gaps() -> list[str]:
    """Of every field, and codes that two of them share."""
    missing = [sentence for field in FIELDS for sentence in gaps(field)]
    for name in RELEASED.keys() - {field.name for field in FIELDS}:
        missing.append(f"field {name}: it is gone from FIELDS, and stored blocks hold it: put it back")
    return missing
