"""A collector that takes everything at once, unless a test tells it otherwise, and remembers in which order."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from fp8watch_agent.joined import JOINED_PATH, split_bodies
from fp8watch_agent.wire import decode_batch


class FakeCollector:
    """Listens until it is closed; `open_again` on the same port.

    `refused` has runs (or "run/rank") and the status that their batches and registrations get; `status` is that of every request,
    `hangs` lets requests wait, `slow` has runs whose batches wait; a joined request waits `batch_s` for each batch. `taken` has (run, rank, seq) as they were taken first, `repeated` counts those that came again.
    """

    def __init__(self, store: FakeCollector | None = None) -> None:
        self.refused: dict[str, int] = {}
        self.status = 0
        self.hangs = False
        self.slow: set[str] = set()
        self.batch_s = 0.0
        self._go_on = threading.Event()
        self._lock = threading.Lock() if store is None else store._lock
        self.store = self if store is None else store  # who has the database
        self.taken: list[tuple[str, int, int]] = []
        self.repeated = 0
        self.num_posts = 0
        self._port = 0
        self.open_again()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def open_again(self) -> None:
        """Listen."""
        owner = self

        class Handler(_Handler):
            collector = owner

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Listen no more; connections end."""
        self.go_on()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            connection.close_connection = True
            with contextlib.suppress(OSError):
                connection.connection.shutdown(socket.SHUT_RDWR)

    def go_on(self) -> None:
        """Let what hangs be answered."""
        self.hangs = False
        self.slow: set[str] = set()
        self.batch_s = 0.0
        self._go_on.set()
        self._go_on = threading.Event()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and body of an answer."""
        if self.hangs:
            self._go_on.wait(30)
        if self.status:
            return self.status, {"error": "unavailable"}
        if method == "GET":
            return 200, {"status": "ready"}
        if method == "PUT":
            status = self.refused.get(path.split("/")[3], 200)
            return status, {}
        self.num_posts += 1
        if path == JOINED_PATH:
            bodies = split_bodies(body)
            time.sleep(self.batch_s * len(bodies))
            return 200, {"answers": [self._take(raw) for _, raw in bodies]}
        one = self._take(body)
        return one["status"], one

    def _take(self, body: bytes) -> dict[str, Any]:
        h = decode_batch(body).header
        key, ours = (h.run, h.rank, h.seq), self.store
        of_session = self.refused.get(f"{h.run}/{h.rank}", 200)
        if h.run in self.slow:
            self._go_on.wait(30)
        status = of_session if of_session != 200 else self.refused.get(h.run, 200)
        if status != 200:
            return {"status": status, "error": "refused" if of_session == 200 else "session-key"}
        with self._lock:
            if key in ours.taken:
                ours.repeated += 1
            else:
                ours.taken.append(key)
        return {"status": 200, "acked": h.seq}

    def of(self, run: str, rank: int = 0) -> list[int]:
        """Sequence numbers that it has of a rank, in their order."""
        with self._lock:
            return [seq for r, n, seq in self.store.taken if (r, n) == (run, rank)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *given: Any) -> None:
        self.connections: set[Any] = set()
        super().__init__(*given)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was cut."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    collector: FakeCollector

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self)  # type: ignore[attr-defined]

    def finish(self) -> None:
        self.server.connections.discard(self)  # type: ignore[attr-defined]
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, value = self.collector.answer(self.command, self.path, body)
        raw = msgspec.json.encode(value)
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_PUT = do_POST = _answer
