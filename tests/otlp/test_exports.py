"""Metrics and incidents reach a real receiver of OTLP/HTTP; nobody waits for it, and what fails is told once and counted."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from collector.kit import Agent, make_site
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from otlp.receiver import OtlpReceiver, named
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from fp8watch_server.observability.otlp_metrics import OtlpMetrics
from fp8watch_server.otlp.client import Client, Counts

SITE = make_site("layers.1.mlp.down_proj")
FAST = {"otlp_interval": 0.2}
INF = {"num_inf": [0] * 4 + [1, 0], "num_sentinel_tiles": [0] * 4 + [1, 0]}


def exported(got: Any) -> dict[str, Any]:
    """Metrics of one request by name."""
    (resource,) = got.message.resource_metrics
    (scope,) = resource.scope_metrics
    return {m.name: m for m in scope.metrics}


def points(metric: Any) -> dict[tuple[tuple[str, Any], ...], Any]:
    data = getattr(metric, metric.WhichOneof("data"))
    return {tuple(sorted(named(p.attributes).items())): p for p in data.data_points}


def seen_on_the_page(client: httpx.Client) -> dict[str, float]:
    """Value of each sample by its line."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        found |= {f"{s.name}{sorted(s.labels.items())}": s.value for s in family.samples}
    return found


def failed(client: httpx.Client, signal: str) -> float:
    return seen_on_the_page(client)[f"fp8watch_otlp_exports_total{[('outcome', 'failed'), ('signal', signal)]}"]


def until(done: Callable[[], Any], timeout_s: float = 40.0) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_families_of_the_metrics_page_arrive_under_their_names(
    collector: Callable[..., httpx.Client], receiver: OtlpReceiver
) -> None:
    client = collector(otlp_endpoint=receiver.url, **FAST)
    Agent(client).register([SITE]).send([SITE], list(range(6)), fields={"amax_max": 3.5}, scalars={"loss": [2.5] * 6})
    got = receiver.wait_for(
        "/v1/metrics", lambda all: "fp8watch_amax_max" in exported(all[-1]) if all else False
    )[-1]  # fmt: skip
    metrics = exported(got)
    page = list(text_string_to_metric_families(client.get("/metrics").text))
    assert set(metrics) == {f.name + ("_info" if f.type == "info" else "") for f in page if f.samples}
    place = (("layer", SITE.module), ("operand", SITE.operand), ("run", "run-1"))
    assert points(metrics["fp8watch_amax_max"])[place].as_double == 3.5
    assert metrics["fp8watch_amax_max"].description == "Largest tile amax, newest step"
    totals = metrics["fp8watch_nonfinite_elements"].sum
    assert totals.is_monotonic
    assert totals.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert totals.data_points[0].start_time_unix_nano == 0, "a total of the database began before this process"
    own = metrics["fp8watch_collector_ingest_bytes"]
    assert own.unit == "By"
    assert 0 < own.sum.data_points[0].start_time_unix_nano < own.sum.data_points[0].time_unix_nano
    commits = metrics["fp8watch_collector_commit_seconds"]
    (histogram,) = points(commits).values()
    assert commits.unit == "s"
    assert histogram.count == sum(histogram.bucket_counts) >= 1
    assert len(histogram.bucket_counts) == len(histogram.explicit_bounds) + 1
    who = named(got.message.resource_metrics[0].resource.attributes)
    assert who["service.name"] == "fp8watch-collector"


def test_an_incident_is_a_log_record_with_its_place_cause_and_address(
    collector: Callable[..., httpx.Client], receiver: OtlpReceiver
) -> None:
    client = collector(otlp_endpoint=receiver.url, otlp_headers="x-key=abc%20def", otlp_interval=3600.0)
    Agent(client).register([SITE]).send([SITE], list(range(6)), fields=INF)
    (got,) = receiver.wait_for("/v1/logs")[:1]
    assert got.headers["x-key"] == "abc def"
    (resource,) = got.message.resource_logs
    record = resource.scope_logs[0].log_records[0]
    incident = client.get("/api/v1/incidents").json()["items"][0]
    attributes = named(record.attributes)
    assert (record.event_name, record.body.string_value) == ("fp8watch.incident", incident["title"])
    assert (record.severity_number, record.severity_text) == (18, "critical")
    assert attributes["fp8watch.run.id"] == "run-1"
    assert attributes["fp8watch.step.first"] == incident["first_step"] == 4
    assert attributes["fp8watch.site.module"] == SITE.module
    assert attributes["fp8watch.site.operand"] == SITE.operand
    assert attributes["fp8watch.incident.cause"] == incident["cause"]
    assert attributes["fp8watch.incident.url"] == f"https://watch.example/incidents/{incident['id']}"
    assert attributes["fp8watch.incident.state"] == "firing"
    assert attributes["fp8watch.incident.mode"] == incident["mode"]
    assert abs(record.time_unix_nano / 1e9 - incident["opened_at"]) < 1e-3


