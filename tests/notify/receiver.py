"""A real HTTP receiver whose answers are scripted, and an outbox to send from."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.notify.command import test_payload

Answer = tuple[int, dict[str, str], bytes]
OK: Answer = (200, {}, b"ok")


@dataclass
class Got:
    path: str
    headers: dict[str, str]
    raw: bytes
    at: float
    status: int  # that was answered; 0: cut off without an answer

    @property
    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.raw))

    @property
    def body_list(self) -> list[dict[str, Any]]:
        return list(json.loads(self.raw))


@dataclass
class Receiver:
    """Answers `script` one by one, then 200 (`always`: that). `hold` keeps each answer back until it is set."""

    script: list[Answer] = field(default_factory=list)
    got: list[Got] = field(default_factory=list)
    hold: threading.Event | None = None
    always: Answer = OK
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        receiver = self
        self._arrived = threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                with receiver._arrived:
                    answer = receiver.script.pop(0) if receiver.script else receiver.always
                    receiver.got.append(Got(self.path, dict(self.headers), raw, time.monotonic(), answer[0]))
                    receiver._arrived.notify_all()
                if receiver.hold is not None:
                    receiver.hold.wait(30)
                if receiver.delay_s:
                    time.sleep(receiver.delay_s)
                if not answer[0]:
                    self.close_connection = True
                    return
                try:
                    self.send_response_only(answer[0])
                    for name, value in {"Content-Length": str(len(answer[2])), **answer[1]}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer[2])
                except OSError:
                    pass  # the sender was killed

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/services/T0/B0/secret"

    def wait_for(self, num: int, timeout_s: float = 30.0) -> list[Got]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.got) >= num, timeout_s), f"{len(self.got)} of {num} came"
        return self.got

    def close(self) -> None:
        if self.hold is not None:
            self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class Outbox:
    def __init__(self, folder: Path, url: str = "") -> None:
        self.url = url or f"sqlite:///{folder / 'fp8watch.db'}"
        self.db = make_engine(self.url)
        schema.metadata.create_all(self.db)

    def put(
        self,
        kind: str = "firing",
        incident: str | None = None,
        change: Callable[[dict[str, Any]], None] | None = None,
        *,
        run: str = "",
        at: float | None = None,
        **facts: Any,
    ) -> str:
        """Queue a notice; returns its idempotency key. Each is of a run of its own, unless one is named."""
        payload = test_payload("https://watch.example", 1.0)
        incident = incident or uuid.uuid4().hex
        run = run or f"run-{incident}"
        payload["incident"].update({"id": incident, "run_id": run, "fingerprint": incident, **facts})
        payload["run"] = {"id": run, "name": run}
        if change is not None:
            change(payload)
        with writing(self.db) as conn:
            conn.execute(
                sa.insert(schema.outbox).values(
                    run_id=run,
                    id=uuid.uuid4().hex,
                    incident_id=incident,
                    kind=kind,
                    idempotency_key=f"{incident}:{kind}",
                    payload=payload,
                    created_at=time.time() if at is None else at,
                )
            )
        return f"{incident}:{kind}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        with self.db.connect() as conn:
            got = conn.execute(sa.select(schema.outbox).order_by(schema.outbox.c.created_at))
            return [dict(r) for r in got.mappings()]

    def wait_for(self, states: list[str], timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """Until the rows are in these states; a row settles shortly after the receiver has answered."""
        deadline = time.monotonic() + timeout_s
        while (got := sorted(r["state"] for r in self.rows)) != sorted(states):
            assert time.monotonic() < deadline, f"{got} instead of {states}: {[r['last_error'] for r in self.rows]}"
            time.sleep(0.02)
        return self.rows
