"""What /metrics says of each run: its newest scalars, its incidents, its agents.

Shapes:     rows of runs -> metric families, within a budget of series
Thread:     query pool
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.observability.series_budget import SeriesBudget, worse
from fp8watch_server.store.incident_states import FALSE_ALARM
from fp8watch_server.store.run_list import alive

NEWEST_STEPS, NEWEST_ROWS = 2048, 16_384
"""Of a run: how far back its newest loss is looked for, and how many rows in any case."""
LATE_STEPS = 16
"""A rank sends eight steps at a time, so that of the last steps not every rank has been heard of."""
MAX_KNOWN = 10_000
"""Runs and scalars whose newest step is remembered."""
_OF_CLASS = {1: math.nan, 2: math.inf, 3: -math.inf}


class NewestScalars:
    """The newest loss and gradient norm of each run.

    There is a row for each rank and step, with a loss in it or not, and a run of many ranks may log one now and then. So the
    newest rows are looked through, and those since the last look however many they are; what was found is remembered.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], tuple[int | None, int]] = {}
        """(run, attempt, name) -> step of the newest that is known, and the step up to which was looked."""

    def families(self, conn: Connection, runs: list[Any], budget: SeriesBudget) -> Iterable[Metric]:
        """One family of each scalar."""
        c = t.scalar.c
        for name, text in (("loss", "Newest loss, mean over ranks"), ("grad_norm", "Newest norm of the gradient")):
            family = GaugeMetricFamily(f"fp8watch_{name}", text, labels=["run"])
            kind = c[f"{name}_class"]
            for run in runs:
                if run.last_step is None or (step := self._newest_step(conn, run, name)) is None:
                    continue
                rows = conn.execute(sa.select(c[name], kind).where(*_of_run(run), c.step == step, kind.is_not(None)))
                values = [value if cls == 0 else _OF_CLASS[cls] for value, cls in rows]
                if values and budget.take():
                    mean = math.fsum(values) / len(values) if _summable(values) else sum(values)
                    family.add_metric([run.run_id], mean)
            yield family

    def _newest_step(self, conn: Connection, run: Any, name: str) -> int | None:
        c = t.scalar.c
        kind = c[f"{name}_class"]
        key = (run.run_id, run.last_step_attempt, name)
        first = run.last_step - NEWEST_STEPS + 1
        known, looked = self._known.pop(key, (None, None))
        if looked is not None and looked > run.last_step:  # training went back in place
            known = looked = None
        last = sa.select(c.step, kind.label("kind")).where(*_of_run(run), c.step.between(first, run.last_step))
        rows_of_last = last.order_by(c.step.desc()).limit(NEWEST_ROWS).subquery()
        step = conn.execute(
            sa.select(sa.func.max(rows_of_last.c.step)).where(rows_of_last.c.kind.is_not(None))
        ).scalar()
        if step is None and looked is not None:
            since = (c.step.between(max(first, looked - LATE_STEPS), run.last_step), kind.is_not(None))
            step = conn.execute(sa.select(sa.func.max(c.step)).where(*_of_run(run), *since)).scalar()
        if step is None and known is not None and known >= first:
            step = known
        self._known[key] = (step, run.last_step)
        while len(self._known) > MAX_KNOWN:
            self._known.pop(next(iter(self._known)))
        return step


def _of_run(run: Any) -> tuple[sa.ColumnElement[bool], ...]:
    c = t.scalar.c
    return (c.run_id == run.run_id, c.tenant == t.DEFAULT_TENANT, c.attempt == run.last_step_attempt)


def _summable(values: list[float]) -> bool:
    return all(math.isfinite(v) and abs(v) < 1e300 for v in values)