def test_ingest_waits_for_no_receiver(
    collector: Callable[..., httpx.Client], receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for it would wait for half a minute, and the client has no more than twenty seconds of patience."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    receiver.hold = threading.Event()
    client = collector(otlp_endpoint=receiver.url, **FAST)
    agent = Agent(client).register([SITE])
    agent.send([SITE], list(range(6)), fields=INF)
    receiver.wait_for("/v1/metrics")
    receiver.wait_for("/v1/logs")
    for step in range(10, 20):
        agent.send([SITE], [step])
    assert client.get("/metrics").status_code == 200
    assert len([got for got in receiver.got if got.path == "/v1/metrics"]) == 1, "one export at a time"


def test_a_receiver_that_fails_is_told_once_and_counted_and_gets_the_incident_later(
    collector: Callable[..., httpx.Client], receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.always = 500
    client = collector(otlp_endpoint=receiver.url, **FAST)
    Agent(client).register([SITE]).send([SITE], list(range(6)), fields=INF)
    receiver.wait_for("/v1/metrics", lambda got: len(got) >= 3)
    receiver.wait_for("/v1/logs", lambda got: len(got) >= 3)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert sum("OTLP metrics: http://127.0.0.1/… takes nothing (HTTP 500)" in w for w in warnings) == 1, warnings
    assert sum(" on otlp: pending (http://127.0.0.1/…: HTTP 500)" in w for w in warnings) == 1, warnings
    assert len(warnings) == 2, warnings
    receiver.always = 200
    num_before = len(receiver.wait_for("/v1/logs"))
    receiver.wait_for("/v1/logs", lambda got: len(got) > num_before)
    until(lambda: any("takes them again" in r.getMessage() for r in caplog.records))
    until(lambda: failed(client, "metrics") >= 3 and failed(client, "logs") >= 2)
    until(
        lambda: any(
            "outcome', 'sent'), ('signal', 'logs" in line and value for line, value in seen_on_the_page(client).items()
        )
    )


def test_what_is_not_finite_arrives_as_it_is_and_buckets_stand_alone(receiver: OtlpReceiver) -> None:
    gauge = GaugeMetricFamily("fp8watch_loss", "x", labels=["run"])
    for name, value in (("a", math.nan), ("b", math.inf), ("c", -math.inf)):
        gauge.add_metric([name], value)
    histogram = HistogramMetricFamily("fp8watch_collector_commit_seconds", "x")
    histogram.add_metric([], [("0.1", 2.0), ("1.0", 5.0), ("+Inf", 6.0)], 3.25)
    exporter = OtlpMetrics(lambda: [gauge, histogram], Client("metrics", receiver.url, counts=Counts()), 0.05)
    exporter.start()
    metrics = exported(receiver.wait_for("/v1/metrics")[0])
    exporter.stop()
    values = {labels[0][1]: p.as_double for labels, p in points(metrics["fp8watch_loss"]).items()}
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (math.inf, -math.inf)
    (point,) = points(metrics["fp8watch_collector_commit_seconds"]).values()
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([2, 3, 1], [0.1, 1.0])
    assert (point.count, point.sum, point.HasField("min")) == (6, 3.25, False)


def test_many_series_go_in_several_requests(receiver: OtlpReceiver) -> None:
    gauge = GaugeMetricFamily("fp8watch_amax_max", "x", labels=["layer"])
    for i in range(4500):
        gauge.add_metric([f"layers.{i}"], 1.0)
    exporter = OtlpMetrics(lambda: [gauge], Client("metrics", receiver.url, counts=Counts()), 0.05)
    exporter.start()
    got = receiver.wait_for("/v1/metrics", lambda got: len(got) >= 3)[:3]
    exporter.stop()
    sizes = [len(points(exported(g)["fp8watch_amax_max"])) for g in got]
    assert sum(sizes) == 4500
    assert max(sizes) <= 2000


def test_a_database_that_is_away_does_not_end_the_exports(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def families() -> list[Any]:
        asked.append(1)
        if len(asked) < 4:
            raise ConnectionError("secret of the database")
        return [GaugeMetricFamily("fp8watch_run_step", "x", value=1.0)]

    exporter = OtlpMetrics(families, Client("metrics", receiver.url, counts=Counts()), 0.05)
    exporter.start()
    receiver.wait_for("/v1/metrics")
    exporter.stop()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "OTLP metrics: cannot be read (ConnectionError); trying again"
