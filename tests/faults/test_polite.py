"""The agent is a polite client: it waits longer and longer, at random, for ever, and obeys who tells it to wait."""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults.clock import Clock, installed
from support.agents import RULE, make_ids, make_rows, make_session, make_sites, make_step

from fp8watch_agent.batch import Parcel
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.sender import MAX_BACKOFF_S, MIN_BACKOFF_S, Sender
from fp8watch_agent.session import Registration
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.transport import Answer, Transport, judge
from fp8watch_agent.uploader import Receipt

SETTINGS = AgentSettings(collector="http://127.0.0.1:9", ring_bytes=1 << 20, poll_interval_s=3600.0)


class Scripted:
    """A uploader whose answers are a list, without a network. The last answer stays."""

    def __init__(self, clock: Clock, answers: list[Answer]) -> None:
        self.transport = Transport("http://127.0.0.1:9")
        self.clock, self.answers = clock, answers
        self.sent: list[tuple[float, int]] = []

    def register(self, registration: Registration) -> Answer | None:
        return None

    def send(self, parcel: Parcel, registration: Registration) -> Receipt:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.sent.append((self.clock.now_s, parcel.seq))
        receipt = Receipt(judge(answer), answer)
        if answer.status == 200:
            receipt.acknowledged = parcel.amount
        elif judge(answer).value == "refused":
            receipt = Receipt(judge(Answer(200)), answer)
            receipt.refuse(parcel, f"http_{answer.status}")
        return receipt


class Driven:
    """A recorder whose sender is ticked by hand, on a clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: list[Answer]) -> None:
        self.clock = installed(monkeypatch)
        monkeypatch.setattr(Sender, "_run", lambda sender: None)
        self.recorder = Recorder(replace(SETTINGS, spool_dir=tmp_path / "spool"), make_session())
        self.sender = self.recorder._sender
        self.uploader = Scripted(self.clock, answers)
        self.sender.uploader = self.uploader  # type: ignore[assignment]
        self.recorder.register_sites(make_sites(3))
        self.step = 0

    def record(self) -> None:
        self.recorder.record_step(make_step(self.step), make_ids(3), make_rows(3, self.step))
        self.step += 1

    def until_next_request_s(self) -> float:
        """Seconds until the sender knocks again."""
        before, began = len(self.uploader.sent), self.clock.now_s
        while len(self.uploader.sent) == before:
            self.clock.advance(self.sender.away_for_s() + 0.001)
            self.sender.tick()
            assert self.clock.now_s - began < 4000, "it has given up"
        return self.clock.now_s - began

    def close(self) -> None:
        self.recorder._ring.close(keep=False)
        self.sender.spool.close()  # type: ignore[union-attr]
        self.recorder._ring.unmap()


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[list[Answer]], Driven]]:
    made: list[Driven] = []

    def make(answers: list[Answer]) -> Driven:
        made.append(Driven(monkeypatch, tmp_path, answers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("answer", [Answer(0, error="refused"), Answer(500), Answer(429), Answer(408)])
def test_it_waits_twice_as_long_each_time_at_random_and_for_ever(driven, answer: Answer) -> None:
    random.seed(1)
    d = driven([answer])
    d.record()
    waits = [d.until_next_request_s()]
    for n in range(400):
        waits.append(d.until_next_request_s())
        ceiling_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(n, 20))
        assert waits[-1] <= ceiling_s + 0.01, "longer than its turn"
    late = waits[20:]
    assert statistics.mean(late) == pytest.approx(MAX_BACKOFF_S / 2, rel=0.2), "full jitter: from 0 to the ceiling"
    assert min(late) < 0.1 * MAX_BACKOFF_S
    assert max(late) > 0.9 * MAX_BACKOFF_S
    assert d.recorder.health().num_retries == 401
    d.uploader.answers = [Answer(200)]
    d.until_next_request_s()
    assert d.recorder.health().records.acknowledged == 3, "after hours, as if nothing had been"


def test_half_an_hour_of_retry_after_is_obeyed(driven) -> None:
    d = driven([Answer(503, retry_after_s=1800.0)])
    d.record()
    d.until_next_request_s()
    assert d.until_next_request_s() >= 1800.0


def test_after_a_success_it_waits_shortly_again(driven) -> None:
    random.seed(2)
    d = driven([Answer(500)] * 12 + [Answer(200), Answer(500)])
    d.record()
    for _ in range(13):
        d.until_next_request_s()
    assert len(d.uploader.sent) == 13
    d.record()
    d.until_next_request_s()
    assert d.sender.away_for_s() <= MIN_BACKOFF_S
    assert d.sender.away_for_s() > 0, "the fourteenth request was refused"


@pytest.mark.parametrize("status", [400, 409, 415, 422])
def test_one_bad_batch_is_counted_and_never_blocks_the_next(driven, status: int) -> None:
    d = driven([Answer(status, RULE), Answer(200)])
    for _ in range(2):
        d.record()
        d.clock.advance(1.5)
        d.sender.tick()
        d.clock.advance(1.5)
        d.sender.tick()
    records = d.recorder.health().records
    assert (records.dropped, records.acknowledged) == ({f"http_{status}": 3}, 3)
    assert [seq for _, seq in d.uploader.sent] == [0, 1]


@pytest.mark.parametrize("status", [400, 401, 403, 404])  # 400 that no collector has said
def test_a_refusal_of_the_agent_holds_and_warns_once(driven, status: int, caplog: pytest.LogCaptureFixture) -> None:
    d = driven([Answer(status)])
    with caplog.at_level(logging.WARNING, "fp8watch"):
        for _ in range(10):
            d.record()
            d.clock.advance(2.0)
            d.sender.tick()
        waits = [d.until_next_request_s() for _ in range(5)]
    assert all(w >= MAX_BACKOFF_S * 0.9 for w in waits[1:]), "held, not hammered"
    assert len([r for r in caplog.records if "refuses this agent" in r.getMessage()]) == 1
    assert d.recorder.health().records.spooled == 30
    assert d.recorder.health().state == "held"


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0, -1.6e9])
def test_a_wall_clock_that_jumps_changes_no_wait(driven, jump_s: float) -> None:
    d = driven([Answer(503, retry_after_s=10.0)])
    d.record()
    d.until_next_request_s()
    d.clock.jump(jump_s)
    assert 10.0 <= d.until_next_request_s() <= 11.0
    d.uploader.answers = [Answer(200)]
    d.until_next_request_s()
    assert d.recorder.health().records.acknowledged == 3
