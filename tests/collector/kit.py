"""An agent that speaks the wire, fakes of the rooms after the worker, and the collector as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from collector.nursery import Child, nursery

from fp8watch_agent.record import STEP, Measured, Site, StepPresent, TileMap, empty_rows, site_id
from fp8watch_agent.wire import BATCH_CONTENT_TYPE, TILE_MAPS_CONTENT_TYPE, Header, encode_batch, encode_tile_maps
from fp8watch_server.cli import listen
from fp8watch_server.detect.thresholds import DEFAULTS
from fp8watch_server.http.connections import LIMITS, ConnectionLimits
from fp8watch_server.http.server import Server
from fp8watch_server.pipeline.detect_worker import Detection

ALL = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO | Measured.ENERGIES | Measured.MOMENTS)
T = TypeVar("T")
on_sqlite = pytest.mark.parametrize("database_kind", ["sqlite"])
"""For what does not depend on the database, or is SQLite's own."""
ZSTD = {"Content-Encoding": "zstd"}


@contextmanager
def served(app: Any, lifespan: Literal["on", "off"] = "off", limits: ConnectionLimits = LIMITS) -> Iterator[str]:
    """The application behind its server in a thread, without its own threads unless told; gives its URL."""
    server = Server(app, limits=limits, lifespan=lifespan)
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


class FakeEngine:
    """Finds what the test tells it to find: any record with an Inf."""

    def __init__(self, sites: Any) -> None:
        self.sites = dict(sites)
        self.seen: list[tuple[str, int]] = []
        self.delivered_step: int | None = None
        self.stride = 1
        self.settling = False
        self.thresholds = DEFAULTS

    def add_sites(self, sites: Any) -> None:
        self.sites.update(sites)

    def add_sessions(self, sessions: Any) -> None:
        self.sessions = {s.session for s in sessions}

    def tick(self, now: float) -> list[Any]:
        return []

    def take_notices(self) -> list[Any]:
        return []

    def observe(self, batch: Any, at: float | None = None) -> list[Any]:
        self.seen.append((batch.header.session, batch.header.seq))
        if len(batch.steps):
            self.delivered_step = int(batch.steps["step"][-1])
        return [(int(s), int(i)) for s, i, n in zip(batch.step, batch.site, batch.column("num_inf"), strict=True) if n]


