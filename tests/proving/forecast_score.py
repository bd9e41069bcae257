"""What became of each forecast, and the part of docs/detection.md that says it.

A forecast *held* where the series passed the limit within its interval. It came *early* or *late* where it passed before
or behind it, or not at all while the training outlasted the interval. Where a trend was made to level off, and did not pass,
it *never* comes, however long the interval. A forecast whose interval the training does not outlast is *open*, and not counted.
"""

from __future__ import annotations

import math
import platform
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "detection" / "forecasts.jsonl"
PAGE = ROOT / "docs" / "detection.md"
BEGIN, END = "<!-- forecasts -->", "<!-- end of forecasts -->"
OUTCOMES = ("held", "early", "late", "never")
"""What is counted; "open" is not."""
FIELDS = {
    "logits-climb": "max_attention_logit",
    "saturation-nears": "clip_depth",
    "channels-fade": "underflow_ratio",
    "columns-fade": "underflow_ratio",
    "tokens-fade": "underflow_ratio",
}
"""Trend -> what it moves towards its limit."""
SHOWN = {
    "underflow_ratio": "underflow, 10 %",
    "clip_depth": "clip depth, 1",
    "max_attention_logit": "logged attention logit, 100",
}
Line = Mapping[str, Any]


def planted(line: Line, series: Mapping[str, Any]) -> bool:
    """Whether this series is the one that the trend of the run moves."""
    if series["field"] != FIELDS.get(line["change"]):
        return False
    return series["module"] in (None, line["drawn"].get("module"))


def outcome(line: Line, series: Mapping[str, Any], said: Sequence[int]) -> str:
    """One of OUTCOMES or "open", of a forecast [step, soonest, steps, latest]."""
    at, soonest, _, latest = said
    if series["crossed"] is not None:
        took = series["crossed"] - at
        return "early" if took < soonest else "late" if took > latest else "held"
    if line["severity"] == "levels-off" and planted(line, series):
        return "never"
    return "late" if series["last"] - at > latest else "open"


def outcomes(line: Line, field: str | None = None) -> list[str]:
    """Of every forecast of a run."""
    series = [s for s in line["series"] if field in (None, s["field"])]
    return [outcome(line, s, said) for s in series for said in s["said"]]


def held(found: Iterable[str]) -> float:
    """Share of those that are counted; NaN of none."""
    counted = [f for f in found if f in OUTCOMES]
    return counted.count("held") / len(counted) if counted else math.nan


def interval(runs: Sequence[Sequence[str]], times: int = 2000) -> tuple[float, float]:
    """95 %, by resampling runs: forecasts of one run are no chances of their own."""
    counted = [np.array([sum(f in OUTCOMES for f in r), sum(f == "held" for f in r)]) for r in runs]
    counted = [c for c in counted if c[0]]
    if len(counted) < 2:
        return math.nan, math.nan
    table, rng = np.array(counted), np.random.default_rng(0)
    drawn = table[rng.integers(len(table), size=(times, len(table)))].sum(1)
    low, high = np.quantile(drawn[:, 1] / drawn[:, 0], (0.025, 0.975))
    return float(low), float(high)


def first_told(line: Line, series: Mapping[str, Any]) -> int | None:
    """Step at which the first incident was opened that names this module and quantity: it names the soonest of all that is ahead."""
    told = zip(sorted(line["opened"]), sorted(line["told"], key=lambda i: i["first_step"]), strict=False)
    place = (series["field"], series["module"])
    return min((step for step, i in told if (i["field"], i["module"] or None) == place), default=None)


def _ranged(runs: Sequence[Sequence[str]]) -> str:
    share = held([f for r in runs for f in r])
    if math.isnan(share):
        return "–"
    low, high = interval(runs)
    return f"{share:.2f}" if math.isnan(low) else f"{share:.2f} ({low:.2f}–{high:.2f})"


def _row(label: str, lines: Sequence[Line], field: str | None = None) -> str:
    runs = [outcomes(line, field) for line in lines]
    count = Counter(f for r in runs for f in r)
    num = sum(count[o] for o in OUTCOMES)
    return f"| {label} | {len(lines)} | {num} | {_ranged(runs)} | {count['early']} | {count['late']} | {count['never']} | {count['open']} |"


def arrivals(lines: Sequence[Line], keep: Callable[[str], bool]) -> list[tuple[Line, Mapping[str, Any]]]:
    """Series that a trend was planted in and that passed their limit."""
    return [
        (line, s) for line in lines for s in line["series"]
        if keep(line["change"]) and planted(line, s) and s["crossed"] is not None
    ]  # fmt: skip


