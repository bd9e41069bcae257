"""Names of scalars by which a step says why codes or a product are wrong: the hypothesis that held, and its numbers.

Shapes:     name -> one float64 a step
Thread:     any; data alone

A name is "fault_why/<kind>/<number>/<module.operand.direction>". Each kind has `share`, how much of what was wrong it explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WHY = "fault_why/"
"""Begins all of them."""

SHARE = "share"
TOLD_SHARE = 0.99
"""Of what was wrong: a hypothesis that explains less is not told."""

EPS, SCALE_KIND, TILE, FORMAT = "eps", "scale-kind", "tile", "format"
"""Settings of a recipe that are in effect instead of those that it says."""

SCALES_STALE, SCALES_ROLLED, SCALES_PERMUTED, SCALES_FACTOR = (
    "scales-stale", "scales-rolled", "scales-permuted", "scales-factor",
)  # fmt: skip
SCALES_ROUNDED, SCALES_INVERSE, SCALES_AS_BYTES = "scales-rounded", "scales-inverse", "scales-as-bytes"
CODES_ROLLED, CODES_TRANSPOSED, CODES_AS_FORMAT = "codes-rolled", "codes-transposed", "codes-as-format"
COPY_STALE = "copy-stale"

SETTINGS = (EPS, SCALE_KIND, TILE, FORMAT)
KINDS = (
    *SETTINGS, SCALES_STALE, SCALES_ROLLED, SCALES_PERMUTED, SCALES_FACTOR, SCALES_ROUNDED, SCALES_INVERSE,
    SCALES_AS_BYTES, CODES_ROLLED, CODES_TRANSPOSED, CODES_AS_FORMAT, COPY_STALE,
)  # fmt: skip

WHOLE = -1.0
"""A side of a tile that is as long as the operand."""


class Why(NamedTuple):
    """A hypothesis that held."""

    kind: str
    numbers: dict[str, float]  # with its share


def encode(why: Why, site: str) -> dict[str, float]:
    """Scalars of a step that say it of a site, "module.operand.direction"."""
    return {f"{WHY}{why.kind}/{name}/{site}": value for name, value in why.numbers.items()}


def decode(logs: Mapping[str, float], site: str) -> Why | None:
    """What a step says of a site; None where it says nothing, or what no version of this file does."""
    numbers: dict[str, float] = {}
    kind = ""
    for name, value in logs.items():
        if not name.startswith(WHY):
            continue
        of, _, rest = name[len(WHY) :].partition("/")
        number, _, whose = rest.partition("/")
        if whose == site and of in KINDS and kind in ("", of):
            kind, numbers[number] = of, float(value)
    share = numbers.get(SHARE, 0.0)
    return Why(kind, numbers) if kind and TOLD_SHARE <= share <= 1.0 else None
