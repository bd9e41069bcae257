"""Incidents: of several runs or all of them, by mode, by time, each with its place and its fix."""

from __future__ import annotations

from typing import Any

from .frame import board, choice, query_variable
from .kit import SEVERITY, Sql, bars_by, field, hidden, link, number, over_time, override, rows
from .run import INCIDENT_PAGE, RUNBOOK

UID = "fp8watch-incidents"
RUNS = """SELECT coalesce(nullif(name, ''), run_id) || ' · ' || left(run_id, 8) AS __text, run_id AS __value
FROM grafana.run ORDER BY last_seen_at DESC LIMIT 500"""
CHOSEN = "run_id IN (${run:sqlstring}) AND severity IN (${severity:sqlstring})"
TILE_MAP = link(
    "The tile map of its first step",
    f"/runs/{field('run_id')}/sites/{field('site')}/tile-map?step={field('first_step')}&rank={field('rank')}",
)

LIST = f"""SELECT severity, status, time, run, mode, title, module, gemm, operand, direction, first_step, last_step, rank,
tile_row, tile_column, num_sites, verdict, fix, id, run_id, site::text AS site FROM grafana.incident_detail
WHERE {CHOSEN} AND status IN (${{status:sqlstring}}) AND $__timeFilter(time)
ORDER BY status = 'resolved', array_position(ARRAY['critical', 'warning', 'info'], severity), time DESC LIMIT 1000"""
BY_MODE = f"""SELECT mode, count(*) AS incidents FROM grafana.incident_detail
WHERE {CHOSEN} AND $__timeFilter(time) GROUP BY mode ORDER BY incidents DESC LIMIT 40"""
BY_TIME = f"""SELECT $__timeGroup(time, $__interval) AS time, severity AS metric, count(*) AS incidents
FROM grafana.incident_detail WHERE {CHOSEN} AND $__timeFilter(time) GROUP BY 1, 2 ORDER BY 1"""


def _count(where: str) -> Sql:
    return Sql(f"SELECT count(*) AS incidents FROM grafana.incident_detail WHERE {CHOSEN} AND {where}")


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    severities = {"critical": "critical", "warning": "warning", "info": "info"}
    statuses = {"open": "open", "acknowledged": "acknowledged", "resolved": "resolved"}
    panels = [
        number(
            "Open and critical", "Whatever the time range.", _count("status = 'open' AND severity = 'critical'"), bad=1, width=6
        ),
        number("Open", "Whatever the time range.", _count("status = 'open'"), bad=1, width=6),
        number("Acknowledged", "Somebody has them.", _count("status = 'acknowledged'"), width=6),
        number("In the time range", "By the time of their first step.", _count("$__timeFilter(time)"), width=6),
        rows(
            "Incidents",
            "One cause is one row. A title leads to the incident, a mode to its runbook, a module to the tile map.",
            Sql(LIST),
            [
                override(
                    "severity", mappings=SEVERITY, custom_cellOptions={"type": "color-background", "mode": "basic"}, custom_width=90
                ),
                override("title", links=[INCIDENT_PAGE], custom_minWidth=300),
                override("mode", links=[RUNBOOK]),
                override("run", links=[link("The run's page", f"/runs/{field('run_id')}")]),
                override("module", links=[TILE_MAP], custom_minWidth=200),
                hidden("id"),
                hidden("run_id"),
                hidden("site"),
            ],
            height=14,
        ),
        bars_by("By failure mode", "How many began within the time range.", Sql(BY_MODE), name="mode"),
        over_time(
            "Over time", "When they began.", [Sql(BY_TIME, over_time=True)], bars=True
        ),
    ]  # fmt: skip
    return board(
        UID,
        "fp8watch · Incidents",
        "What went wrong in all runs, where, and what to change.",
        [
            query_variable("run", "Run", RUNS, many=True),
            choice("severity", "Severity", severities, "critical", many=True),
            choice("status", "Status", statuses, "open", many=True),
        ],
        panels,
        since="now-7d",
        annotated=None,
    )
