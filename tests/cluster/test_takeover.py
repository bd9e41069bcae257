"""Two whole collectors on one PostgreSQL: where the one that detects dies or hangs, the other pages, once."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from collector.kit import Agent, Serving, make_site
from notify.receiver import Receiver

from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.leader import Leader

SITES = [make_site("up", order=0), make_site("down", order=1)]
INFINITE = [0] * 8 + [1, 0]
TOLD_WITHIN_S = 60.0
"""Promised: detection goes on after 10 s. The bound is for a machine that does other things."""


@pytest.fixture
def database_kind() -> str:
    return "postgresql"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver([])
    yield made
    made.close()


def break_run(url: str, name: str, number: int) -> None:
    """A run sends one batch with an Inf."""
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        agent = Agent(client, run=name, session=f"{number:032x}").register(SITES)
        agent.send(SITES, list(range(5)), fields={"num_inf": INFINITE, "num_sentinel_tiles": INFINITE})


def leader_is_free(database_url: str) -> bool:
    engine = make_engine(database_url)
    leader = Leader(engine, "detect")
    try:
        return leader.held()
    finally:
        leader.release()
        engine.dispose()


@pytest.mark.parametrize("how", ["killed", "hung"])
@pytest.mark.heavy(18, "server/fp8watch_server/db", "server/fp8watch_server/pipeline", "server/fp8watch_server/notify")
@pytest.mark.timeout(280)
def test_the_other_collector_goes_on_and_every_failure_is_paged_once(
    tmp_path: Path, database_url: str, receiver: Receiver, how: str
) -> None:
    env = {"FP8WATCH_DATABASE_URL": database_url, "FP8WATCH_WEBHOOK_URL": receiver.url, "FP8WATCH_TEST_WHOLE": "1"}

    def told() -> Counter[str]:
        return Counter(g.body["alerts"][0]["labels"]["run"] for g in list(receiver.got) if g.status == 200)

    def wait_for(names: list[str]) -> float:
        began = time.monotonic()
        while missing := set(names) - set(told()):
            assert time.monotonic() - began < TOLD_WITHIN_S, missing
            time.sleep(0.05)
        return time.monotonic() - began

    with Serving(tmp_path, "--port", "0", **env) as first:
        break_run(first.url, "run-0", 0)
        wait_for(["run-0"])  # it detects: it was there first
        assert not leader_is_free(database_url)
        with Serving(tmp_path, "--port", "0", **env) as second:
            names = ["run-0"]
            for number in range(1, 4):
                names.append(f"run-{number}")
                break_run([first, second][number % 2].url, names[-1], number)
            assert first.process is not None
            if how == "killed":
                first.kill()
            else:
                os.kill(first.process.pid, signal.SIGSTOP)
            names.append("run-4")
            break_run(second.url, "run-4", 4)
            took_s = wait_for(names)
            if how == "hung":
                os.kill(first.process.pid, signal.SIGCONT)
                names.append("run-5")
                break_run(first.url, "run-5", 5)
                wait_for(names)
                first.kill()
            time.sleep(1.0)
            second.kill()
    keys = {g.headers["Idempotency-Key"] for g in receiver.got}
    print(f"{how}: told {took_s:.1f} s after it; {sum(told().values()) - len(names)} told twice")
    assert set(told()) == set(names)
    assert len(keys) == len(names), "a failure has one key"
    assert sum(told().values()) <= len(names) + 1, "what it was sending may come twice, under the same key"
