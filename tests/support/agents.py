"""A collector that can be told how to answer, on a real socket, and what the agent's tests hand over."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from fp8watch_agent import wire
from fp8watch_agent.record import ROW, STEP, Site, StepPresent, TileMap, empty_rows, site_id
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.session import Session

RULE = b'{"rule": "as the test says"}'
"""Body by which a refusal is known as a collector's."""


@dataclass
class Reply:
    """One scripted answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    commit: bool = False  # keep the body although the answer says otherwise: the answer was lost


@dataclass
class Collector:
    """Keeps what it acknowledges, by key, as CONTRACT says; `script` answers the next bodies differently."""

    url: str = ""
    script: list[Reply] = field(default_factory=list)
    always: Reply | None = None
    refuse_all: Reply | None = None  # registrations as well
    refuse_sites: bool = False
    max_body_bytes: int = 1 << 30
    stored: dict[tuple[str, str, int, int], bytes] = field(default_factory=dict)
    maps: dict[int, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, status
    sites: set[int] = field(default_factory=set)
    sessions: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)
    tokens: list[str | None] = field(default_factory=list)
    num_conflicts: int = 0
    captures: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        self.sites.clear()
        self.sessions.clear()
        self.runs.clear()

    def batches(self) -> list[wire.Batch]:
        """Those that hold steps."""
        with self.lock:
            decoded = [wire.decode_batch(body) for _, body in sorted(self.stored.items())]
        return [b for b in decoded if b.header.num_steps]

    def farewells(self) -> list[wire.Batch]:
        """Empty batches: their health says that the session ended."""
        with self.lock:
            decoded = [wire.decode_batch(body) for _, body in sorted(self.stored.items())]
        return [b for b in decoded if not b.header.num_steps]

    def num_records(self) -> int:
        return sum(b.header.num_records for b in self.batches())

    def steps(self) -> list[int]:
        return sorted({int(s) for b in self.batches() for s in b.steps["step"]})

    def put(self, path: str, raw: bytes) -> Reply:
        parts = path.strip("/").split("/")
        value = json.loads(raw)
        if parts[-1] == "sites":
            if self.refuse_sites:
                return Reply(422)
            if value["session"] not in self.sessions:
                return Reply(424, body=b'{"error": "unknown-session"}')
            self.sites.update(s["id"] for s in value["sites"])
        elif "sessions" in parts:
            if parts[2] not in self.runs:
                return Reply(424, body=b'{"error": "unknown-run"}')
            self.sessions[parts[-1]] = value
        else:
            self.runs[parts[-1]] = value
        return Reply(200, body=b"{}")

    def post(self, path: str, raw: bytes) -> Reply:
        reply = self.script.pop(0) if self.script else self.always
        if reply is not None and not reply.commit:
            return reply
        if len(raw) > self.max_body_bytes:
            return Reply(413)
        if path.endswith("/tile-maps"):
            try:
                maps = wire.decode_tile_maps(raw)
            except wire.TooLarge:
                return Reply(413)
            self.maps[maps.seq] = raw
            return reply or Reply(200, body=json.dumps({"acked": maps.seq}).encode())
        batch = wire.decode_batch(raw)
        h = batch.header
        unknown = sorted({int(s) for s in batch.site} - self.sites)
        if h.session not in self.sessions or unknown:
            return Reply(424, body=json.dumps({"error": "unknown-sites", "ids": unknown}).encode())
        key = (h.run, h.session, h.rank, h.seq)
        if self.stored.setdefault(key, raw) != raw:
            self.num_conflicts += 1
            return Reply(409, body=b'{"error": "key-reused"}')
        return reply or Reply(200, body=json.dumps({"acked": h.seq, "captures": self.captures}).encode())


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self, answer: Callable[[str, bytes], Reply]) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with collector.lock:
                collector.tokens.append(self.headers.get("Authorization"))
                reply = collector.refuse_all or answer(self.path, raw)
                collector.requests.append((self.command, self.path, reply.status))
            body = RULE if reply.status in (400, 409, 415, 422) else b""
            body = body if reply.body is None else reply.body
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self._serve(collector.put)

        def do_POST(self) -> None:
            self._serve(collector.post)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in mid-request is what some tests are about."""


@contextlib.contextmanager
def serve(state: Collector | None = None, port: int = 0) -> Iterator[Collector]:
    """A collector on a real socket."""
    state = Collector() if state is None else state
    server = _Server(("127.0.0.1", port), _handler(state))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_session(**changes: Any) -> Session:
    made = Session(
        run_id="run-1",
        run_name="<script>",
        session=uuid.uuid4().hex,
        rank=3,
        world_size=8,
        mesh={"dp": 8},
        host="node",
        pid=1,
        started_at=1e9,
        versions={"torch": "2"},
        recipe="blockwise",
        fingerprint="f",
        backend="cpu",
        facts={"ok": True},
    )
    return replace(made, **changes)