def incidents(conn: Connection, run_ids: list[str], budget: SeriesBudget) -> Iterable[Metric]:
    c = t.incident.c
    labels = ["run", "mode", "severity"]
    opened = GaugeMetricFamily("fp8watch_incidents_open", "Incidents that are not resolved", labels=labels)
    total = CounterMetricFamily("fp8watch_incidents", "Incidents that were ever opened", labels=labels)
    unresolved = sa.func.sum(sa.case((c.status != "resolved", 1), else_=0))
    rows = conn.execute(
        sa.select(c.run_id, c.mode, c.severity, sa.func.count(), unresolved)
        .where(c.run_id.in_(run_ids), c.tenant == t.DEFAULT_TENANT)
        .group_by(c.run_id, c.mode, c.severity)
    )
    for run_id, mode, severity, num, num_open in rows:
        if budget.take(2):
            opened.add_metric([run_id, mode, severity], num_open)
            total.add_metric([run_id, mode, severity], num)
    false = GaugeMetricFamily("fp8watch_false_alarms", "Incidents that people marked as false alarms", labels=labels)
    marked = conn.execute(
        sa.select(c.run_id, c.mode, c.severity, sa.func.count())
        .where(c.run_id.in_(run_ids), c.tenant == t.DEFAULT_TENANT, c.closed_as == FALSE_ALARM)
        .group_by(c.run_id, c.mode, c.severity)
    )
    for run_id, mode, severity, num in marked:
        if budget.take():
            false.add_metric([run_id, mode, severity], num)
    yield from (opened, total, false)


def agents(conn: Connection, run_ids: list[str], budget: SeriesBudget) -> Iterable[Metric]:
    """What agents gave up, of all sessions; what they cost, of those that go on."""
    c = t.session.c
    labels = ["run", "reason"]
    records = CounterMetricFamily("fp8watch_agent_dropped_records", "Records that agents gave up", labels=labels)
    maps = CounterMetricFamily(
        "fp8watch_agent_dropped_tile_maps",
        "Tile maps that agents gave up; no statistics are lost with them",
        labels=labels,
    )
    overhead = GaugeMetricFamily(
        "fp8watch_agent_overhead_ratio",
        "Share of step time that the watch times of itself, a lower bound, worst rank that goes on",
        labels=["run"],
    )
    late = CounterMetricFamily(
        "fp8watch_late_steps",
        "Steps of ranks that came too late for the statistics of detectors and to be compared between ranks",
        labels=["run"],
    )
    dropped: dict[tuple[str, str, str], float] = {}
    worst: dict[str, float] = {}
    going = conn.execute(sa.select(c.run_id, c.session).where(c.run_id.in_(run_ids), *alive())).all()
    go_on = {(run_id, session) for run_id, session in going}
    rows = conn.execute(
        sa.select(c.run_id, c.session, c.health).where(
            c.run_id.in_(run_ids), c.tenant == t.DEFAULT_TENANT, c.health.is_not(None)
        )
    )
    for run_id, session, health in rows:
        for name, value in (health or {}).items():
            number = float(value)
            if name.startswith("dropped_"):
                what = "maps" if name.startswith("dropped_maps_") else "records"
                reason = name.removeprefix("dropped_").removeprefix("maps_")[:100]
                dropped[what, run_id, reason] = dropped.get((what, run_id, reason), 0.0) + number
            elif name == "overhead_ratio" and (run_id, session) in go_on:
                worst[run_id] = worse(worst.get(run_id), number, "max")
    for (what, *key), number in sorted(dropped.items()):
        if budget.take():
            (maps if what == "maps" else records).add_metric(key, number)
    for run_id, number in worst.items():
        if budget.take():
            overhead.add_metric([run_id], number)
    counted = sa.select(c.run_id, sa.func.sum(c.num_late_steps)).where(
        c.run_id.in_(run_ids), c.tenant == t.DEFAULT_TENANT
    )
    for run_id, number in conn.execute(counted.group_by(c.run_id).order_by(c.run_id)):
        if budget.take():
            late.add_metric([run_id], float(number))
    yield from (records, maps, overhead, late)
