"""A receiver of OTLP/HTTP that decodes what comes with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

MESSAGES = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/logs": ExportLogsServiceRequest}


def plain(value: Any) -> Any:
    """An AnyValue as Python's."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(v) for v in value.array_value.values]
    return getattr(value, kind)


def named(attributes: Any) -> dict[str, Any]:
    return {a.key: plain(a.value) for a in attributes}


@dataclass
class Got:
    path: str
    headers: dict[str, str]
    message: Any
    at: float


@dataclass
class OtlpReceiver:
    """Answers `always`; `hold` keeps each answer back until it is set."""

    always: int = 200
    location: str = ""
    got: list[Got] = field(default_factory=list)
    hold: threading.Event | None = None

    def __post_init__(self) -> None:
        receiver, self._arrived = self, threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    raw = gzip.decompress(raw)
                headers = {name.lower(): value for name, value in self.headers.items()}
                path = self.path.removeprefix(receiver.prefix)
                with receiver._arrived:
                    receiver.got.append(Got(path, headers, MESSAGES[path].FromString(raw), time.monotonic()))
                    receiver._arrived.notify_all()
                if receiver.hold is not None:
                    receiver.hold.wait(30)
                self.send_response(receiver.always)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.prefix = ""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{self.prefix}"

    def wait_for(self, path: str, enough: Callable[[list[Got]], bool] = bool, timeout_s: float = 40.0) -> list[Got]:
        """What came to a path, once it is enough."""
        until = time.monotonic() + timeout_s
        with self._arrived:
            while not enough(found := [got for got in self.got if got.path == path]):
                left = until - time.monotonic()
                assert left > 0, f"{path}: {len(found)} came"
                self._arrived.wait(left)
            return found

    def close(self) -> None:
        if self.hold is not None:
            self.hold.set()
        self._server.shutdown()
        self._server.server_close()
