"""Sentences on where a lasting trend leads: steps until it passes a limit, with an interval and the steps it was read off.

Upstream:   fp8watch_server.detect.trend
Shapes:     a site, or a logged scalar -> sentences
Thread:     query pool

What is said holds if it goes on as it has. A series that is no lasting trend has no sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection

from fp8watch_server.detect.modes.limit_ahead.quantities import (
    CLIP_DEPTH,
    CLIPS_ABOVE,
    LOGITS,
    UNDERFLOW,
    Quantity,
    carries,
    flushes,
)
from fp8watch_server.detect.thresholds import DEFAULTS
from fp8watch_server.detect.trend import WINDOW_STEPS, Forecast, forecast
from fp8watch_server.pages.formatting import capitalised, field_label, number
from fp8watch_server.store import queries
from fp8watch_server.store.rows import RunRow, SiteRow


@dataclass(frozen=True)
class Limit:
    """What a quantity must not pass."""

    quantity: Quantity
    value: float
    holds_for: Callable[[SiteRow], bool] = lambda _: True


OF_SITES = (
    Limit(UNDERFLOW, DEFAULTS.chronic_underflow, lambda site: flushes(site["operand"], site["format"])),
    Limit(CLIP_DEPTH, CLIPS_ABOVE, lambda site: carries(site["recipe"])),
)
OF_LOGITS = Limit(LOGITS, DEFAULTS.attention_logit_warning)


def of_site(conn: Connection, run: RunRow, site: SiteRow) -> list[str]:
    """What a site is heading for."""
    limits = [limit for limit in OF_SITES if limit.holds_for(site)]
    last = run["last_step"]
    if last is None or not limits:
        return []
    names = [limit.quantity.field for limit in limits]
    low = max(0, int(last) - WINDOW_STEPS + 1)
    found = queries.several_series(conn, run["id"], site["id"], names, low, int(last), 4 * WINDOW_STEPS)
    said = (sentence(found[limit.quantity.field], limit, field_label(limit.quantity.field)) for limit in limits)
    return [text for text in said if text]


def of_scalar(name: str, series: Mapping[str, Any], window: int) -> str:
    """What a logged scalar is heading for; nothing of a name that has no limit."""
    if name != LOGITS.field and not name.startswith(LOGITS.field + "/"):
        return ""
    return sentence(series, OF_LOGITS, name, window)


def ahead(series: Mapping[str, Any], limit: Limit, window: int = WINDOW_STEPS) -> Forecast | None:
    """What the last steps of one series lead to; None without a lasting trend."""
    values = np.array([math.nan if v is None or v <= 0 else math.log2(v) for v in series["values"]])
    return forecast(np.array(series["steps"]), values, math.log2(limit.value), window)


def sentence(series: Mapping[str, Any], limit: Limit, label: str, window: int = WINDOW_STEPS) -> str:
    """Of one series; empty without a lasting trend."""
    found = ahead(series, limit, window)
    if found is None:
        return ""
    pace = f"at the pace of steps {found.first_step}–{found.last_step}"
    when = f"in about {number(found.steps)} steps ({number(found.soonest)}–{number(found.latest)})"
    return (
        f"{capitalised(label)}: {pace} it passes {limit.quantity.shown(limit.value)}, {limit.quantity.means}, {when}."
    )
