"""Prometheus /metrics: read from the database, cached, with a bounded number of series.

Upstream:   fp8watch_server.store.totals (table site_total)
Shapes:     rows -> metric families of prometheus_client
Thread:     query pool

Tile, step and rank are never labels. NaN and Inf are exported as such. `layer` is the module; of the two directions of
an operand, which hold the same elements, the worse one is exported.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.db.moves_under_way import moves_under_way
from fp8watch_server.db.shards import Shards
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.otlp.client import EXPORTS
from fp8watch_server.store.fields import SERIES_FIELDS
from fp8watch_server.store.incident_states import FALSE_ALARM

CACHE_S = 5.0
MAX_SERIES = 10_000
MAX_RUNS = 200
NEWEST_STEPS, NEWEST_ROWS = 2048, 16_384
"""Of a run: how far back its newest loss is looked for."""
FORGET_RUN_AFTER_S = 86_400.0
"""A run that has been silent for a day leaves /metrics."""

COUNTERS = {
    "num_nonfinite": ("fp8watch_nonfinite_elements", "NaN and Inf before the cast"),
    "num_saturated": ("fp8watch_saturated_elements", "Elements that were clipped"),
    "num_sentinel_tiles": ("fp8watch_sentinel_tiles", "Tiles whose amax is Inf, so that their scale was forced to 1"),
}
GAUGES = {
    "underflow_ratio": ("fp8watch_underflow_ratio", "Non-zero elements that became 0, newest step"),
    "amax_max": ("fp8watch_amax_max", "Largest tile amax, newest step"),
    "scale_inv_max": ("fp8watch_scale_inv_max", "Largest scale_inv of a tile, newest step"),
    "scale_inv_min": ("fp8watch_scale_inv_min", "Smallest scale_inv of a tile, newest step"),
    "tile_sqnr_db": ("fp8watch_tile_sqnr_db", "SQNR of the tiles in dB, newest step"),
}
_OF_CLASS = {1: math.nan, 2: math.inf, 3: -math.inf}


class _Budget:
    """Number of series that may still be written."""

    def __init__(self, num_series: int) -> None:
        self.left = num_series
        self.dropped = 0

    def take(self, count: int = 1) -> bool:
        if count > self.left:
            self.dropped += count
            return False
        self.left -= count
        return True


class FleetCollector(Collector):
    """prometheus_client collector that reads the database at most every CACHE_S seconds."""

    def __init__(self, shards: Shards, stats: IngestStats, clock: Callable[[], float] = time.time) -> None:
        self._shards = shards
        self._stats = stats
        self._clock = clock
        self._num_dropped = 0  # since this process started: a counter must not decrease

    def describe(self) -> Iterable[Metric]:
        """Empty: names are static, but listing them would read the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metric families."""
        budget = _Budget(MAX_SERIES - 100)  # the rest is reserved for the collector's own metrics
        with self._shards.connections() as everywhere:
            yield from _merged(metric for conn in everywhere.conns for metric in self._runs(conn, budget))
            yield from _merged(metric for conn in everywhere.conns for metric in _notifications(conn))
            yield from _moves(everywhere.conns[0])
        yield _shards_up(self._shards, everywhere.away)
        yield from self._own()
        dropped = CounterMetricFamily(
            "fp8watch_series_dropped",
            "Series above the budget, left out of answers; of runs without any, as many as there can be",
        )
        self._num_dropped += budget.dropped
        dropped.add_metric([], self._num_dropped)
        yield dropped

    def _runs(self, conn: Connection, budget: _Budget) -> Iterable[Metric]:
        r = t.run.c
        runs = conn.execute(
            sa.select(t.run)
            .where(r.tenant == t.DEFAULT_TENANT, r.last_seen_at > self._clock() - FORGET_RUN_AFTER_S)
            .order_by(r.last_seen_at.desc())
            .limit(MAX_RUNS)
        ).all()
        info = InfoMetricFamily("fp8watch_run", "Facts of a run", labels=["run"])
        step = GaugeMetricFamily("fp8watch_run_step", "Last optimizer step that arrived", labels=["run"])
        seen = GaugeMetricFamily(
            "fp8watch_run_last_seen_timestamp_seconds", "When the collector last heard of the run", labels=["run"]
        )
        kept_rows: list[Any] = []
        for row in runs:
            if not budget.take(3):
                continue
            kept_rows.append(row)
            facts = {"recipe": row.recipe, "format": _format(conn, row.run_id), "backend": row.backend}
            info.add_metric([row.run_id], facts)
            seen.add_metric([row.run_id], row.last_seen_at)
            if row.last_step is not None:
                step.add_metric([row.run_id], row.last_step)
        yield from (info, step, seen)
        kept = [row.run_id for row in kept_rows]
        yield from _scalars(conn, kept_rows, budget)
        yield from _incidents(conn, kept, budget)
        yield from _agents(conn, kept, budget)
        yield from _sites(conn, kept, budget)

    def _own(self) -> Iterable[Metric]:
        batches = CounterMetricFamily(
            "fp8watch_collector_ingest_batches", "Bodies by what became of them", labels=["outcome"]
        )
        for outcome, count in self._stats.outcomes.items():
            batches.add_metric([outcome], count)
        yield batches
        taken = CounterMetricFamily("fp8watch_collector_ingest_bytes", "Bytes of bodies that were accepted")
        taken.add_metric([], self._stats.num_bytes)
        yield taken
        buckets, sum_s = self._stats.commit_seconds.snapshot()
        commit = HistogramMetricFamily("fp8watch_collector_commit_seconds", "Time to commit a batch")
        commit.add_metric([], buckets, sum_s)
        yield commit
        inflight = GaugeMetricFamily("fp8watch_collector_inflight_bytes", "Bytes of bodies in memory")
        inflight.add_metric([], self._stats.inflight_bytes)
        yield inflight
        exports = CounterMetricFamily(
            "fp8watch_otlp_exports",
            "Exports over OTLP by what became of them: sent, failed",
            labels=["signal", "outcome"],
        )
        for labels, count in EXPORTS.snapshot().items():
            exports.add_metric(labels, count)
        yield exports


def _format(conn: Connection, run_id: str) -> str:
    c = t.site.c
    formats = conn.execute(
        sa.select(c.format).where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT).distinct().order_by(c.format)
    ).scalars()
    return "+".join(formats)


def _scalars(conn: Connection, runs: list[Any], budget: _Budget) -> Iterable[Metric]:
    c = t.scalar.c
    for name, text in (("loss", "Newest loss, mean over ranks"), ("grad_norm", "Newest norm of the gradient")):
        family = GaugeMetricFamily(f"fp8watch_{name}", text, labels=["run"])
        kind = c[f"{name}_class"]
        for run in runs:
            if run.last_step is None:
                continue
            of_run = (c.run_id == run.run_id, c.tenant == t.DEFAULT_TENANT, c.attempt == run.last_step_attempt)
            near = c.step.between(run.last_step - NEWEST_STEPS + 1, run.last_step)
            last = sa.select(c.step, kind.label("kind")).where(*of_run, near)
            rows_of_last = last.order_by(c.step.desc()).limit(NEWEST_ROWS).subquery()
            given = rows_of_last.c.kind.is_not(None)
            step = conn.execute(sa.select(sa.func.max(rows_of_last.c.step)).where(given)).scalar()
            if step is None or not budget.take():
                continue
            rows = conn.execute(sa.select(c[name], kind).where(*of_run, c.step == step, kind.is_not(None)))
            values = [value if cls == 0 else _OF_CLASS[cls] for value, cls in rows]
            family.add_metric([run.run_id], math.fsum(values) / len(values) if _summable(values) else sum(values))
        yield family


def _summable(values: list[float]) -> bool:
    return all(math.isfinite(v) and abs(v) < 1e300 for v in values)


def _incidents(conn: Connection, run_ids: list[str], budget: _Budget) -> Iterable[Metric]:
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


def _agents(conn: Connection, run_ids: list[str], budget: _Budget) -> Iterable[Metric]:
    c = t.session.c
    dropped = CounterMetricFamily(
        "fp8watch_agent_dropped_records", "Records that agents gave up", labels=["run", "reason"]
    )
    overhead = GaugeMetricFamily(
        "fp8watch_agent_overhead_ratio",
        "Share of step time that the watch times of itself, a lower bound, worst rank",
        labels=["run"],
    )
    by_reason: dict[tuple[str, str], float] = {}
    worst: dict[str, float] = {}
    rows = conn.execute(
        sa.select(c.run_id, c.health).where(c.run_id.in_(run_ids), c.tenant == t.DEFAULT_TENANT, c.health.is_not(None))
    )
    for run_id, health in rows:
        for name, value in (health or {}).items():
            number = float(value)
            if name.startswith("dropped_"):
                key = (run_id, name.removeprefix("dropped_")[:100])
                by_reason[key] = by_reason.get(key, 0.0) + number
            elif name == "overhead_ratio":
                worst[run_id] = _worse_gauge(worst.get(run_id), number, "max")
    for key, number in sorted(by_reason.items()):
        if budget.take():
            dropped.add_metric(list(key), number)
    for run_id, number in worst.items():
        if budget.take():
            overhead.add_metric([run_id], number)
    yield from (dropped, overhead)


def _worse_gauge(a: float | None, b: float, worst: str) -> float:
    if a is None or math.isnan(b):
        return b
    if math.isnan(a):
        return a
    return min(a, b) if worst == "min" else max(a, b)


def _sites(conn: Connection, run_ids: list[str], budget: _Budget) -> Iterable[Metric]:
    labels = ["run", "layer", "operand"]
    counters = {f: CounterMetricFamily(name, text, labels=labels) for f, (name, text) in COUNTERS.items()}
    gauges = {f: GaugeMetricFamily(name, text, labels=labels) for f, (name, text) in GAUGES.items()}
    s, total = t.site.c, t.site_total.c
    same_site = sa.and_(s.run_id == total.run_id, s.tenant == total.tenant, s.site == total.site)
    for i, run_id in enumerate(run_ids):
        if budget.left < len(COUNTERS):  # no layer fits any more
            of_rest = (s.run_id.in_(run_ids[i:]), s.tenant == t.DEFAULT_TENANT)
            layers = sa.select(s.run_id, s.module, s.operand).join(t.site_total, same_site).where(*of_rest).distinct()
            num_layers = conn.execute(sa.select(sa.func.count()).select_from(layers.subquery())).scalar_one()
            budget.dropped += num_layers * (len(COUNTERS) + len(GAUGES))
            break
        rows = conn.execute(
            sa.select(s.module, s.operand, t.site_total)
            .join(t.site_total, same_site)
            .where(s.run_id == run_id, s.tenant == t.DEFAULT_TENANT)
            .order_by(s.flow_order)
        )
        found: dict[tuple[str, str], dict[str, float]] = {}
        for row in rows:
            values = found.setdefault((row.module, row.operand), {})
            for name in COUNTERS:
                values[name] = max(values.get(name, 0.0), float(getattr(row, name)))
            for name, value in row.newest.items():
                if name in GAUGES:
                    values[name] = _worse_gauge(values.get(name), float(value), SERIES_FIELDS[name].worst)
        for (module, operand), values in found.items():
            if not budget.take(len(values)):
                continue
            for name, number in values.items():
                family: Any = counters.get(name) or gauges[name]
                family.add_metric([run_id, module, operand], number)
    yield from counters.values()
    yield from gauges.values()


def _notifications(conn: Connection) -> Iterable[Metric]:
    c = t.outbox.c
    family = CounterMetricFamily(
        "fp8watch_notifications", "Messages by what became of them: sent, dead", labels=["channel", "outcome"]
    )
    settled = c.state.in_(["sent", "dead"])  # pending ones have no outcome yet: a counter must not decrease
    rows = conn.execute(
        sa.select(c.channel, c.state, sa.func.count())
        .where(c.tenant == t.DEFAULT_TENANT, settled)
        .group_by(c.channel, c.state)
    )
    for channel, state, count in rows.fetchmany(64):
        family.add_metric([channel or "all", state], count)
    yield family


def _shards_up(shards: Shards, away: Sequence[str]) -> Metric:
    up = GaugeMetricFamily(
        "fp8watch_shard_up", "Whether a shard answers; runs on one that does not are missing here", labels=["shard"]
    )
    for name in shards.others:
        up.add_metric([name], float(name not in away))
    return up


def _moves(home: Connection) -> Iterable[Metric]:
    """Of runs between databases: those that nobody is at work on."""
    cut = [move for move in moves_under_way(home) if not move.at_work]
    family = GaugeMetricFamily(
        "fp8watch_moves_cut_short", "Moves of runs between shards that nobody finishes, by whether batches are refused",
        labels=["refused"],
    )  # fmt: skip
    for refused in (False, True):
        family.add_metric([str(refused).lower()], sum(move.refuses is refused for move in cut))
    yield family


def _merged(found: Iterable[Metric]) -> Iterable[Metric]:
    """Families of several databases as one each; what two of them count of the same is added."""
    families: dict[str, Metric] = {}
    for metric in found:
        known = families.setdefault(metric.name, metric)
        if known is metric:
            continue
        at = {(s.name, tuple(sorted(s.labels.items()))): i for i, s in enumerate(known.samples)}
        for sample in metric.samples:
            i = at.get((sample.name, tuple(sorted(sample.labels.items()))))
            if i is None:
                known.samples.append(sample)
            else:
                known.samples[i] = sample._replace(value=known.samples[i].value + sample.value)
    return families.values()


class _Kept(Collector):
    """Families that were made before."""

    def __init__(self) -> None:
        self.families: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        """As they were made."""
        return self.families


class MetricsPage:
    """The families, and the rendered text of /metrics, made out of the database at most every CACHE_S."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, shards: Shards, stats: IngestStats) -> None:
        self._collector, self._kept = FleetCollector(shards, stats), _Kept()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._kept)
        self._lock = threading.Lock()
        self._made_at = -CACHE_S
        self._text: bytes | None = None

    def families(self) -> list[Metric]:
        """The families; not to be changed."""
        with self._lock:
            return self._fresh()

    def text(self) -> bytes:
        """The exposition."""
        with self._lock:
            self._fresh()
            if self._text is None:
                self._text = generate_latest(self._registry)
            return self._text

    def _fresh(self) -> list[Metric]:
        if time.monotonic() - self._made_at >= CACHE_S:
            self._kept.families, self._text = list(self._collector.collect()), None
            self._made_at = time.monotonic()
        return self._kept.families
