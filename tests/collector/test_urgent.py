"""What is broken is looked at first, whatever else waits; and what stays broken keeps nobody else waiting."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
from collector.kit import Agent, Recorder, make_site

from fp8watch_agent import urgency
from fp8watch_agent.wire import decode_batch
from fp8watch_server.pipeline import detect_worker as worker_module
from fp8watch_server.pipeline import priority
from fp8watch_server.pipeline.priority import PriorityLane, is_urgent
from fp8watch_server.store import pending as pending_module

UP, DOWN = make_site("up", order=0), make_site("down", order=1)
BROKEN: dict[str, Any] = {"fields": {"num_inf": 1}}


def batch(**given: Any) -> Any:
    return decode_batch(Agent(None).body([UP, DOWN], [1, 2], **given))


@pytest.mark.parametrize("name", urgency.BROKEN_COUNTS)
def test_one_record_that_is_broken_is_urgent(name: str) -> None:
    assert not is_urgent(batch(fields={name: 0}))
    assert is_urgent(batch(fields={name: [0, 0, 0, 1]}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", urgency.BROKEN_SCALARS)
def test_a_loss_or_a_norm_that_is_no_number_is_urgent(name: str, value: float) -> None:
    assert is_urgent(batch(scalars={name: [2.0, value]}))


def test_what_is_merely_odd_is_not() -> None:
    assert not is_urgent(batch())
    assert not is_urgent(batch(scalars={}))
    assert not is_urgent(batch(scalars={"lr": [math.nan, 1.0]}))
    assert not is_urgent(batch(fields={"num_saturated": 5, "num_underflow": 7, "num_zero_tiles": 1}))
    absent = batch(scalars={"lr": [1.0, 1.0]})
    absent.steps["loss"] = math.nan  # of a loss that was not given the value says nothing
    assert not is_urgent(absent)


def seen(recorder: Recorder) -> list[tuple[str, int]]:
    return [(session[0], seq) for session, seq in recorder.order]


@pytest.fixture
def ordered(recorder: Recorder, app: Any) -> Any:
    """Called with each batch that an engine sees, before it is seen."""
    hooks: dict[tuple[str, int], Any] = {}
    recorder.order = []  # type: ignore[attr-defined]
    make = app.state.detection.make_engine

    def made(*args: Any) -> Any:
        engine = make(*args)
        observe = engine.observe

        def look(batch: Any, at: float | None = None) -> Any:
            key = (batch.header.session[0], batch.header.seq)
            hooks.pop(key, lambda: None)()
            recorder.order.append((batch.header.session, batch.header.seq))  # type: ignore[attr-defined]
            return observe(batch, at)

        engine.observe = look
        return engine

    object.__setattr__(app.state.detection, "make_engine", made)
    return hooks


def test_an_urgent_batch_goes_before_those_that_have_waited(
    client: Any, app: Any, recorder: Recorder, ordered: Any
) -> None:
    first = Agent(client, run="first", session="a" * 32).register([UP])
    second = Agent(client, run="second", session="b" * 32).register([UP])
    ill = Agent(client, run="ill", session="c" * 32).register([UP])
    for step in (1, 2, 3):
        first.send([UP], [step])
        second.send([UP], [step])
    ordered["a", 2] = lambda: ill.send([UP], [1], **BROKEN)  # while the second of the first run is looked at
    assert app.state.worker.drain() == 6
    assert seen(recorder) == [("a", 1), ("a", 2), ("c", 1), ("a", 3), ("b", 1), ("b", 2), ("b", 3)]
    assert app.state.worker.drain() == 0
    assert [run for run, _, found in recorder.folded if found] == ["ill"]


def test_of_its_own_run_nothing_is_passed_over_and_nothing_seen_twice(
    client: Any, app: Any, recorder: Recorder, ordered: Any
) -> None:
    agents = [Agent(client, run=name, session=name * 32).register([UP]) for name in "ab"]
    for step in (1, 2):
        for agent in agents:
            agent.send([UP], [step])
    ordered["a", 1] = lambda: agents[1].send([UP], [3], **BROKEN)
    app.state.worker.drain()
    assert seen(recorder) == [("a", 1), ("b", 1), ("b", 2), ("b", 3), ("a", 2)]
    ordered["a", 3] = lambda: agents[0].send([UP], [4], **BROKEN)  # of the very run that is being looked at
    agents[0].send([UP], [3])
    app.state.worker.drain()
    assert seen(recorder)[5:] == [("a", 3), ("a", 4)]
    assert len(recorder.engines) == 2, "an engine that saw a batch twice is thrown away"


def test_a_backlog_does_not_hide_it(
    client: Any, app: Any, recorder: Recorder, ordered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (worker_module, pending_module):
        monkeypatch.setattr(module, "BATCHES_AT_ONCE", 2)
    old = Agent(client, run="old", session="a" * 32).register([UP])
    for step in (1, 2, 3, 4):
        old.send([UP], [step])
    Agent(client, run="ill", session="c" * 32).register([UP]).send([UP], [1], **BROKEN)
    app.state.worker.drain()
    assert seen(recorder)[0] == ("c", 1)


def test_what_nobody_told_of_is_looked_for_however_much_waits_before_it(
    client: Any, app: Any, recorder: Recorder, ordered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes detection over has not heard what was committed before."""
    for module in (worker_module, pending_module):
        monkeypatch.setattr(module, "BATCHES_AT_ONCE", 2)
    old = Agent(client, run="old", session="a" * 32).register([UP])
    for step in (1, 2, 3, 4):
        old.send([UP], [step])
    Agent(client, run="ill", session="c" * 32).register([UP]).send([UP], [1], **BROKEN)
    app.state.worker._urgent.clear()
    app.state.worker.drain()
    assert seen(recorder) == [("c", 1), ("a", 1), ("a", 2)]
    app.state.worker.drain()
    assert seen(recorder)[3:] == [("a", 3), ("a", 4)]


