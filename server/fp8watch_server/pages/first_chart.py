"""The first chart of a run, drawn by the server: it is there with the page, before any script, and without one.

Upstream:   fp8watch_server.store.queries  Downstream: fp8watch_server.pages.templating
Shapes:     series of scalars and incidents -> Chart: places on the page, which the template writes as SVG
Thread:     any; pure functions

It has the places and the colours of the chart that plotly draws over it when it has come (static/run.js), so that nothing
jumps. x is a share of the width, in percent; y is in pixels from the top. A curve's own x goes from 0 to CURVE_WIDTH and
is stretched to the width. What is not a number has a mark above its panel, and no line goes through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from fp8watch_server.pages import view

HEIGHT, ABOVE, BELOW = 430, 4, 42
CURVE_WIDTH = 10_000
MARKS, GAP, STRIP = 0.045, 0.045, 0.07  # shares of the plot: marks above a panel, between panels, incidents above all
FEW, SPARSE = 30, 120  # as in static/charts.js: so few points have a dot each
MAX_INCIDENTS = 40
HUGE = 1e150  # beyond it differences and squares overflow: such values are scaled before they are placed


@dataclass(frozen=True)
class Quantity:
    """One panel of the chart, as static/run.js has them."""

    field: str
    title: str
    weight: float  # share of the height
    to_zero: bool
    num_ticks: int


QUANTITIES = (
    Quantity("loss", "loss", 2.4, False, 6),
    Quantity("grad_norm", "grad norm", 1.1, True, 4),
    Quantity("lr", "lr", 1.0, True, 3),
)


@dataclass(frozen=True)
class Panel:
    """One quantity over steps."""

    field: str
    title: str
    top: float
    height: float
    path: str
    dots: tuple[tuple[float, float, str], ...]  # x, y, what it says
    marks: tuple[tuple[float, str, str], ...]  # x, nan | inf | -inf, what it says
    ticks: tuple[tuple[float, str], ...]  # y, label


@dataclass(frozen=True)
class Mark:
    """One incident."""

    x: float
    severity: str
    id: str
    title: str


@dataclass(frozen=True)
class Chart:
    """The whole figure."""

    panels: tuple[Panel, ...]
    ticks: tuple[tuple[float, str], ...]  # x, step
    incidents: tuple[Mark, ...]
    description: str
    top: float
    bottom: float
    height: int = HEIGHT
    curve_width: int = CURVE_WIDTH


def round_ticks(low: float, high: float, at_most: int, least_step: float = 0.0) -> list[float]:
    """At most so many round numbers (1, 2 or 5 times a power of ten apart) from low to high."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low] if math.isfinite(low) else []
    power = 10.0 ** math.floor(math.log10(span / at_most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        step = max(step, least_step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < at_most:
            return [k * step for k in range(first, last + 1)]
    return []


def _special(series: Mapping[str, Any]) -> dict[int, str]:
    return {int(i): str(what) for i, what in series.get("nonfinite") or []}


def is_logged(series: Mapping[str, Any]) -> bool:
    """Whether there is anything to draw."""
    return bool(_special(series)) or any(v is not None for v in series["values"])


def strokes(series: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
    """Indices of points that a line joins, and whether each has a dot besides: the rules of `joined` in static/charts.js.

    A line joins neighbours only. What lies further apart than is usual in the series was not measured in between; what
    is no number ends a line.
    """
    steps, values, special = series["steps"], series["values"], _special(series)
    stride = int(series.get("stride") or 1)
    at = [i for i in range(len(steps)) if values[i] is not None or i in special]

    def apart(n: int) -> list[int]:
        return [steps[i] - steps[k] for i, k in zip(at[n:], at, strict=False)]

    usual = median_low(apart(1)) if len(at) > 3 else 1
    reach = max(2 * stride, 3 * median_low(apart(2) or [1])) if stride > 1 else 1.5 * usual
    out: list[list[int]] = []
    num_gaps, before, broken = 0, None, True
    for i in at:
        gap = before is not None and steps[i] - before > reach
        num_gaps += gap
        before = steps[i]
        if i in special:
            broken = True
            continue
        if gap or broken:
            out.append([])
        out[-1].append(i)
        broken = False
    dotted = len(at) < FEW or (len(at) < SPARSE and (num_gaps > 0 or (stride == 1 and usual > 1)))
    return out, dotted


def _range(values: Sequence[float], to_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if to_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        room = abs(low) / 2 or 1.0
        return low - room, high + room
    room = (high - low) / 18  # as plotly: a twentieth of what is shown then, at each end
    return (low if to_zero and low == 0 else low - room), (high if to_zero and high == 0 else high + room)


def _panel(q: Quantity, series: Mapping[str, Any], x_of: Any, top: float, height: float) -> Panel:
    steps, values, special = series["steps"], series["values"], _special(series)
    marks = tuple(
        (x_of(steps[i]), what, f"{view.field_label(q.field)} is {view.nonfinite(what) or what} at step {steps[i]}")
        for i, what in sorted(special.items())
    )
    finite = [float(v) for i, v in enumerate(values) if v is not None and i not in special]
    if not finite:
        return Panel(q.field, q.title, top, height, "", (), marks, ())
    largest = max(map(abs, finite))
    unit = largest if largest > HUGE else 1.0
    low, high = _range([v / unit for v in finite], q.to_zero)

    def y_of(value: float) -> float:
        return round(height * (high - value / unit) / (high - low), 1)

    lines, dotted = strokes(series)
    width = CURVE_WIDTH / 100
    path = "".join(
        f"{'L' if k else 'M'}{x_of(steps[i]) * width:.0f} {y_of(float(values[i]))}"
        for line in lines
        for k, i in enumerate(line)
        if len(line) > 1
    )
    dots = tuple(
        (x_of(steps[i]), y_of(float(values[i])), f"{view.number(values[i])} at step {steps[i]}")
        for line in lines
        for i in line
        if dotted or len(line) == 1
    )
    ticks = [(y_of(k * unit), view.number(k * unit, 3)) for k in round_ticks(low, high, q.num_ticks)]
    return Panel(q.field, q.title, top, height, path, dots, marks, tuple(ticks))


def _said(q: Quantity, series: Mapping[str, Any]) -> str:
    """A series in a sentence, for those who do not see it."""
    special, name = _special(series), view.field_label(q.field)
    finite = [(float(v), s) for i, (s, v) in enumerate(zip(series["steps"], series["values"], strict=True))
              if v is not None and i not in special]  # fmt: skip
    parts = []
    if finite:
        (first, start), (last, end) = finite[0], finite[-1]
        low, high = min(finite), max(finite)
        parts.append(
            f"{name} from {view.number(first)} at step {start} to {view.number(last)} at step {end}, smallest "
            f"{view.number(low[0])} at step {low[1]}, largest {view.number(high[0])} at step {high[1]}"
        )
    if special:
        first_bad = min(special)
        word = view.nonfinite(special[first_bad]) or special[first_bad]
        parts.append(
            f"{name} not a finite number {len(special)} times, first {word} at step {series['steps'][first_bad]}"
        )
    return "; ".join(parts)


def training_chart(
    charts: Mapping[str, Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
    from_step: int | None = None,
    to_step: int | None = None,
) -> Chart:
    """Loss, gradient norm and learning rate over steps, with incidents.

    Args:
        charts: by field, what queries.scalars gives. What was never logged has no panel; the loss keeps its place.
        incidents: of the run; those within the steps that are shown are drawn.
        from_step: the first step that is shown, the first that there is where None.
        to_step: the last one, likewise.
    """
    steps = [s for series in charts.values() for s in (series["steps"][:1] + series["steps"][-1:])]
    shown = [
        i
        for i in incidents
        if (from_step is None or i["last_step"] >= from_step) and (to_step is None or i["first_step"] <= to_step)
    ][:MAX_INCIDENTS]
    steps += [int(i["first_step"]) for i in shown]
    low = from_step if from_step is not None else min(steps, default=0)
    high = to_step if to_step is not None else max(steps, default=low)
    pad = 0.5 if from_step is not None or to_step is not None or high <= low else 0.0
    left, right = low - pad, max(high, low) + pad

    def x_of(step: int) -> float:
        return round(100 * (step - left) / (right - left), 3)

    quantities = [q for q in QUANTITIES if q.field in charts and (q.field == "loss" or is_logged(charts[q.field]))]
    plot = HEIGHT - ABOVE - BELOW
    room = 1 - STRIP - len(quantities) * (MARKS + 0.01) - (len(quantities) - 1) * GAP
    panels, y, said = [], ABOVE + STRIP * plot, []
    for q in quantities:
        y += (MARKS + 0.01) * plot
        height = room * plot * q.weight / sum(other.weight for other in quantities)
        panels.append(_panel(q, charts[q.field], x_of, round(y, 1), round(height, 1)))
        y += height + GAP * plot
        said.append(_said(q, charts[q.field]))
    marks = tuple(
        Mark(x_of(i["first_step"]), i["severity"], i["id"], f"{i['mode']}, {i['severity']}, since step {i['first_step']}: {view.cut(i['title'])}")
        for i in shown
        if left <= i["first_step"] <= right
    )  # fmt: skip
    if marks:
        said.append(f"{len(marks)} incident{'' if len(marks) == 1 else 's'}, each a link")
    ticks = tuple((x_of(round(k)), f"{round(k)}") for k in round_ticks(left, right, 9, 1.0))
    what = "; ".join(part for part in said if part) or "nothing was logged in these steps"
    return Chart(tuple(panels), ticks, marks, what, ABOVE, HEIGHT - BELOW)
