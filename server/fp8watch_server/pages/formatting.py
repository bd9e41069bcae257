"""How values are written on the pages: numbers, octaves, times, names, small charts.

Shapes:     a value of a query -> text
Thread:     any; pure functions

A non-finite number is data: it arrives as the text "nan", "inf" or "-inf" and is written NaN, +Inf or −Inf.
What was not measured is None and is written –.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from fp8watch_agent.record import FIELDS
from fp8watch_server.pages import panels

ABSENT = "–"
NONFINITE = {"nan": "NaN", "inf": "+Inf", "+inf": "+Inf", "-inf": "−Inf", "infinity": "+Inf", "-infinity": "−Inf"}
WHOLE_CHARS, TAIL_CHARS = 24, 10
MAX_NAME_CHARS = 240  # more is cut in the text itself; less is cut by the style sheet, with the whole name as title
MAX_TEXT_CHARS = 8000

FIELD_LABELS = {f.name: f.label for f in FIELDS if f.label} | {
    "loss_scale": "loss scale",
    "impact_rms": "loss impact per token",
    "tile_sqnr_db": "tile SQNR",
    "sqnr_db": "tensor SQNR",
    "faint_tiles": "tiles 2^30 below the largest",
    "faint_elements": "elements 2^30 below the largest of their tile",
    "underflow_ratio": "underflow",
    "saturated_ratio": "saturated",
    "num_nonfinite": "non-finite elements",
    "num_underflow": "underflow elements",
    "num_saturated": "saturated elements",
    "nonfinite_sites": "non-finite sites",
    "off_scale_sites": "off-scale sites",
    "num_nan": "NaN elements",
    "num_inf": "Inf elements",
    "num_sentinel_tiles": "sentinel tiles",
    "num_zero_tiles": "zero tiles",
    "num_eps_tiles": "tiles clamped by eps",
    "num_off_scale_tiles": "off-scale tiles",
    "amax_max": "largest amax",
    "amax_min_nonzero": "smallest amax",
    "scale_inv_max": "largest scale_inv",
    "scale_inv_min": "smallest scale_inv",
    "scale_ratio_max": "clip depth",
    "scale_ratio_min": "smallest amax·scale/FP8_MAX",
    "clip_depth": "clip depth",
}
_BOUND = re.compile(r"([+-]?\d+(?:\.\d+)?) or (more|less)")
RATIO_FIELDS = frozenset({"underflow_ratio", "saturated_ratio"})


def nonfinite(value: object) -> str | None:
    """NaN, +Inf or −Inf, however it is spelt; None for everything else."""
    if isinstance(value, str):
        return NONFINITE.get(value.strip().lower())
    if isinstance(value, float) and not math.isfinite(value):
        return NONFINITE[repr(value)]
    return None


def number(value: object, digits: int = 4) -> str:
    """A number with `digits` significant digits, as short as it can be without losing any of them."""
    if value is None:
        return ABSENT
    if special := nonfinite(value):
        return special
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value):,}".replace(",", "\u2009").replace("-", "−")
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def ratio(value: object) -> str:
    """A share as a percentage."""
    if isinstance(value, (int, float)) and nonfinite(value) is None:
        return f"{number(100 * value, 3)} %"
    return number(value)


def octaves(value: object) -> str:
    """A positive number as a power of two."""
    if isinstance(value, (int, float)) and nonfinite(value) is None and value > 0:
        return f"2^{math.log2(value):.1f}".replace("-", "−").replace(".0", "")
    return number(value)


def quantity(value: object, unit: str | None) -> str:
    """A number with its unit; a bound ("28 or more") has it behind its number; a share is a percentage."""
    if value is None or unit is None or unit in ("", "1", "x", "ratio"):
        return number(value)
    if isinstance(value, str) and (bound := _BOUND.fullmatch(value)):
        return f"{quantity(float(bound[1]), unit)} or {bound[2]}"
    if unit == "share":
        return ratio(value)
    single = value == 1 and not unit.startswith("of ")  # 1 tile, but 1 of 12 tiles
    return f"{number(value)} {unit.removesuffix('s') if single else unit}"


def of_field(value: object, field: str) -> str:
    """A value as its field is read: shares in percent, SQNR in dB."""
    if field in RATIO_FIELDS:
        return ratio(value)
    return quantity(value, "nats" if field == "impact_rms" else "dB" if field.endswith("_db") else None)


def field_label(field: str) -> str:
    """A field in words."""
    return panels.labels().get(field) or FIELD_LABELS.get(field, field.replace("_", " "))


def capitalised(label: str) -> str:
    """A label at the head of a chart or a row; names of the wire (scale_inv, amax) stay as they are spelt."""
    first = label.split(" ", 1)[0]
    return label if "_" in first or "·" in first or first in ("amax", "eps") else label[:1].upper() + label[1:]


def moment(value: object) -> datetime | None:
    """A time as the store gives it: seconds since 1970, ISO 8601 text, or a datetime."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, (int, float)) and math.isfinite(value):
        try:
            return datetime.fromtimestamp(value, timezone.utc)
        except (OverflowError, OSError, ValueError):
            return None
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=timezone.utc)
    return None


