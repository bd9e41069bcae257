"""What the health map of a run can show, a row each: the tabs, the data that is asked for and the script are made of them.

Shapes:     MAPS -> tabs of run.html, and JSON for static/health.js
Thread:     any; only data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8watch_server.store import deviation


@dataclass(frozen=True)
class HealthMap:
    """One quantity over layers and steps."""

    field: str
    """One of fp8watch_server.store.fields.SERIES_FIELDS, or of fp8watch_server.store.deviation.OF."""
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
    of_band: bool = False
    """Times a band: coloured as the flight recorder is, 1 × to 32 ×."""
    grows: bool = True
    """Whether the upper end grows with the data."""
    hint: str = ""
    """What the numbers mean."""
    of_quantiser: bool = False
    """Says something of a quantiser only: probes have no row, unless they held a NaN or an Inf."""


EDGE = f"1 is the edge of the site's own band: {deviation.BAND}"

MAPS = (
    HealthMap(
        "amax_deviation",
        "amax, unusual",
        "amax against its own past",
        " × band",
        low=1,
        high=32,
        grows=False,
        of_band=True,
        hint=f"{EDGE}; {deviation.WALK}",
    ),
    HealthMap(
        "sqnr_deviation",
        "SQNR, unusual",
        "tile SQNR against its own past",
        " × band",
        low=1,
        high=32,
        grows=False,
        of_band=True,
        hint=EDGE,
        of_quantiser=True,
    ),
    HealthMap("tile_sqnr_db", "Tile SQNR", "tile SQNR", " dB", low=18, high=32, low_is_bad=True, of_quantiser=True),
    HealthMap("num_nonfinite", "Non-finite", "non-finite elements", high=8),
    HealthMap("underflow_ratio", "Underflow", "underflow", " %", factor=100, high=20, of_quantiser=True),
    HealthMap("amax_max", "amax", "largest amax", log2=True),
)


def fields() -> tuple[str, ...]:
    """What can be asked for; the first is shown first."""
    return tuple(m.field for m in MAPS)


SHOWN_BY = {
    "num_nan": "num_nonfinite",
    "num_inf": "num_nonfinite",
    "num_nonfinite": "num_nonfinite",
    "num_sentinel_tiles": "num_nonfinite",
    "underflow_ratio": "underflow_ratio",
    "num_underflow": "underflow_ratio",
    "tile_sqnr_db": "sqnr_deviation",
}
"""A field of an incident's evidence -> the map that shows it; all others: the first."""


def opens_on(evidence: Sequence[Mapping[str, Any]]) -> str:
    """The map that shows the quantity by which an incident was found."""
    shown = (SHOWN_BY[e["field"]] for e in evidence if e["field"] in SHOWN_BY)
    return next(shown, MAPS[0].field)


def of_quantiser(field: str) -> bool:
    """Whether a field says something of a quantiser only."""
    return any(m.field == field and m.of_quantiser for m in MAPS)


def served() -> list[dict[str, Any]]:
    """As static/health.js reads them."""
    return [asdict(m) for m in MAPS]
