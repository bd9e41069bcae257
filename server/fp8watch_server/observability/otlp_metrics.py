"""The families of /metrics over OTLP/HTTP, every few seconds.

Shapes:     metric families of prometheus_client -> opentelemetry metrics of the same names -> POST {endpoint}/v1/metrics
Thread:     one of its own; it waits for nobody and nobody waits for it

A family has one name: that of /metrics without `_total`, which a counter has there by Prometheus's rules and gets again
where OTLP is written into Prometheus. Labels are attributes. Totals of runs come out of the database and outlive the
process, so the time at which they began is not given. NaN and Inf are exported as such.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from fp8watch_agent.version import __version__
from fp8watch_server.http import logs
from fp8watch_server.otlp.client import SCOPE, Client, resource, standard_secrets
from fp8watch_server.settings import Settings

OWN = ("fp8watch_collector_", "fp8watch_series_dropped", "fp8watch_otlp_exports")
"""What this process counts from its start."""
UNITS = {"_seconds": "s", "_bytes": "By"}
STOP_S = 5.0

_log = logging.getLogger(__name__)


def exporting(settings: Settings, families: Callable[[], Iterable[Metric]]) -> OtlpMetrics | None:
    """The exporter that the settings ask for; None where they ask for none.

    Raises:
        OtlpError: the package is not installed.
    """
    if not settings.otlp_endpoint:
        return None
    logs.hide(standard_secrets())
    return OtlpMetrics(
        families, Client("metrics", settings.otlp_endpoint, settings.otlp_headers), settings.otlp_interval
    )


class OtlpMetrics:
    """Exports until it is stopped. What cannot be sent is not kept: the next export has newer values.

    Args:
        families: metric families, as /metrics shows them.
        client: of the signal metrics.
        interval_s: from one export to the next.
    """

    def __init__(self, families: Callable[[], Iterable[Metric]], client: Client, interval_s: float) -> None:
        self._families, self._client, self._interval_s = families, client, interval_s
        self._began_ns = time.time_ns()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fp8watch-otlp-metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End it, after one last export where the receiver has taken the one before."""
        self._stop.set()
        self._thread.join(STOP_S)
        self._client.stop()

    def _run(self) -> None:
        failed = False
        while True:
            last = self._stop.wait(self._interval_s)
            if last and self._client.num_failed:
                return
            try:
                batch = metrics_data(self._families(), self._began_ns, time.time_ns())
                failed = False
            except Exception as e:  # noqa: BLE001  (a database that is away must not end the thread)
                if not failed:
                    _log.warning("OTLP metrics: cannot be read (%s); trying again", type(e).__name__)
                failed = True
            else:
                self._client.export(batch)
            if last:
                return


def metrics_data(families: Iterable[Metric], began_ns: int, now_ns: int) -> Any:
    """MetricsData of OpenTelemetry's SDK."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    found = []
    for family in families:
        begins_ns = began_ns if family.name.startswith(OWN) else 0
        if (metric := _metric(family, begins_ns, now_ns)) is not None:
            found.append(metric)
    scope = ScopeMetrics(scope=InstrumentationScope(SCOPE, __version__), metrics=found, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource(__version__), scope_metrics=[scope], schema_url="")])


def _metric(family: Metric, begins_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics import export as sdk

    if not family.samples:
        return None
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    name = family.name
    data: Any
    if family.type == "histogram":
        points = [_histogram(list(samples), begins_ns, now_ns) for samples in _by_labels(family.samples)]
        data = sdk.Histogram(data_points=points, aggregation_temporality=cumulative)
    else:
        numbers = [
            sdk.NumberDataPoint(
                attributes=dict(s.labels), start_time_unix_nano=begins_ns, time_unix_nano=now_ns, value=float(s.value)
            )
            for s in family.samples
        ]
        if family.type == "counter":
            data = sdk.Sum(data_points=numbers, aggregation_temporality=cumulative, is_monotonic=True)
        else:
            name = f"{name}_info" if family.type == "info" else name
            data = sdk.Gauge(data_points=numbers)
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    return sdk.Metric(name=name, description=family.documentation, unit=unit, data=data)


def _by_labels(samples: Sequence[Sample]) -> Iterable[Sequence[Sample]]:
    found: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        found.setdefault(key, []).append(sample)
    return found.values()


def _histogram(samples: Sequence[Sample], begins_ns: int, now_ns: int) -> Any:
    """Prometheus's buckets add up; OTLP's are each alone."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    buckets = [(float(s.labels["le"]), int(s.value)) for s in samples if s.name.endswith("_bucket")]
    below = [0, *(count for _, count in buckets)]
    none: Any = None  # extremes are not known, and may be left out
    return HistogramDataPoint(
        attributes={k: v for k, v in samples[0].labels.items() if k != "le"},
        start_time_unix_nano=begins_ns,
        time_unix_nano=now_ns,
        count=buckets[-1][1],
        sum=next((float(s.value) for s in samples if s.name.endswith("_sum")), 0.0),
        bucket_counts=[high - low for low, high in pairwise(below)],
        explicit_bounds=[bound for bound, _ in buckets[:-1]],
        min=none,
        max=none,
    )
