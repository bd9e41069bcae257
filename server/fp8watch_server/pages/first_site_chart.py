"""The first chart of a site, drawn by the server: the largest and the smallest amax of its tiles, in octaves.

Shapes:     series of each direction -> a Chart of each, on one scale
Thread:     any; pure functions

plotly draws the same over it when it has come (static/site.js), with the band of what was usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fp8watch_server.pages import formatting
from fp8watch_server.pages.first_chart import (
    Chart,
    Curve,
    DrawnPanel,
    Mark,
    curve_of,
    finite,
    marks_of,
    said,
    scale_of_steps,
)
from fp8watch_server.pages.site_charts import strokes_drawn_first

STROKES = strokes_drawn_first()
FIELDS = tuple(STROKES)
HEIGHT, ABOVE, BELOW, LEFT, RIGHT = 220, 18, 40, 58, 14
STRIP = 0.09  # share of the plot for the marks of what is no number
Series = Mapping[str, Mapping[str, Any]]


def _octaves(charts: Sequence[Series]) -> tuple[float, float, list[int]]:
    """Ends of the axis, and its ticks: as log2Axis in static/charts.js."""
    logs = [math.log2(v) for of in charts for series in of.values() for v, _ in finite(series) if v > 0]
    if not logs:
        return -1.0, 1.0, [0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    every = max(1, math.ceil((high - low) / 6))
    return low - 0.6, high + 0.9, list(range(math.ceil(low / every) * every, high + 1, every))


def amax_charts(
    charts: Sequence[Series],
    marks: Sequence[tuple[int, str]],
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Chart]:
    """A chart for each direction of a site.

    Args:
        charts: of each direction, by field of FIELDS, what queries.series gives.
        marks: (step, severity) of the site's incidents.
        from_step: the first step that is shown, the first that there is where None.
        to_step: the last one, likewise.
    """
    low, high, exponents = _octaves(charts)
    plot = HEIGHT - ABOVE - BELOW
    top, height = round(ABOVE + STRIP * plot, 1), round((1 - STRIP) * plot, 1)

    def y_of(value: float) -> float:
        return round(height * (high - math.log2(value)) / (high - low), 1)

    out = []
    for k, of in enumerate(charts):
        steps = [s for series in of.values() for s in (series["steps"][:1] + series["steps"][-1:])]
        x_of, (left, right), ticks = scale_of_steps(steps, from_step, to_step)
        curves = []
        for name, series in of.items():
            bad = {i for i, _ in series["nonfinite"]}
            flat = {i for i, v in enumerate(series["values"]) if v is not None and i not in bad and v <= 0}
            line = curve_of(name, STROKES[name], series, x_of, y_of, flat)
            zeros = tuple((x_of(series["steps"][i]), f"0 at step {series['steps'][i]}") for i in sorted(flat))
            curves.append(Curve(name, line.stroke, line.path, line.dots, zeros))
        nonfinite = tuple(
            m for name, series in of.items() for m in marks_of(formatting.field_label(name), series, x_of)
        )
        labels = tuple((round(height * (high - e) / (high - low), 1), f"2^{e}".replace("-", "−")) for e in exponents)
        words = [said(formatting.field_label(name), series, formatting.octaves) for name, series in of.items()]
        since = tuple(Mark(x_of(s), severity, "", "") for s, severity in marks if left <= s <= right)
        out.append(
            Chart(
                (DrawnPanel("amax", "amax", top, height, tuple(curves), nonfinite, labels),), ticks, since, "amax over steps",
                "; ".join(w for w in words if w) or "nothing was measured in these steps",
                ABOVE, HEIGHT - BELOW, HEIGHT, LEFT, RIGHT, f"amax-{k}",
            )
        )  # fmt: skip
    return out