def test_who_listens_again_looks_for_it_while_engines_are_restored(
    client: Any, app: Any, recorder: Recorder, ordered: Any
) -> None:
    old = Agent(client, run="old", session="a" * 32).register([UP])
    ill = Agent(client, run="ill", session="c" * 32).register([UP])
    for step in (1, 2, 3):
        old.send([UP], [step])
    app.state.worker.drain()
    app.state.worker._forget()
    old.send([UP], [4])

    def unheard() -> None:
        ill.send([UP], [1], **BROKEN)
        app.state.worker._urgent.clear()
        app.state.worker.look_for_urgent()

    ordered["a", 2] = unheard
    app.state.worker.drain()
    assert seen(recorder)[3:] == [("a", 1), ("a", 2), ("c", 1), ("a", 3), ("a", 4)]


def test_a_run_that_is_moving_is_not_tried_again_in_each_round(
    client: Any, app: Any, recorder: Recorder, ordered: Any
) -> None:
    ill = Agent(client, run="ill", session="c" * 32).register([UP])
    ill.send([UP], [1], **BROKEN)
    worker = app.state.worker
    worker._urgent.clear()
    worker._fenced["ill", "default"] = time.monotonic()
    worker.drain()
    assert seen(recorder) == []
    worker._fenced.clear()
    worker.drain()
    assert [run for run, _, found in recorder.folded if found] == ["ill"]


def test_an_urgent_batch_does_not_wait_for_engines_that_are_restored(
    client: Any, app: Any, recorder: Recorder, ordered: Any
) -> None:
    old = Agent(client, run="old", session="a" * 32).register([UP])
    ill = Agent(client, run="ill", session="c" * 32).register([UP])
    for step in (1, 2, 3):
        old.send([UP], [step])
    app.state.worker.drain()
    app.state.worker._forget()
    old.send([UP], [4])

    def breaks() -> None:
        old.send([UP], [5], **BROKEN)  # of the run that is being restored: afterwards
        ill.send([UP], [1], **BROKEN)

    ordered["a", 2] = breaks
    app.state.worker.drain()
    app.state.worker.drain()
    assert seen(recorder)[3:] == [("a", 1), ("a", 2), ("c", 1), ("a", 3), ("a", 4), ("a", 5)]
    assert app.state.worker.num_failed_batches == 0


def test_a_run_that_stays_broken_is_taken_out_of_turn_now_and_then() -> None:
    now = [100.0]
    waiting, one, other = PriorityLane(lambda: now[0]), ("one", ""), ("other", "")
    assert [waiting.add(run) for run in (one, other, one)] == [True] * 3
    assert (waiting.take(), waiting.take(), waiting.take()) == (one, other, None)
    assert not waiting.add(one)
    assert not waiting
    now[0] += priority.AGAIN_S
    assert waiting.add(one)
    waiting.clear()
    assert waiting.take() is None


def test_the_same_batch_again_is_no_news(client: Any, app: Any) -> None:
    told: list[str] = []
    app.state.ingest.committer._hurry = lambda run, tenant: told.append(run)
    agent = Agent(client).register([UP])
    body = agent.body([UP], [1], **BROKEN)
    for _ in range(2):
        assert agent.post(body).status_code == 200
    agent.send([UP], [2])
    assert told == ["run-1"]


def test_wake_now_ends_a_pause_that_a_wake_does_not() -> None:
    import logging

    from fp8watch_server.db.leader_loop import LeaderLoop, Pause

    class Ours:
        def held(self) -> bool:
            return True

        def release(self) -> None:
            pass

    rounds_begun = threading.Semaphore(0)

    def work() -> Pause:
        rounds_begun.release()
        return Pause(60.0, wakes=False)

    rounds = LeaderLoop("t", "work", Ours(), work, logging.getLogger("rounds"))  # type: ignore[arg-type]
    rounds.start()
    assert rounds_begun.acquire(timeout=20)
    rounds.wake()
    assert not rounds_begun.acquire(timeout=0.2)
    rounds.wake_now()
    assert rounds_begun.acquire(timeout=20)
    rounds.stop()
