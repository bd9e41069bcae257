"""The flight recorder in characters, for messages: sites that left their band × the steps around a failure.

Shapes:     incident -> a few lines of one width, or "" where there is nothing to see
Thread:     dispatcher: one read, bounded by the run's records

A picture by address would have to be fetched by whoever shows the message, and a message whose picture cannot be fetched is
refused as a whole: characters always arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sqlalchemy.engine import Connection

from fp8watch_server.incidents.bidi import visible
from fp8watch_server.store import flight, queries

BEFORE, AFTER = 16, 7
MAX_ROWS, NAME_CHARS = 10, 34
MAX_RECORDS = 200_000
"""Of more records no picture is made: a message must not wait for one."""
CALM, UNJUDGED, UNLOOKED, BROKEN = "·", "?", " ", "✕"
BARS = "▁▃▅▇█"
LEGEND = "· inside its band  ▁▃▅▇█ 1, 2, 4, 8, 16 × its band  ✕ NaN, Inf, sentinel  ? no band yet  blank: not looked at"


def flight_text(conn: Connection, incident: Mapping[str, Any]) -> str:
    """Lines of the sites that left their band at a leap (where none did, of all that stand out), in the order of execution;
    of many, those that are farthest.
    """
    run = queries.run(conn, incident["run_id"])
    if run is None or run["last_step"] is None:
        return ""
    steps = BEFORE + 1 + flight.LEAD_STEPS[0] + BEFORE
    if run["num_sites"] * max(1, int(run["world_size"] or 1)) * steps > MAX_RECORDS:
        return ""
    found = flight.around(conn, run, queries.sites(conn, run["id"]), int(incident["first_step"]), BEFORE)
    return drawn(found)


def drawn(found: flight.Flight) -> str:
    """Of what is read, the steps from BEFORE to AFTER."""
    shown = np.flatnonzero(found.steps <= found.at + AFTER)
    outside, far, broken = found.outside[:, shown], found.far[:, shown], found.broken[:, shown]
    leapt = np.flatnonzero(found.leaps[:, shown].any(axis=1))
    hit = leapt if len(leapt) else np.flatnonzero(outside.any(axis=1))
    if not len(hit) or found.at not in found.steps:
        return ""
    most = np.where(broken[hit], np.inf, np.nan_to_num(far[hit])).max(axis=1)
    kept = hit[np.argsort(-most, kind="stable")[:MAX_ROWS]]
    kept = kept[np.argsort(found.turn[kept])]
    j = int(np.searchsorted(found.steps[shown], found.at))
    first, at = str(int(found.steps[0])), f"▼ step {found.at}"
    head = f"{first:<{j}}"[:j] + at if len(first) < j else " " * j + at
    lines = [" " * (NAME_CHARS + 1) + head]
    for i in kept.tolist():
        cells = "".join(_cell(found, i, k) for k in shown.tolist())
        lines.append(f"{_name(found.sites[i])} {cells}".rstrip())
    if (left := int(outside.any(axis=1).sum()) - len(kept)) > 0:
        lines.append(f"and {left} more that stand out")
    return "\n".join(lines)


def _cell(found: flight.Flight, i: int, j: int) -> str:
    if found.broken[i, j]:
        return BROKEN
    value = found.far[i, j]
    if np.isnan(value):
        return UNJUDGED if found.looked[i, j] else UNLOOKED
    return CALM if value <= 1 else BARS[min(len(BARS) - 1, int(np.log2(value)))]


def _name(site: Mapping[str, Any]) -> str:
    arrow = "↑" if flight.pane_of(site) == flight.BACKWARD else "↓"
    operand = f" {site['operand']}/{'col' if site['direction'] == 'columnwise' else 'row'}"
    operand = operand if len(operand) <= 18 else f"{operand[:17]}…"
    module = visible(str(site["module"])).replace("\n", " ")
    room = NAME_CHARS - 2 - len(operand)
    module = module if len(module) <= room else f"…{module[1 - room :]}"
    return f"{arrow} {module}{operand}".ljust(NAME_CHARS)