def _arrived(name: str, lines: Sequence[Line]) -> str:
    """Row of a trend: how many runs arrived, and of how many of these it was said before."""
    of = [line for line in lines if line["change"] == name]
    came: dict[str, tuple[int, int | None, int | None]] = {}
    for line, s in arrivals(of, lambda change: True):
        looked = [said[0] for said in s["said"]]
        told = first_told(line, s)
        before = told if told is not None and told < s["crossed"] else None
        old = came.get(line["id"])
        if old is None or s["crossed"] < old[0]:
            came[line["id"]] = (s["crossed"], min(looked, default=None), before)
    shown = [c - at for c, at, _ in came.values() if at is not None]
    told_leads = [c - at for c, _, at in came.values() if at is not None]
    lead = f"{statistics.median(shown):g}" if shown else "–"
    told_lead = f"{statistics.median(told_leads):g}" if told_leads else "–"
    return f"| {name} | {len(of)} | {len(came)} | {len(shown)} | {lead} | {len(told_leads)} | {told_lead} |"


def part(lines: Sequence[Line], planned: int = 0) -> str:
    """Markdown of all of it.

    Args:
        planned: how many runs the plan has; 0: as many as there are.
    """
    of = f" of {planned} planned" if planned > len(lines) else ""
    lines = [line for line in lines if "broken" not in line]
    of_trends = [line for line in lines if line["change"] != "steady"]
    steady = [line for line in lines if line["change"] == "steady"]
    calm_steps = sum(line["steps"] for line in steady)
    head = "| runs | forecasts | interval held | came early | came late | never came | open |"
    rule = "|---|---|---|---|---|---|---|---|"
    families = sorted({line["family"] for line in lines})
    told_calm = sum(len(line["opened"]) for line in steady)
    said_calm = sum(len(s["said"]) for line in steady for s in line["series"])
    bent = [line for line in of_trends if line["severity"] == "levels-off"]
    told_bent = sum(bool(line["opened"]) for line in bent)
    return "\n".join(
        [
            BEGIN,
            "## Forecasts: how often they hold",
            "",
            f"Made by `make prove-forecasts` at attach's defaults (Python {platform.python_version()}, torch {version('torch')}, CPU): {len(lines)}{of} trainings of"
            f" {max(line['steps'] for line in lines)} steps each, of {len(families)} families, each against a real collector. In {len(of_trends)} of them one thing drifts slowly"
            " towards a limit, along a drawn path over a drawn time; some level off short of it, which nothing before the bend tells: a forecast of them cannot hold. The trends"
            " (`tests/proving/trends`) were written from the list of failures before their author had read how a forecast is made; afterwards they were"
            " shortened, for time, before the first score; since then neither they nor its rules were changed. Raw results: [detection/forecasts.jsonl](detection/forecasts.jsonl), one line a run.",
            "",
            "What is scored is the sentence of the pages, at every 32nd step and of every site with a limit, from the stored series up to that"
            " step. It *held* where the running median of nine measurements passed the limit within the interval; a forecast whose interval the"
            " training does not outlast is *open* and not counted, unless its trend levels off: then it *never* came. Intervals of shares are 95 %, by resampling runs.",
            "",
            f"| `limit-ahead` {head}",
            rule,
            _row("**all**", lines),
            _row("without trends that level off", [x for x in lines if x not in bent]),
            *(_row(text, lines, field) for field, text in SHOWN.items()),
            *(_row(f"family {family}", [x for x in lines if x["family"] == family]) for family in families),
            "",
            "Whether it is said at all, of the trends by kind. *Told* is an incident of mode `limit-ahead` that names the place and was opened before the limit was passed;",
            "*lead* the median number of steps between the two.",
            "",
            "| trend | runs | passed the limit | a page said so before | lead | told before | lead |",
            "|---|---|---|---|---|---|---|",
            *(_arrived(name, lines) for name in FIELDS),
            "",
            f"Of {len(bent)} trainings whose trend levels off, {told_bent} had an incident of `limit-ahead` nevertheless. In {len(steady)} trainings without a trend"
            f" ({calm_steps} steps) the pages made {said_calm} forecasts, and {told_calm} incidents were opened.",
            END,
        ]
    )


def put(text: str) -> None:
    """Into the page, in place of what was there."""
    page = PAGE.read_text()
    made = re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, page, flags=re.S)
    if made == page and text not in page:
        raise ValueError(f"{PAGE} has no {BEGIN}")
    PAGE.write_text(made)
