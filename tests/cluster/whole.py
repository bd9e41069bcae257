"""All parts of a cluster as processes on this machine, each of which can be killed and comes again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from cluster.kit import eventually
from cluster.nats_servers import Cluster, free_ports
from cluster.traced import VARIABLE
from collector.hurt_server import Server
from collector.kit import Serving
from support.database import fast_folder

QUEUE_BYTES = 512 << 20
UP_S = 120.0


@dataclass(frozen=True)
class Kill:
    """A part that was killed, and when it was there again: a process that listens, not one that has caught up."""

    kind: str
    what: str
    down: float
    up: float


class Whole:
    """Three NATS nodes, two collectors, two workers, a relay, and two PostgreSQL servers with a shard each.

    Args:
        folder: for files.
        database_url: the home database.
        webhook: where pages go.
        rng: says who is killed.
    """

    def __init__(self, folder: Path, database_url: str, webhook: str, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self.cluster = Cluster(folder / "nats", cut=False)
        self.shards = {n: Server(Path(tempfile.mkdtemp(prefix="fp8pg-", dir=fast_folder())) / "data") for n in "ab"}
        self.env = {
            "FP8WATCH_DATABASE_URL": database_url,
            "FP8WATCH_SHARDS": " ".join(f"{name}={server.url}" for name, server in self.shards.items()),
            "FP8WATCH_QUEUE": self.cluster.url,
            "FP8WATCH_QUEUE_REPLICAS": "3",
            "FP8WATCH_QUEUE_BYTES": str(QUEUE_BYTES),
            "FP8WATCH_WEBHOOK_URL": webhook,
            VARIABLE: str(folder / "trace"),
        }
        *self._ports, self._relay_port = free_ports(3)
        self._fronts: list[Serving | None] = [None, None]
        self._workers: list[Serving | None] = [None, None]
        self._relay: Serving | None = None
        self.kills: list[Kill] = []

    @property
    def urls(self) -> list[str]:
        """Of the collectors; they keep their ports."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def relay_url(self) -> str:
        """Of the relay, which knows both collectors."""
        return f"http://127.0.0.1:{self._relay_port}"

    def __enter__(self) -> Whole:
        self.cluster.__enter__()
        for i in range(2):
            self._front(i)
        for i in range(2):
            self._worker(i)
        self._start_relay()
        return self

    def __exit__(self, *exc: object) -> None:
        for serving in (*self._fronts, *self._workers, self._relay):
            if serving is not None:
                serving.kill()
        self.cluster.__exit__(*exc)
        for server in self.shards.values():
            server.stop()

    def _front(self, i: int) -> None:
        before = self._fronts[i]
        if before is not None:
            before.kill()
        env = {**self.env, "FP8WATCH_TEST_WHOLE": "1"}
        self._fronts[i] = Serving(self._folder, "--port", str(self._ports[i]), **env).start()
        eventually(lambda: _answers(f"{self.urls[i]}/readyz"), UP_S)

    def _worker(self, i: int) -> None:
        before = self._workers[i]
        if before is not None:
            before.kill()
        command = [sys.executable, str(Path(__file__).with_name("traced.py"))]
        self._workers[i] = Serving(self._folder, command=command, **self.env).start()

    def _start_relay(self) -> None:
        if self._relay is not None:
            self._relay.kill()
        command = [sys.executable, "-m", "fp8watch_agent.relay", "--collector", ",".join(self.urls)]
        command += ["--port", str(self._relay_port), "--spool-dir", str(self._folder / "relay")]
        self._relay = Serving(self._folder, command=command).start()

    def relay_waits(self) -> int:
        """Bodies that the relay has not delivered."""
        return int(httpx.get(f"{self.relay_url}/healthz", timeout=20, trust_env=False).json()["waiting"])

    @property
    def killed(self) -> Counter[str]:
        """How often each kind of part was."""
        return Counter(k.kind for k in self.kills)

    def pids(self) -> dict[str, Iterable[int]]:
        """Part -> its processes, for an account of their time."""
        of = {"collectors": self._fronts, "workers": self._workers, "relay": [self._relay]}
        out: dict[str, Iterable[int]] = {
            part: [s.process.pid for s in servings if s is not None and s.process is not None]
            for part, servings in of.items()
        }
        out["NATS"] = [node.process.pid for node in self.cluster.nodes if node.process is not None]
        out["PostgreSQL"] = [pid for server in self.shards.values() if (pid := _postmaster(server))]
        return out

    def kill(self, kind: str) -> None:
        """Kill -9 of one part (a shard: an immediate stop), and start it again."""
        i, down, what = self._rng.randrange(2), time.time(), ""
        if kind == "node":
            node = self._rng.choice(self.cluster.nodes)
            node.kill()
            time.sleep(self._rng.uniform(0, 1))
            node.start()
            what = node.name
        elif kind == "collector":
            self._front(i)
        elif kind == "worker":
            self._worker(i)
        elif kind == "relay":
            self._start_relay()
            what = "0"
        else:
            what = "ab"[i]
            self.shards[what].stop()
            time.sleep(self._rng.uniform(0, 2))
            self.shards[what].start()
        self.kills.append(Kill(kind, what or str(i), down, time.time()))

    def move(self, run: str, to: str) -> None:
        """Move a run; the mover is killed once at any time, and started again."""
        command = [sys.executable, str(Path(__file__).with_name("mover.py")), "move", run, to]
        env = {**os.environ, **self.env}
        first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        down = time.time()
        try:
            first.wait(self._rng.uniform(1, 12))
        except subprocess.TimeoutExpired:
            first.kill()
            down = time.time()
            first.wait()
        self._again(command, env)
        self.kills.append(Kill("mover", run, down, time.time()))

    def _again(self, command: list[str], env: dict[str, str]) -> None:
        said = ""

        def done() -> bool:
            nonlocal said
            second = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
            said = second.stderr
            return second.returncode == 0

        eventually(done, 300, lambda: said)


def _postmaster(server: Server) -> int:
    try:
        return int((server.folder / "postmaster.pid").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


KINDS = ("node", "collector", "worker", "relay", "shard")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def until_taken(send: Callable[[], httpx.Response], timeout_s: float = 120.0) -> httpx.Response:
    """As a real agent: again until it is acknowledged."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            answer = send()
            if answer.status_code == 200:
                return answer
            assert answer.status_code in (408, 429, 503), answer.text
        except httpx.HTTPError:
            pass
        assert time.monotonic() < until, "never taken"
        time.sleep(0.1)