class Recorder:
    """Detection whose calls can be looked at."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.folded: list[tuple[Any, ...]] = []
        self.closed: list[int] = []
        self.resolved: list[str] = []

    def detection(self) -> Detection:
        def make(sites: Any, run_id: str = "", run_name: str = "") -> FakeEngine:
            self.engines.append(FakeEngine(sites))
            return self.engines[-1]

        def fold(conn: Any, run_id: str, tenant: str, attempt: int, findings: Any, sites: Any, now: float, **kw: Any):
            self.folded.append((run_id, attempt, tuple(findings)))
            return findings

        def close_quiet(
            conn: Any, run_id: str, tenant: str, attempt: int, *, current_step: int, **kw: Any
        ) -> list[Any]:
            self.closed.append(current_step)
            return []

        def queue_resolved(conn: Any, row: Any, now: float, public_url: str) -> None:
            self.resolved.append(row["id"])

        return Detection(lambda sites: {s.id: s for s in sites}, make, fold, close_quiet, queue_resolved)


def make_site(
    module: str = "layers.0.mlp.up", operand: str = "input", direction: str = "rowwise", order: int = 0
) -> Site:
    return Site(
        id=site_id(module, operand, direction),
        module=module,
        operand=operand,
        direction=direction,
        gemm="fprop",
        order=order,
        shape=(256, 512),
        tile=(1, 128),
        format="E4M3",
        power_2_scale=True,
        eps=0.0,
        recipe="blockwise",
        backend="reference",
        evidence={"counts": "exact"},
    )


class Agent:
    """Speaks to the collector as the real agent does, a request at a time."""

    def __init__(self, client: Any, run: str = "run-1", session: str = "a" * 32, rank: int = 0, **facts: Any) -> None:
        self.client, self.run, self.session, self.rank = client, run, session, rank
        self.seq = 0
        self.facts = facts
        self.patient = True
        self.world_size = 2

    @property
    def path(self) -> str:
        return f"/v1/runs/{quote(self.run, safe='')}"

    def _put(self, path: str, **given: Any) -> Any:
        return self._patiently(lambda: self.client.put(path, **given))

    def _patiently(self, send: Callable[[], Any]) -> Any:
        """As a real agent: a 503 is not the end, on a slow machine least of all."""
        until = time.monotonic() + 60
        while (answer := send()).status_code == 503 and self.patient and time.monotonic() < until:
            time.sleep(0.2)
        return answer

    def register_run(self, name: str = "a run") -> Any:
        return self._put(
            self.path, json={"name": name, "recipe": "blockwise", "backend": "cpu", "world_size": self.world_size}
        )

    def register_session(self) -> Any:
        body = {
            "rank": self.rank,
            "world_size": self.world_size,
            "mesh": {"dp": 2},
            "host": "node-1",
            "pid": 7,
            "started_at": 1.5,
        }
        body |= {"versions": {"torch": "2.13"}, "recipe": "blockwise", "fingerprint": "f", "backend": "cpu"}
        return self._put(f"{self.path}/sessions/{self.session}", json={**body, "facts": {"eps": 0.0}, **self.facts})

    def register_sites(self, sites: list[Site]) -> Any:
        body = msgspec.json.encode({"session": self.session, "sites": sites})
        return self._put(f"{self.path}/sites", content=body)

    def register(self, sites: list[Site], name: str = "a run") -> Agent:
        for answer in (self.register_run(name), self.register_session(), self.register_sites(sites)):
            assert answer.status_code == 200, answer.text
        return self

    def body(self, sites: list[Site], steps: list[int], **given: Any) -> bytes:
        header, columns = self.batch(sites, steps, **given)
        return encode_batch(header, *columns)

    def batch(
        self,
        sites: list[Site],
        steps: list[int],
        *,
        scalars: dict[str, list[float]] | None = None,
        fields: dict[str, Any] | None = None,
        measured: int = ALL,
        health: dict[str, float] | None = None,
        logs: dict[str, list[float | None]] | None = None,
        seq: int | None = None,
        times: list[float] | float = 1_700_000_000.0,
    ) -> tuple[Header, tuple[Any, Any, Any, Any]]:
        """`fields` are arrays [steps × sites], or one value for all."""
        self.seq = self.seq + 1 if seq is None else seq
        step_rows = np.zeros(len(steps), dtype=STEP)
        step_rows["step"], step_rows["time"] = steps, times
        for name, values in (scalars or {"loss": [2.0] * len(steps)}).items():
            step_rows[name] = values
            step_rows["present"] |= np.uint8(StepPresent[name.upper()])
        n = len(steps) * len(sites)
        rows = empty_rows(n)
        rows["measured"] = measured
        default = {"num_elements": 1000, "num_nonzero": 900, "num_tiles": 10, "amax_max": 2.0, "amax_min_nonzero": 1.0}
        default |= {"scale_inv_max": 0.5, "scale_inv_min": 0.25, "tile_noise_ratio_sum": 0.01, "signal_energy": 100.0}
        for name, values in {**default, "noise_energy": 0.1, **(fields or {})}.items():
            rows[name] = values
        header = Header(
            run=self.run,
            session=self.session,
            rank=self.rank,
            seq=self.seq,
            step0=min(steps, default=0),
            num_steps=len(steps),
            num_records=n,
            health=health or {},
            logs=logs or {},
        )
        step = np.repeat(np.array(steps, dtype=np.int64), len(sites))
        site = np.tile(np.array([s.id for s in sites], dtype=np.uint64), len(steps))
        return header, (step_rows, step, site, rows)

    def post(self, body: bytes, **headers: str) -> Any:
        given = {"Content-Type": BATCH_CONTENT_TYPE, **ZSTD, **{k.replace("_", "-"): v for k, v in headers.items()}}
        return self._patiently(lambda: self.client.post("/v1/batches", content=body, headers=given))

    def send(self, sites: list[Site], steps: list[int], **given: Any) -> Any:
        answer = self.post(self.body(sites, steps, **given))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post_maps(self, maps: list[TileMap], seq: int) -> Any:
        body = encode_tile_maps(self.run, self.session, self.rank, seq, maps)
        headers = {"Content-Type": TILE_MAPS_CONTENT_TYPE, **ZSTD}
        return self._patiently(lambda: self.client.post("/v1/tile-maps", content=body, headers=headers))


class Serving:
    """`fp8watch serve` as a process: forked from one that is ready, or of its own where `command` is given."""

    def __init__(self, tmp_path: Path, *args: str, command: list[str] | None = None, **env: str) -> None:
        self.args, self.command = list(args), command
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("FP8WATCH_")}
        self.env |= {"FP8WATCH_DATABASE_URL": f"sqlite:///{tmp_path / 'served.db'}", **env}
        self.process: subprocess.Popen[str] | Child | None = None
        self.line = ""

    def __enter__(self) -> Serving:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def start(self) -> Serving:
        if self.command is None:
            self.process = nursery().bear(self.args, self.env)
        else:
            self.process = subprocess.Popen(
                [*self.command, *self.args], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        return self

    @property
    def url(self) -> str:
        return next(word for word in self.line.split() if word.startswith("http"))

    def kill(self, number: int = signal.SIGKILL) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        assert self.process is not None
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a thread of its own: a browser test in the same process keeps a loop on the main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
