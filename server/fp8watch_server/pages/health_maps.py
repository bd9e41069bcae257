"""What the health map of a run can show, a row each: the tabs, the data that is asked for and the script are made of them.

Shapes:     MAPS -> tabs of run.html, and JSON for static/health.js
Thread:     any; only data
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class HealthMap:
    """One quantity over layers and steps."""

    field: str
    """One of fp8watch_server.store.fields.SERIES_FIELDS."""
    tab: str
    label: str
    """In words, as it stands in a sentence."""
    unit: str = ""
    factor: float = 1.0
    """What is shown is the value times this, before `unit`."""
    low: float = 0.0
    high: float = 0.0
    """Ends of the colours; the upper one grows with the data, unless low values are the bad ones."""
    low_is_bad: bool = False
    log2: bool = False
    """Colours by octave, from the smallest value to the largest."""
    of_quantiser: bool = False
    """Says something of a quantiser only: probes have no row, unless they held a NaN or an Inf."""


MAPS = (
    HealthMap("tile_sqnr_db", "Tile SQNR", "tile SQNR", " dB", low=18, high=32, low_is_bad=True, of_quantiser=True),
    HealthMap("num_nonfinite", "Non-finite", "non-finite elements", high=8),
    HealthMap("underflow_ratio", "Underflow", "underflow", " %", factor=100, high=20, of_quantiser=True),
    HealthMap("amax_max", "amax", "largest amax", log2=True),
)


def fields() -> tuple[str, ...]:
    """What can be asked for; the first is shown first."""
    return tuple(m.field for m in MAPS)


def of_quantiser(field: str) -> bool:
    """Whether a field says something of a quantiser only."""
    return any(m.field == field and m.of_quantiser for m in MAPS)


def served() -> list[dict[str, Any]]:
    """As static/health.js reads them."""
    return [asdict(m) for m in MAPS]