def make_sites(num_sites: int) -> list[Site]:
    return [
        Site(
            id=site_id(f"layers.{i}", "input", "rowwise"),
            module=f"layers.{i}",
            operand="input",
            direction="rowwise",
            gemm="fprop",
            order=i,
            shape=(64, 256),
            tile=(1, 128),
            format="E4M3",
            power_2_scale=True,
            eps=0.0,
            recipe="blockwise",
            backend="cpu",
            evidence={"COUNTS": "exact"},
        )
        for i in range(num_sites)
    ]


def make_ids(num_sites: int) -> Any:
    return np.array([s.id for s in make_sites(num_sites)], dtype=np.uint64)


def make_step(step: int, **scalars: float) -> Any:
    one = np.zeros((), dtype=STEP)
    one["step"], one["time"] = step, 1e9 + step
    for name, value in scalars.items():
        one[name] = value
        one["present"] |= int(StepPresent[name.upper()])
    return one[()]


def make_rows(num_rows: int, seed: int = 0) -> Any:
    """Rows of every kind of value, NaN and Inf among them; histograms are left as counts."""
    rng = np.random.default_rng(seed)
    rows = empty_rows(num_rows)
    for name in ROW.names or ():
        values = rows[name]
        if name in ("amax_hist", "depth_hist"):
            rows[name] = rng.integers(0, 1000, values.shape)
        elif values.dtype.kind == "f":
            rows[name] = rng.standard_normal(values.shape)
        else:
            rows[name] = rng.integers(0, 1 << 20, values.shape)
    if num_rows:
        rows["amax_max"][0] = np.nan
        rows["scale_inv_max"][0] = np.inf
        rows["signal_energy"][0] = np.frombuffer(np.uint64(0x7FF8_0000_DEAD_BEEF).tobytes(), "<f8")[0]
    return rows


def make_maps(num_maps: int) -> list[TileMap]:
    """Tile maps of 4×6, one of them with a scale that is no power of two."""
    rng = np.random.default_rng(0)
    return [
        TileMap(
            site=make_sites(1)[0].id,
            step=i,
            shape=(4, 6),
            amax=rng.integers(0, 1 << 16, 24).astype(np.uint16),
            scale_inv=rng.standard_normal(24).astype(np.float32),
            flags=rng.integers(0, 256, 24).astype(np.uint8),
            num_nonfinite=rng.integers(0, 3, 24).astype(np.uint16),
            num_underflow=np.zeros(24, np.uint16),
        )
        for i in range(num_maps)
    ]


def flat_map(num_rows: int, num_columns: int, step: int = 0) -> TileMap:
    """A tile map in which nothing is: it takes no memory here, and a few bytes on the wire."""
    columns = ("amax", "<u2"), ("scale_inv", "<f4"), ("flags", "u1"), ("num_nonfinite", "<u2"), ("num_underflow", "<u2")
    nothing: dict[str, Any] = {
        name: np.broadcast_to(np.zeros(1, dtype), num_rows * num_columns) for name, dtype in columns
    }
    return TileMap(site=make_sites(1)[0].id, step=step, shape=(num_rows, num_columns), **nothing)


def record(recorder: Recorder, steps: Iterable[int], num_sites: int = 3) -> None:
    """Steps of a few registered sites."""
    recorder.register_sites(make_sites(num_sites))
    for s in steps:
        recorder.record_step(make_step(s, loss=float(s)), make_ids(num_sites), make_rows(num_sites, s))


def eventually(check: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Wait for what another thread does."""
    until = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def close_fails() -> Iterator[list[int]]:
    """Each `os.close` closes and raises, as NFS over its quota does. Gives the numbers that were closed."""
    close, closed = os.close, []

    def closes_and_fails(fd: int) -> None:
        close(fd)
        closed.append(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    os.close = closes_and_fails
    try:
        yield closed
    finally:
        os.close = close


@contextlib.contextmanager
def taken_over(path: Path, fd: int) -> Iterator[None]:
    """A file of somebody else, which gets a number that was closed, and keeps it."""
    taken = [os.open(path, os.O_CREAT | os.O_WRONLY)]
    while taken[-1] < fd:  # lower ones were free, too
        taken.append(os.open(path, os.O_WRONLY))
    assert taken[-1] == fd
    yield
    assert os.fstat(fd).st_ino == path.stat().st_ino, "somebody has closed a file that is not theirs"
    for one in taken:
        os.close(one)
