"""Exporters of OpenTelemetry's SDK, and what became of their requests.

Shapes:     batch of one signal -> one or more POSTs to {endpoint}/v1/{signal}
Thread:     any one at a time per client; counts are guarded by a lock

The package is optional: `pip install 'fp8watch[otlp]'`. Its exporters read the standard variables OTEL_EXPORTER_OTLP_*
(headers, certificates, time limit, compression) and OTEL_RESOURCE_ATTRIBUTES by themselves. They log every attempt, and
say no more than whether it worked; so their logs are silenced, the HTTP status is read off the session that they send
through, and a receiver that fails is told once, and once more when it answers again. Redirects are not followed: headers
are secrets.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from fp8watch_server.settings.otlp_target import header_pairs

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

SERVICE = "fp8watch-collector"
SCOPE = "fp8watch"
HEADER_VARIABLES = (
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
    "OTEL_EXPORTER_OTLP_LOGS_HEADERS",
)
OUTCOMES = ("sent", "failed")
SIGNALS = ("metrics", "logs")
_MODULES = {
    "metrics": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "logs": "opentelemetry.exporter.otlp.proto.http._log_exporter",
}
_CLASSES = {"metrics": "OTLPMetricExporter", "logs": "OTLPLogExporter"}
_OPTIONS: dict[str, dict[str, Any]] = {"metrics": {"max_export_batch_size": 2000}, "logs": {}}
"""Points of a request; what is more goes in several."""
_INSTANCE = str(uuid.uuid4())

_log = logging.getLogger(__name__)


class OtlpError(ValueError):
    """Why nothing can be exported: rule, remedy; never an address or a header."""


class Counts:
    """Exports of this process, by signal and outcome."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {(signal, outcome): 0 for signal in SIGNALS for outcome in OUTCOMES}

    def add(self, signal: str, outcome: str) -> None:
        """One more."""
        with self._lock:
            self._counts[signal, outcome] += 1

    def snapshot(self) -> dict[tuple[str, str], int]:
        """(signal, outcome) -> count."""
        with self._lock:
            return dict(self._counts)


EXPORTS = Counts()


def standard_secrets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Values of headers that the library reads from the environment by itself."""
    found = []
    for text in filter(None, (environ.get(name) for name in HEADER_VARIABLES)):
        values = (pair.partition("=")[2].strip() for pair in text.split(","))
        found += [text, *(form for value in values if value for form in (value, unquote(value)))]
    return tuple(found)


def resource(version: str) -> Resource:
    """Who exports; what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes first."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": SERVICE, "service.version": version, "service.instance.id": _INSTANCE}
    return Resource(own).merge(OTELResourceDetector().detect())


def _session() -> Any:
    """A session of requests that remembers what its last request came to."""
    import requests

    class Session(requests.Session):
        status: int | None = None
        failure = "no answer"

        def request(self, *args: Any, **kwargs: Any) -> requests.Response:
            self.status, self.failure = None, "no answer"
            try:
                answer = super().request(*args, **{**kwargs, "allow_redirects": False})
            except requests.RequestException as e:
                self.failure = type(e).__name__  # its text holds the address
                raise
            self.status = answer.status_code
            return answer

    return Session()


class Client:
    """One signal to one receiver.

    Args:
        signal: metrics | logs.
        endpoint: root URL; `/v1/metrics` and `/v1/logs` follow.
        headers: "name=value" pairs, separated by commas; "": those of the standard variables alone.
        counts: where exports are counted.
        says: whether a receiver that fails is told here, once; else whoever sends tells it.

    Raises:
        OtlpError: the package is not installed, or a standard variable cannot be used.
    """

    def __init__(
        self, signal: str, endpoint: str, headers: str = "", counts: Counts = EXPORTS, *, says: bool = True
    ) -> None:
        self.masked = masked(endpoint)
        self.status: int | None = None
        self._signal, self._counts, self._says = signal, counts, says
        self.num_failed = 0  # exports since the last one that worked
        self.reason = ""  # of the last export that failed
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL + 1)
        try:
            module = importlib.import_module(_MODULES[signal])
            self._session = _session()
            self._exporter: Any = getattr(module, _CLASSES[signal])(
                endpoint=f"{endpoint.rstrip('/')}/v1/{signal}",
                headers=header_pairs(headers) or None,
                session=self._session,
                **_OPTIONS[signal],
            )
        except ImportError as e:
            raise OtlpError(
                f"FP8WATCH_OTLP_ENDPOINT needs OpenTelemetry's exporter, and {e.name} is not installed; run pip install 'fp8watch[otlp]'"
            ) from None
        except (ValueError, RuntimeError, OSError) as e:
            raise OtlpError(
                f"OpenTelemetry's exporter of {signal} refuses its settings ({type(e).__name__}); check OTEL_EXPORTER_OTLP_*"
            ) from None

    def export(self, batch: Any) -> bool:
        """Send it, with the library's own retries within its time limit (10 s, or OTEL_EXPORTER_OTLP_TIMEOUT)."""
        try:
            worked = bool(self._exporter.export(batch).name == "SUCCESS")
            reason = self._session.failure
        except Exception as e:  # noqa: BLE001  (what cannot be encoded must not end the thread)
            worked, reason = False, f"cannot be encoded ({type(e).__name__})"
        self.status = self._session.status
        if self.status is not None and self.status >= 300:
            worked, reason = False, f"HTTP {self.status}"
        self._counts.add(self._signal, "sent" if worked else "failed")
        if self._says:
            self._say(worked, reason)
        self.num_failed = 0 if worked else self.num_failed + 1
        self.reason = "" if worked else reason
        return worked

    def _say(self, worked: bool, reason: str) -> None:
        if not worked and self.num_failed == 0:
            _log.warning("OTLP %s: %s takes nothing (%s); trying again", self._signal, self.masked, reason)
        elif worked and self.num_failed:
            failed = self.num_failed
            _log.warning("OTLP %s: %s takes them again, after %d that failed", self._signal, self.masked, failed)

    def stop(self) -> None:
        """End what waits between two attempts."""
        self._exporter.shutdown()


def masked(endpoint: str) -> str:
    """Scheme and host: all of the URL that may be shown."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.hostname}/…"
