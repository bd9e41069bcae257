"""Prometheus /metrics: read from the database, cached, with a bounded number of series.

Upstream:   fp8watch_server.observability.site_metrics
Shapes:     rows -> metric families of prometheus_client
Thread:     query pool

Tile, step and rank are never labels. NaN and Inf are exported as such.
"""

from __future__ import annotations

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
from fp8watch_server.observability import run_metrics, site_metrics
from fp8watch_server.observability.series_budget import SeriesBudget
from fp8watch_server.otlp.client import EXPORTS
from fp8watch_server.store.run_list import alive

CACHE_S = 5.0
MAX_SERIES = 10_000
MAX_RUNS = 200
FORGET_RUN_AFTER_S = 86_400.0
"""A run that has been silent for a day leaves /metrics."""
OVER_AFTER_S = 3600.0
"""A run that has been silent for an hour is over: a job that was killed does not say so."""


class FleetCollector(Collector):
    """prometheus_client collector that reads the database at most every CACHE_S seconds."""

    def __init__(self, shards: Shards, stats: IngestStats, clock: Callable[[], float] = time.time) -> None:
        self._shards = shards
        self._stats = stats
        self._clock = clock
        self._scalars = run_metrics.NewestScalars()
        self._num_dropped = 0  # since this process started: a counter must not decrease

    def describe(self) -> Iterable[Metric]:
        """Empty: names are static, but listing them would read the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metric families."""
        budget = SeriesBudget(MAX_SERIES - 100)  # the rest is reserved for the collector's own metrics
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

    def _runs(self, conn: Connection, budget: SeriesBudget) -> Iterable[Metric]:
        r = t.run.c
        goes_on = sa.case((r.run_id.in_(sa.select(t.session.c.run_id).where(*alive())), 1), else_=0).label("goes_on")
        runs = conn.execute(
            sa.select(t.run, goes_on)
            .where(r.tenant == t.DEFAULT_TENANT, r.last_seen_at > self._clock() - FORGET_RUN_AFTER_S)
            # In an order that does not change with each batch: series that come and go look like counters that jump.
            .order_by(goes_on.desc(), r.created_at.desc(), r.run_id)
            .limit(MAX_RUNS)
        ).all()
        info = InfoMetricFamily("fp8watch_run", "Facts of a run", labels=["run"])
        step = GaugeMetricFamily("fp8watch_run_step", "Last optimizer step that arrived", labels=["run"])
        seen = GaugeMetricFamily(
            "fp8watch_run_last_seen_timestamp_seconds", "When the collector last heard of the run", labels=["run"]
        )
        running = GaugeMetricFamily(
            "fp8watch_run_running",
            "1 while the run goes on, 0 once its ranks have ended or it has been silent for an hour",
            labels=["run"],
        )
        kept_rows: list[Any] = []
        for row in runs:
            if not budget.take(4):
                continue
            kept_rows.append(row)
            facts = {"recipe": row.recipe, "format": _format(conn, row.run_id), "backend": row.backend}
            info.add_metric([row.run_id], facts)
            seen.add_metric([row.run_id], row.last_seen_at)
            running.add_metric([row.run_id], float(row.goes_on and row.last_seen_at > self._clock() - OVER_AFTER_S))
            if row.last_step is not None:
                step.add_metric([row.run_id], row.last_step)
        yield from (info, step, seen, running)
        kept = [row.run_id for row in kept_rows]
        yield from self._scalars.families(conn, kept_rows, budget)
        yield from run_metrics.incidents(conn, kept, budget)
        yield from run_metrics.agents(conn, kept, budget)
        yield from site_metrics.sites(conn, kept, budget)

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
