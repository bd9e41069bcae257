"""The first chart of a run, drawn by the server: it is there with the page, before any script, and without one.

Shapes:     series of scalars and incidents -> Chart: places on the page, which the template writes as SVG
Thread:     any; pure functions

It has the places and the colours of the chart that plotly draws over it when it has come (static/run.js), so that nothing
jumps. x is a share of the width, in percent; y is in pixels from the top. A curve's own x goes from 0 to CURVE_WIDTH and
is stretched to the width. What is not a number has a mark above its panel, and no line goes through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from fp8watch_server.pages import formatting, panels

HEIGHT, ABOVE, BELOW = 430, 4, 42
CURVE_WIDTH = 10_000
MARKS, GAP, STRIP = 0.045, 0.045, 0.07  # shares of the plot: marks above a panel, between panels, incidents above all
FEW, SPARSE = 30, 120  # as in static/charts.js: so few points have a dot each
MAX_INCIDENTS = 40
UNDERNEATH = {"info": 0, "warning": 1, "critical": 2}
HUGE = 1e150  # beyond it differences and squares overflow: such values are scaled before they are placed


@dataclass(frozen=True)
class Curve:
    """One series: a line where it has neighbours, dots where it has none."""

    field: str
    stroke: str  # a colour of static/fp8watch.css
    path: str
    dots: tuple[tuple[float, float, str], ...]  # x, y, what it says
    zeros: tuple[tuple[float, str], ...] = ()  # x, what it says: 0 has no place on an axis of octaves


@dataclass(frozen=True)
class DrawnPanel:
    """One panel, placed."""

    field: str
    title: str
    top: float
    height: float
    curves: tuple[Curve, ...]
    marks: tuple[tuple[float, str, str], ...]  # x, nan | inf | -inf, what it says
    ticks: tuple[tuple[float, str], ...]  # y, label

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not self.marks and not any(c.path or c.dots or c.zeros for c in self.curves)


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

    panels: tuple[DrawnPanel, ...]
    ticks: tuple[tuple[float, str], ...]  # x, step
    incidents: tuple[Mark, ...]
    title: str
    description: str
    top: float
    bottom: float
    height: int
    left: int  # pixels beside the plot
    right: int
    key: str  # of the names in it: there are several of them on one page
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


def strokes(series: Mapping[str, Any], no_line: Collection[int] = ()) -> tuple[list[list[int]], bool]:
    """Indices of points that a line joins, and whether each has a dot besides: the rules of `joined` in static/charts.js.

    A line joins neighbours only. What lies further apart than is usual in the series was not measured in between; what
    is no number ends a line, and so does a point of `no_line`.
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
        if i in special or i in no_line:
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


def curve_of(
    field: str,
    stroke: str,
    series: Mapping[str, Any],
    x_of: Callable[[int], float],
    y_of: Callable[[float], float],
    no_line: Collection[int] = (),
) -> Curve:
    """The strokes and dots of a series. Points of `no_line` are neither."""
    steps, values = series["steps"], series["values"]
    lines, dotted = strokes(series, no_line)
    width = CURVE_WIDTH / 100
    path = "".join(
        f"{'L' if k else 'M'}{x_of(steps[i]) * width:.0f} {y_of(float(values[i]))}"
        for line in lines
        for k, i in enumerate(line)
        if len(line) > 1
    )
    dots = tuple(
        (x_of(steps[i]), y_of(float(values[i])), f"{formatting.number(values[i])} {at_step(series, i)}")
        for line in lines
        for i in line
        if dotted or len(line) == 1
    )
    return Curve(field, stroke, path, dots)


def at_step(series: Mapping[str, Any], i: int) -> str:
    """Which steps a point stands for: as `standsFor` in static/charts.js."""
    step, first = series["steps"][i], (series.get("from_steps") or series["steps"])[i]
    if first == step:
        return f"at step {step}"
    at = f"at step {series['at_steps'][i]}, " if "at_steps" in series else ""
    return f"{at}of steps {first} to {step}"


def marks_of(name: str, series: Mapping[str, Any], x_of: Callable[[int], float]) -> tuple[tuple[float, str, str], ...]:
    """What is no number, above the plot."""
    steps = series["steps"]
    return tuple(
        (x_of(steps[i]), what, f"{name} is {formatting.nonfinite(what) or what} at step {steps[i]}")
        for i, what in sorted(_special(series).items())
    )


def finite(series: Mapping[str, Any]) -> list[tuple[float, int]]:
    """(value, step) of what is a number."""
    special = _special(series)
    pairs = zip(series["steps"], series["values"], strict=True)
    return [(float(v), s) for i, (s, v) in enumerate(pairs) if v is not None and i not in special]


