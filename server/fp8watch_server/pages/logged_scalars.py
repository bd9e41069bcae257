"""The panel of logged scalars on the page of a run: what `watch.log` was given besides loss, gradient norm and LR.

Shapes:     run, its open incidents -> rows for run.html
Thread:     any: one database connection a request
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from fp8watch_agent.batch_names import HASH
from fp8watch_server.pages import forecasts, formatting
from fp8watch_server.store import logged_names

MAX_SHOWN, MAX_NAMES = 36, 400
NUM_STEPS = 512
"""Steps of each small chart, back from the newest."""


def logged_scalars(
    conn: Connection, run: Mapping[str, Any], open_incidents: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Names that an open incident speaks of first, then by name; each with its newest value and its last steps."""
    names, more = logged_names.names(conn, run["id"], MAX_NAMES)
    names = [name for name in names if name != HASH]
    told: dict[str, Mapping[str, Any]] = {}
    for incident in open_incidents:
        if incident["mode"] == "scalar-shift":
            for evidence in incident["evidence"]:
                told.setdefault(str(evidence["field"]), incident)
    shown = sorted(names, key=lambda name: (name not in told, name))[:MAX_SHOWN]
    rows = []
    for name in shown:
        series = logged_names.newest(conn, run["id"], name, int(run["last_step"]), NUM_STEPS)
        step, value = formatting.latest(series)
        rows.append(
            {
                "name": name,
                "step": step,
                "value": value,
                "spark": formatting.spark(series, 200, 34),
                "incident": told.get(name),
                "forecast": forecasts.of_scalar(name, series, NUM_STEPS),
            }
        )
    rest = [name for name in names if name not in shown]
    return {"rows": rows, "rest": rest, "more": more, "num_steps": NUM_STEPS}
