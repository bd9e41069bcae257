"""The panels of a run's training chart, a row each: the first chart, the script and the facts above are made of them.

Shapes:     PANELS -> labels, and JSON for static/run.js
Thread:     any; only data
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Panel:
    """One quantity over steps."""

    field: str
    """One of schema.SCALAR_NAMES."""
    label: str
    """In words, as it stands in a sentence."""
    title: str
    """Beside its axis."""
    stroke: str
    """A colour of static/fp8watch.css."""
    weight: float
    """Share of the height."""
    num_ticks: int
    """At most so many ticks of the first chart."""
    to_zero: bool = True
    """The axis begins at 0."""
    keeps_its_place: bool = False
    """Shown where it was never logged too."""
    log: bool = False
    """Its axis may be logarithmic: it is a positive quantity."""
    axis: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further properties of plotly's axis."""


PANELS = (
    Panel("loss", "loss", "loss", "series-1", 2.4, 6, to_zero=False, keeps_its_place=True, log=True),
    Panel("grad_norm", "gradient norm", "grad norm", "series-2", 1.1, 4, log=True),
    Panel("lr", "learning rate", "lr", "series-3", 1.0, 3, axis={"nticks": 3, "exponentformat": "power"}),
)


def fields() -> tuple[str, ...]:
    """What they show, from top to bottom."""
    return tuple(p.field for p in PANELS)


def labels() -> dict[str, str]:
    """Field -> words."""
    return {p.field: p.label for p in PANELS}


def title() -> str:
    """What the chart shows, for those who do not see it."""
    *first, last = labels().values()
    what = f"{', '.join(first)} and {last}" if first else last
    return f"{what[:1].upper()}{what[1:]} over steps"


def served() -> list[dict[str, Any]]:
    """As static/run.js reads them."""
    return [asdict(p) for p in PANELS]