def _panel(
    q: panels.Panel, series: Mapping[str, Any], x_of: Callable[[int], float], top: float, height: float
) -> DrawnPanel:
    marks = marks_of(formatting.field_label(q.field), series, x_of)
    values = [v for v, _ in finite(series)]
    if not values:
        return DrawnPanel(q.field, q.title, top, height, (), marks, ())
    largest = max(map(abs, values))
    unit = largest if largest > HUGE else 1.0
    low, high = _range([v / unit for v in values], q.to_zero)

    def y_of(value: float) -> float:
        return round(height * (high - value / unit) / (high - low), 1)

    ticks = tuple((y_of(k * unit), formatting.number(k * unit, 3)) for k in round_ticks(low, high, q.num_ticks))
    return DrawnPanel(q.field, q.title, top, height, (curve_of(q.field, q.stroke, series, x_of, y_of),), marks, ticks)


def said(name: str, series: Mapping[str, Any], say: Callable[[float], str] = formatting.number) -> str:
    """A series in a sentence, for those who do not see it."""
    special, numbers = _special(series), finite(series)
    parts = []
    if numbers:
        (first, start), (last, end), low, high = numbers[0], numbers[-1], min(numbers), max(numbers)
        parts.append(
            f"{name} from {say(first)} at step {start} to {say(last)} at step {end}, smallest {say(low[0])} at step "
            f"{low[1]}, largest {say(high[0])} at step {high[1]}"
        )
    if special:
        first_bad = min(special)
        word = formatting.nonfinite(special[first_bad]) or special[first_bad]
        parts.append(
            f"{name} not a finite number {len(special)} times, first {word} at step {series['steps'][first_bad]}"
        )
    return "; ".join(parts)


def scale_of_steps(
    steps: Sequence[int], from_step: int | None, to_step: int | None
) -> tuple[Callable[[int], float], tuple[float, float], tuple[tuple[float, str], ...]]:
    """Where a step lies in percent of the width, the ends, and the ticks."""
    low = from_step if from_step is not None else min(steps, default=0)
    high = to_step if to_step is not None else max(steps, default=low)
    pad = 0.5 if from_step is not None or to_step is not None or high <= low else 0.0
    left, right = low - pad, max(high, low) + pad

    def x_of(step: int) -> float:
        return round(100 * (step - left) / (right - left), 3)

    return x_of, (left, right), tuple((x_of(round(k)), f"{round(k)}") for k in round_ticks(left, right, 9, 1.0))


def training_chart(
    charts: Mapping[str, Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
    from_step: int | None = None,
    to_step: int | None = None,
) -> Chart:
    """The panels of a run over steps, with incidents.

    Args:
        charts: by field, what queries.scalars gives. What was never logged has no panel, but where it keeps its place.
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
    shown.sort(
        key=lambda i: UNDERNEATH.get(i["severity"], 0)
    )  # what is drawn last lies on top, where several began in one step
    steps += [int(i["first_step"]) for i in shown]
    x_of, (left, right), ticks = scale_of_steps(steps, from_step, to_step)
    quantities = [q for q in panels.PANELS if q.field in charts and (q.keeps_its_place or is_logged(charts[q.field]))]
    plot = HEIGHT - ABOVE - BELOW
    room = 1 - STRIP - len(quantities) * (MARKS + 0.01) - (len(quantities) - 1) * GAP
    drawn, y, words = [], ABOVE + STRIP * plot, []
    for q in quantities:
        y += (MARKS + 0.01) * plot
        height = room * plot * q.weight / sum(other.weight for other in quantities)
        drawn.append(_panel(q, charts[q.field], x_of, round(y, 1), round(height, 1)))
        y += height + GAP * plot
        words.append(said(formatting.field_label(q.field), charts[q.field]))
    marks = tuple(
        Mark(x_of(i["first_step"]), i["severity"], i["id"], f"{i['mode']}, {i['severity']}, since step {i['first_step']}: {formatting.cut(i['title'])}")
        for i in shown
        if left <= i["first_step"] <= right
    )  # fmt: skip
    if marks:
        words.append(f"{len(marks)} incident{'' if len(marks) == 1 else 's'}, each a link")
    what = "; ".join(part for part in words if part) or "nothing was logged in these steps"
    return Chart(tuple(drawn), ticks, marks, panels.title(), what, ABOVE, HEIGHT - BELOW, HEIGHT, 70, 18, "training")
