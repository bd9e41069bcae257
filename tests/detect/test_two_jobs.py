"""Two jobs under one run id are told; a restart, a spool that is sent later and a clock that is wrong are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from collector.kit import Agent, make_site

from fp8watch_agent.wire import decode_batch
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding, facts_of
from fp8watch_server.detect.sessions import SessionFacts
from fp8watch_server.incidents.explain import explain

SITE = make_site()
FACTS = facts_of([SITE])
MODE = "two-jobs-one-run"


class Job:
    """Sends a batch of one step every two seconds, by a clock of its own."""

    def __init__(self, engine: DetectionEngine, session: str, skew_s: float = 0.0, pid: int = 7, rank: int = 0) -> None:
        self.engine, self.skew_s = engine, skew_s
        self.agent = Agent(None, session=session, rank=rank)
        self.step = 0
        engine.add_sessions([*engine._registry.sessions.values(), SessionFacts(session, rank, host="node", pid=pid)])

    def send(self, at: float, made_at: float | None = None) -> list[Finding]:
        body = self.agent.body([SITE], [self.step])
        self.step += 1
        batch = decode_batch(body)
        batch.steps["time"] = (at if made_at is None else made_at) + self.skew_s
        return [f for f in self.engine.observe(batch, at=at) if f.mode == MODE]


def times(begin: float, seconds: float) -> Iterable[float]:
    return (begin + 2.0 * i for i in range(int(seconds / 2) + 1))


@pytest.fixture
def engine() -> DetectionEngine:
    return DetectionEngine(FACTS)


@pytest.mark.parametrize("skew_s", [0.0, -3600.0, 1e6])
def test_two_jobs_in_one_run_are_told_within_half_a_minute(engine: DetectionEngine, skew_s: float) -> None:
    old, new = Job(engine, "a" * 32), Job(engine, "b" * 32, skew_s, pid=8)
    assert not [f for at in times(1000, 40) for f in old.send(at)]
    found: list[tuple[float, Finding]] = []
    for at in times(1042, 60):
        assert old.send(at) == [], "told with the newest session alone"
        found += [(at, f) for f in new.send(at + 1)]
    first_at, first = found[0]
    assert first_at - 1042 <= 26
    assert len(found) >= 15, "for as long as it lasts"
    assert (first.onset, first.severity, first.rank) == (0, "warning", 0)
    text = explain(first, FACTS)
    assert text.title == "Two jobs send as rank 0 of this run"
    assert "session bbbbbbbb (process 8 on node) and session aaaaaaaa (process 7 on node)" in text.cause
    assert "not FP8" in text.cause
    assert "FP8WATCH_RUN" in text.fix[0]["text"]


def test_two_attaches_of_one_process_are_told_as_such(engine: DetectionEngine) -> None:
    old, new = Job(engine, "a" * 32), Job(engine, "b" * 32)
    found = [f for at in times(0, 40) for f in (*old.send(at), *new.send(at + 1))]
    assert explain(found[0], FACTS).title == "Two attaches of one process send as rank 0 of this run"
    assert "detach" in explain(found[0], FACTS).fix[0]["text"]


def test_a_restart_and_what_comes_late_of_the_job_before_are_not_told(engine: DetectionEngine) -> None:
    old, new = Job(engine, "a" * 32), Job(engine, "b" * 32)
    found: list[Any] = [old.send(at) for at in times(0, 100)]
    for i, at in enumerate(times(106, 100)):
        found.append(new.send(at))
        if 4 <= i < 44:  # its spool, sent for 80 s: five minutes of steps
            found.append(old.send(at + 1, made_at=100 + 7.5 * (i - 4)))
    assert not any(found)
    old = Job(engine, "c" * 32)  # ends 15 s after its successor has begun
    found = [old.send(at) for at in times(300, 40)]
    new = Job(engine, "d" * 32)
    for at in times(342, 60):
        found += [new.send(at + 1), old.send(at) if at < 357 else []]
    assert not any(found)


def test_ranks_of_one_job_and_jobs_one_after_the_other_are_not_told(engine: DetectionEngine) -> None:
    ranks = [Job(engine, c * 32, rank=i) for i, c in enumerate("abcd")]
    assert not any(job.send(at) for at in times(0, 60) for job in ranks)
    again = [Job(engine, c * 32, rank=i) for i, c in enumerate("efgh")]
    assert not any(job.send(at) for at in times(70, 60) for job in again)
