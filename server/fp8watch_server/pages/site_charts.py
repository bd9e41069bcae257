"""The charts of a site's page, a row each: the first chart, the series that are asked for and the script are made of them.

Shapes:     CHARTS -> fields of queries.several_series, and JSON for static/site.js
Thread:     any; only data
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fp8watch_server.pages import layer_costs
from fp8watch_server.store.rows import SiteRow

FLOOR_DB = {"E4M3": 28.0, "E5M2": 22.0, "E2M1": 14.0}
"""Tile SQNR that is healthy for the format, from there on."""


@dataclass(frozen=True)
class Curve:
    """One field of a chart."""

    field: str
    """One of fp8watch_server.store.fields.SERIES_FIELDS."""
    label: str
    stroke: str
    """A colour of static/fp8watch.css."""


@dataclass(frozen=True)
class SiteChart:
    """One quantity of a site over steps."""

    id: str
    """Of its element on the page."""
    title: str
    hint: str
    """What its curves are, in a line."""
    kind: Literal["octaves", "dB", "percent"]
    """The axis: log2, decibels, or shares of 1 shown as percent."""
    curves: tuple[Curve, ...]
    """The first one has the band of what was usual."""
    has_floor: bool = False
    """Values below FLOOR_DB are tinted."""
    limit: float | None = None
    """Values above it, on the axis as drawn, are tinted."""
    of_fprop: bool = False
    """Of the inputs of forward GEMMs only."""
    drawn_first: bool = False
    """Drawn by the collector too, before scripts run."""


CHARTS = (
    SiteChart(
        "amax", "amax", "of the tiles: largest, and smallest above zero (within 0.05 %)", "octaves",
        (Curve("amax_max", "largest", "series-1"), Curve("amax_min_nonzero", "smallest above 0", "series-2")),
        drawn_first=True,
    ),
    SiteChart(
        "scale_inv", "scale_inv", "what dequantises: largest and smallest", "octaves",
        (Curve("scale_inv_max", "largest", "series-1"), Curve("scale_inv_min", "smallest", "series-2")),
    ),
    SiteChart(
        "sqnr", "SQNR", "of the tiles and of the whole tensor; tinted: too low for the format", "dB",
        (Curve("tile_sqnr_db", "tiles", "series-1"), Curve("sqnr_db", "tensor", "series-2")), has_floor=True,
    ),
    SiteChart(
        "underflow", "Underflow", "non-zero elements that became zero", "percent",
        (Curve("underflow_ratio", "underflow", "series-1"), Curve("saturated_ratio", "saturated", "series-2")),
    ),
    SiteChart(
        "gain", "Gain error", "what quantising adds to the size of the operand, or takes from it; beyond ±0.5 % it is biased", "percent",
        (Curve("gain_error", "gain error", "series-1"),),
    ),
    SiteChart(
        "clip", "Clip depth", "largest amax × scale ÷ largest code; above 1 values were clipped; below 1 within 0.2 %", "octaves",
        (Curve("clip_depth", "clip depth", "series-1"),), limit=0.0,
    ),
    SiteChart(
        "impact", "Loss impact per token", "what this forward in FP8 changes of the loss, RMS over sampled tokens, nats; a point for each turn", "octaves",
        (Curve("impact_rms", "loss impact", "series-1"),), of_fprop=True,
    ),
)  # fmt: skip


def fields() -> tuple[str, ...]:
    """What they show."""
    return tuple(curve.field for chart in CHARTS for curve in chart.curves)


def strokes_drawn_first() -> dict[str, str]:
    """Field -> colour, of the one chart that the collector draws."""
    (chart,) = (chart for chart in CHARTS if chart.drawn_first)
    return {curve.field: curve.stroke for curve in chart.curves}


def served(site: SiteRow) -> list[dict[str, Any]]:
    """As static/site.js reads them, for a site."""
    shown = [c for c in CHARTS if not c.of_fprop or layer_costs.is_measured_at(site)]
    return [asdict(c) | {"floor": FLOOR_DB.get(site["format"]) if c.has_floor else None} for c in shown]
