"""Fleet: all runs side by side, out of the database and out of Prometheus."""

from __future__ import annotations

from typing import Any

from . import run as run_board
from .frame import board, query_variable
from .kit import (
    GREEN,
    PROMETHEUS,
    RED,
    STATUS,
    Sql,
    colored,
    field,
    hidden,
    inner,
    link,
    number,
    over_time,
    override,
    promql,
    rows,
)  # fmt: skip

UID = "fp8watch-fleet"
RUNS = """SELECT status, coalesce(nullif(name, ''), run_id) AS run, last_step, num_critical, num_open, num_incidents, num_sites,
world_size, attempt, recipe, backend, created_at, last_seen_at, run_id FROM grafana.run_now
ORDER BY num_critical > 0 DESC, status = 'ended', last_seen_at DESC LIMIT 500"""
NEW_INCIDENTS = """SELECT $__timeGroup(time, $__interval) AS time, mode AS metric, count(*) AS incidents
FROM grafana.incident_detail WHERE $__timeFilter(time) GROUP BY 1, 2 ORDER BY 1"""
OF = '{run=~"$run"}'


def _largest(metric: str, *by: str) -> str:
    """Several collectors on one database say the same of a run: it counts once."""
    return f"max by ({', '.join(('run', *by))}) ({metric})"


def _rate(metric: str) -> str:
    return f"rate({metric}{OF}[$__rate_interval])"


def _elements(metric: str) -> str:
    return f"sum by (run) ({_largest(_rate(metric), 'layer', 'operand')})"


def _runs(where: str) -> Sql:
    return Sql(f"SELECT count(*) AS runs FROM grafana.run_now WHERE {where}")


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    to_run = inner("Its dashboard", run_board.UID, f"var-run={field('run_id')}")
    page = link("The run's page", f"/runs/{field('run_id')}")
    panels = [
        number("Running", "Runs that send.", _runs("status = 'running'"), width=8),
        number("Stalled", "Silent for 90 s, and not ended.", _runs("status = 'stalled'"), bad=1, width=8),
        number("In trouble", "Runs with an open critical incident.", _runs("num_critical > 0"), bad=1, width=8),
        rows(
            "Runs",
            "Those in trouble first. A name leads to the run's page.",
            Sql(RUNS),
            [
                override("status", mappings=STATUS, custom_cellOptions={"type": "color-text"}, custom_width=90),
                override("run", links=[page, to_run], custom_minWidth=200),
                override("num_critical", **colored((None, GREEN), (1, RED))),
                hidden("run_id"),
            ],
        ),
        over_time(
            "Steps per second",
            "How fast each run goes.",
            [promql(_largest(f"deriv(fp8watch_run_step{OF}[$__rate_interval])"), "{{run}}")],
            unit="short",
        ),
        over_time(
            "Seconds since a run was heard of",
            "A run that ends stays until it is forgotten, a day later.",
            [promql(f"time() - {_largest('fp8watch_run_last_seen_timestamp_seconds' + OF)}", "{{run}}")],
            unit="s",
        ),
        over_time("Loss", "Newest, mean over ranks.", [promql(_largest(f"fp8watch_loss{OF}"), "{{run}}")]),
        over_time(
            "Gradient norm", "Newest.", [promql(_largest(f"fp8watch_grad_norm{OF}"), "{{run}}")], log=10
        ),
        over_time(
            "Open incidents",
            "Not resolved yet, by severity.",
            [promql(f"sum by (run, severity) ({_largest(f'fp8watch_incidents_open{OF}', 'mode', 'severity')})", "{{run}} {{severity}}")],
        ),
        over_time(
            "Lowest tile SQNR",
            "Of the newest step of all sites: quantisation noise at its worst.",
            [promql(f"min by (run) (fp8watch_tile_sqnr_db{OF})", "{{run}}")],
            unit="dB",
        ),
        over_time(
            "Largest underflow",
            "Non-zero elements that became 0, newest step, worst site.",
            [promql(_largest(f"fp8watch_underflow_ratio{OF}"), "{{run}}")],
            unit="percentunit",
        ),
        over_time(
            "Largest amax and extremes of scale_inv",
            "Over all sites, newest step.",
            [
                promql(_largest(f"fp8watch_amax_max{OF}"), "{{run}} amax", "A"),
                promql(_largest(f"fp8watch_scale_inv_max{OF}"), "{{run}} scale_inv max", "B"),
                promql(f"min by (run) (fp8watch_scale_inv_min{OF})", "{{run}} scale_inv min", "C"),
            ],
            unit="sci",
            log=2,
        ),
        over_time(
            "Elements per second that cannot be represented",
            "NaN and Inf before the cast, clipped elements, tiles without a scale.",
            [
                promql(_elements("fp8watch_nonfinite_elements_total"), "{{run}} non-finite", "A"),
                promql(_elements("fp8watch_saturated_elements_total"), "{{run}} saturated", "B"),
                promql(_elements("fp8watch_sentinel_tiles_total"), "{{run}} tiles with amax Inf", "C"),
            ],
            unit="short",
        ),
        over_time(
            "Incidents that began",
            "By failure mode, all runs. Out of the database: a counter that begins at 1 has no rate.",
            [Sql(NEW_INCIDENTS, over_time=True)],
            bars=True,
        ),
        over_time(
            "Overhead of the agents",
            "Share of the step time, worst rank.",
            [promql(_largest(f"fp8watch_agent_overhead_ratio{OF}"), "{{run}}")],
            unit="percentunit",
        ),
        over_time(
            "Records that agents gave up",
            "Since the run began, by reason.",
            [promql(_largest(f"fp8watch_agent_dropped_records_total{OF}", "reason"), "{{run}} {{reason}}")],
            unit="short",
        ),
    ]  # fmt: skip
    runs = query_variable("run", "Run", "label_values(fp8watch_run_info, run)", source=PROMETHEUS, many=True)
    return board(
        UID,
        "fp8watch · Fleet",
        "All runs: which need somebody, how fast they go, how they compare.",
        [runs.all_value(".*")],
        panels,
        annotated="severity = 'critical'",
    )
