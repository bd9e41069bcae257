"""OTLP is off by default; its settings are checked, the standard variables hold, and no secret is shown."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest
from collector.kit import Agent, make_site
from otlp.receiver import OtlpReceiver, named
from prometheus_client.metrics_core import GaugeMetricFamily

from fp8watch_server.http.logs import TextLines
from fp8watch_server.notify.channels import channels_of
from fp8watch_server.observability.otlp_metrics import OtlpMetrics, exporting
from fp8watch_server.otlp.client import Client, Counts, OtlpError, standard_secrets
from fp8watch_server.settings import SettingError, Settings
from fp8watch_server.settings.webhook_url import TargetError

SITE = make_site("up")


def one_export(receiver: OtlpReceiver) -> None:
    """One gauge, to the receiver."""
    families = [GaugeMetricFamily("fp8watch_run_step", "x", value=1.0)]
    exporter = OtlpMetrics(lambda: families, Client("metrics", receiver.url, counts=Counts()), 0.05)
    exporter.start()
    receiver.wait_for("/v1/metrics")
    exporter.stop()


def test_it_is_off_by_default_and_the_library_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    settings = Settings("sqlite:///x.db")
    assert exporting(settings, list) is None
    assert channels_of(settings) == []
    script = (
        "import sys, fp8watch_server.app; print([m for m in sys.modules if m.startswith('opentelemetry.exporter')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "ftp://x.example", "http://", "http://x.example/?key=hidden", "http://x:y", "http://a b"]
)
def test_an_address_that_cannot_be_one_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingError, match="must be the root URL of a receiver of OTLP/HTTP") as e:
        Settings.from_environ({"HOME": "/h", "FP8WATCH_OTLP_ENDPOINT": url})
    assert "hidden" not in str(e.value)


@pytest.mark.parametrize("text", ["hidden", "=hidden", "a b=hidden", "a=", "a=hidden\n,b=c%0d%0ad"])
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(text: str) -> None:
    given = {"HOME": "/h", "FP8WATCH_OTLP_ENDPOINT": "http://x.example", "FP8WATCH_OTLP_HEADERS": text}
    with pytest.raises(SettingError, match="must be name=value pairs") as e:
        Settings.from_environ(given)
    assert "hidden" not in str(e.value)


def test_headers_without_an_address_are_refused() -> None:
    with pytest.raises(SettingError, match="without FP8WATCH_OTLP_ENDPOINT"):
        Settings.from_environ({"HOME": "/h", "FP8WATCH_OTLP_HEADERS": "a=b"})
    with pytest.raises(SettingError, match="1 to 3600"):
        Settings.from_environ({"HOME": "/h", "FP8WATCH_OTLP_INTERVAL": "0"})


def test_no_secret_is_shown_or_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    url, header = "http://user:pass-of-otlp@x.example:4318/tenant/token0123456789abcdef", "x-key=hidden%20value"
    settings = Settings.from_environ({"HOME": "/h", "FP8WATCH_OTLP_ENDPOINT": url, "FP8WATCH_OTLP_HEADERS": header})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "authorization=Bearer%20standard-secret")
    (channel,) = channels_of(settings)
    assert "hidden value" in settings.secrets
    shown = TextLines([*settings.secrets, *channel.secrets])
    for text in (url, "hidden value", "token0123456789abcdef", "pass-of-otlp", "Bearer standard-secret", repr(channel)):
        record = logging.LogRecord("x", logging.WARNING, "f.py", 1, "%s", (text,), None)
        line = shown.format(record)
        for word in ("hidden", "token0123", "pass-of", "standard-secret"):
            assert word not in line, line
    assert "hidden" not in repr(settings)
    assert channel.masked == "http://x.example/…"
    assert "Bearer standard-secret" in standard_secrets()


def test_standard_variables_hold_and_our_headers_come_beside_them(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-standard=one")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "watch-of-team-a")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    one_export(receiver)
    got = receiver.got[0]
    assert got.headers["x-standard"] == "one"
    assert got.headers["content-encoding"] == "gzip"
    who = named(got.message.resource_metrics[0].resource.attributes)
    assert who["service.name"] == "watch-of-team-a"
    assert who["deployment.environment"] == "lab"
    assert who["service.version"]


def test_a_redirect_is_not_followed_with_its_headers(receiver: OtlpReceiver) -> None:
    other = OtlpReceiver()
    receiver.always, receiver.location = 307, f"{other.url}/v1/metrics"
    counts = Counts()
    client = Client("metrics", receiver.url, "x-key=hidden", counts)
    families = [GaugeMetricFamily("fp8watch_run_step", "x", value=1.0)]
    exporter = OtlpMetrics(lambda: families, client, 0.05)
    exporter.start()
    receiver.wait_for("/v1/metrics", lambda got: len(got) >= 2)
    exporter.stop()
    assert other.got == []
    assert counts.snapshot()["metrics", "failed"] >= 1
    assert counts.snapshot()["metrics", "sent"] == 0
    other.close()


@pytest.mark.parametrize("signal", ["metrics", "logs"])
def test_without_the_package_the_remedy_is_said(signal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("metric_exporter", "_log_exporter"):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.http.{name}", None)
    with pytest.raises(OtlpError, match=r"pip install 'fp8watch\[otlp\]'"):
        Client(signal, "http://x.example")
    with pytest.raises(TargetError, match=r"pip install 'fp8watch\[otlp\]'"):
        channels_of(Settings("sqlite:///x.db", otlp_endpoint="http://x.example"))


def test_a_refused_incident_is_a_dead_letter(collector: Callable[..., httpx.Client], receiver: OtlpReceiver) -> None:
    import time

    receiver.always = 401
    client = collector(otlp_endpoint=receiver.url, otlp_interval=3600.0)
    infinite = [0] * 4 + [1, 0]
    Agent(client).register([SITE]).send(
        [SITE], list(range(6)), fields={"num_inf": infinite, "num_sentinel_tiles": infinite}
    )
    receiver.wait_for("/v1/logs")
    until = time.monotonic() + 40
    while not (dead := client.get("/api/v1/notifications?state=dead").json()["items"]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert dead[0]["channel"] == "otlp"
    assert "HTTP 401" in dead[0]["last_error"]
