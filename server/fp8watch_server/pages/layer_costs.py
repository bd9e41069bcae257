"""What FP8 costs, layer by layer: the loss impact per token of each module, where its turn measured it last.

Shapes:     sites of a run -> dicts for templates, the dearest first
Thread:     query pool

A figure is that of one step and one batch: about as many tokens as a turn samples, of one rank or more. A module that no
turn reached in the steps that are read is counted, and has no figure.
"""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import Connection

from fp8watch_server.store import queries
from fp8watch_server.store.rows import RunRow, SiteRow

FIELD = "impact_rms"
WINDOWS = (64, 512, 4096)
"""Steps from the newest that are looked back for a figure, in turn."""
NUM_SHOWN = 24

Dict = dict[str, Any]


def is_measured_at(site: SiteRow) -> bool:
    """Whether the figure of a module belongs to this site: the input of its forward GEMM."""
    return site["operand"] == "input" and site["gemm"] == "fprop"


def layer_costs(conn: Connection, run: RunRow, sites: list[SiteRow]) -> Dict:
    """Modules by loss impact per token, each with the step of its figure and its share of the squares.

    Returns:
        rows: [{site, step, value, share}], at most NUM_SHOWN; value in nats, or "nan" and its kin, which have no share.
        num_more: rows that are not shown.
        num_without: modules in FP8 without a figure.
    """
    asked = {int(s["id"]): s for s in sites if is_measured_at(s)}
    found: dict[int, tuple[int, Any]] = {}
    last = -1 if run["last_step"] is None else int(run["last_step"])
    high = last
    for window in WINDOWS:
        missing = sorted(asked.keys() - found.keys())
        low = max(0, last - window + 1)
        if high < 0 or not missing or (window == WINDOWS[-1] and not found):
            break
        for site, cells in queries.newest(conn, run["id"], (FIELD,), low, high, missing).items():
            found[site] = cells[FIELD]
        high = low - 1
    squares = {i: float(v) ** 2 for i, (_, v) in found.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    total = sum(squares.values())
    rows = [
        {
            "site": asked[i],
            "step": step,
            "value": value,
            "share": squares[i] / total if i in squares and total else None,
        }
        for i, (step, value) in found.items()
    ]
    rows.sort(key=lambda r: (r["share"] is not None, -(r["share"] or 0.0), r["site"]["order"]))
    return {"rows": rows[:NUM_SHOWN], "num_more": len(rows[NUM_SHOWN:]), "num_without": len(asked) - len(found)}