def ago(value: object, now: datetime | None = None) -> str:
    """How long ago, in its largest unit."""
    at = moment(value)
    if at is None:
        return ABSENT
    seconds = max(0.0, ((now or datetime.now(timezone.utc)) - at).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "just now" if seconds < 2 else f"{int(seconds)} s ago"


def ago_at(value: object, now: float) -> str:
    """How long before `now` (seconds since 1970) something was."""
    return ago(value, moment(now))


def clock(value: object) -> str:
    """A time in UTC, to the second."""
    at = moment(value)
    return ABSENT if at is None else at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def cut(text: object) -> str:
    """A name of any length, short enough for a page."""
    s = str(text)
    return s if len(s) <= MAX_NAME_CHARS else f"{s[:MAX_NAME_CHARS]}… ({len(s)} characters)"


def whole(text: object) -> str:
    """What somebody wrote, or a sentence of the collector: as long as the API takes a comment."""
    s = str(text)
    return s if len(s) <= MAX_TEXT_CHARS else f"{s[:MAX_TEXT_CHARS]}… ({len(s)} characters)"


def in_two(text: object) -> tuple[str, str]:
    """A name as its beginning, which may be cut, and its end, which is kept: names of runs differ there."""
    s = cut(text)
    return (s, "") if len(s) <= WHOLE_CHARS else (s[:-TAIL_CHARS], s[-TAIL_CHARS:])


def segment(text: object) -> str:
    """A name as one segment of a path."""
    return quote(str(text), safe="")


def latest(series: Mapping[str, Any]) -> tuple[int | None, object]:
    """Step and value of the last point of a series; a non-finite one as its name."""
    steps: Sequence[int] = series.get("steps") or []
    special = {int(i): v for i, v in series.get("nonfinite") or []}
    for i in range(len(steps) - 1, -1, -1):
        value = special.get(i, series["values"][i])
        if value is not None:
            return int(steps[i]), value
    return None, None


EVENT_WORDS = {
    "num_sites": "reached {} sites",
    "earlier_cause_than": "an earlier cause than {} was found",
    "graver_than": "it was {}: what made it more than that is told",
    "clean_steps": "after {} clean steps",
    "message": "message: {}",
    "by": "by {}",
    "owner": "to {}",
    "text": "{}",
    "sentence": "{}",
}


def details(detail: object) -> str:
    """What an event says to people; the rest of it is for programs."""
    if not isinstance(detail, Mapping):
        return ""
    known = {key: detail[key] for key in EVENT_WORDS if detail.get(key) is not None}
    if known.get("earlier_cause_than") == detail.get("mode") is not None:
        del known["earlier_cause_than"]
        return ", ".join(["traced to another place", *(EVENT_WORDS[key].format(known[key]) for key in known)])
    return ", ".join(EVENT_WORDS[key].format(known[key]) for key in known)


@dataclass(frozen=True)
class Spark:
    """A line of a few words' size, drawn by the server: it is there before any script."""

    path: str
    marks: tuple[tuple[float, str], ...]
    width: int
    height: int


def spark(series: Mapping[str, Any], width: int = 120, height: int = 26) -> Spark | None:
    """A series as an SVG path; non-finite values are marks along the top edge."""
    steps: Sequence[int] = series.get("steps") or []
    special = {int(i): v for i, v in series.get("nonfinite") or []}
    finite = [
        (s, v)
        for i, (s, v) in enumerate(zip(steps, series.get("values") or [], strict=False))
        if v is not None and i not in special
    ]
    if len(finite) + len(special) < 2:
        return None
    first, span = steps[0], max(1, steps[-1] - steps[0])
    low = min((v for _, v in finite), default=0.0)
    high = max((v for _, v in finite), default=1.0)
    scale = (height - 8) / ((high - low) or 1.0)

    def x(step: int) -> float:
        return round(2 + (step - first) * (width - 4) / span, 1)

    path = "".join(
        f"{'M' if i == 0 else 'L'}{x(s)} {round(height - 2 - (v - low) * scale, 1)}" for i, (s, v) in enumerate(finite)
    )
    marks = tuple((x(steps[i]), nonfinite(v) or str(v)) for i, v in sorted(special.items()))
    return Spark(path, marks, width, height)
