"""Every committed batch is looked at once, in order, also after a restart and after a detector broke."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
import zstandard
from collector.kit import Agent, FakeEngine, Recorder, make_site, run_async

from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.db.leader import Leader
from fp8watch_server.pipeline import detect_worker as worker_module
from fp8watch_server.pipeline import engine_restore
from fp8watch_server.pipeline.detect_worker import DetectWorker

UP, DOWN = make_site("up", order=0), make_site("down", order=1)


def states(app: Any) -> list[int]:
    with app.state.engine.connect() as conn:
        return list(conn.execute(sa.select(t.hot_batch.c.detected).order_by(t.hot_batch.c.arrival)).scalars())


def test_batches_are_taken_in_the_order_of_their_commit(client: Any, app: Any, recorder: Recorder) -> None:
    agent = Agent(client).register([UP])
    for seq in (3, 1, 2):
        agent.send([UP], [seq], seq=seq, fields={"num_inf": int(seq == 2)})
    assert states(app) == [0, 0, 0]
    assert app.state.worker.drain() == 3
    assert app.state.worker.drain() == 0
    assert states(app) == [1, 1, 1]
    (engine,) = recorder.engines
    assert [seq for _, seq in engine.seen] == [3, 1, 2]
    assert recorder.folded == [("run-1", 1, ((2, UP.id),))]
    assert recorder.closed == [2]  # nothing was open before


def test_sites_that_come_later_reach_the_engine(client: Any, app: Any, recorder: Recorder) -> None:
    agent = Agent(client).register([UP])
    agent.send([UP], [1])
    app.state.worker.drain()
    agent.register_sites([DOWN])
    agent.send([UP, DOWN], [2])
    app.state.worker.drain()
    (engine,) = recorder.engines
    assert set(engine.sites) == {UP.id, DOWN.id}


@pytest.mark.parametrize("broken", [0, 1], ids=["healthy", "broken"])  # a broken one has a way of its own
def test_a_restart_rebuilds_the_engine_silently_and_takes_what_was_pending(
    client: Any, app: Any, recorder: Recorder, settings: Any, broken: int
) -> None:
    agent = Agent(client).register([UP])
    agent.send([UP], [1], fields={"num_inf": 1})
    app.state.worker.drain()
    agent.send([UP], [2], fields={"num_inf": broken})
    after = Recorder()
    worker = DetectWorker(app.state.engine, after.detection())
    worker.drain()
    assert [[seq for _, seq in engine.seen] for engine in after.engines] == [[1, 2]]
    assert after.folded == [("run-1", 1, ((2, UP.id),))] * broken  # of step 1 it was said before


def test_a_detector_that_breaks_harms_one_batch(client: Any, app: Any, recorder: Recorder) -> None:
    agent = Agent(client).register([UP])
    for step in (1, 2, 3):
        agent.send([UP], [step])
    real = recorder.detection()
    observe = real.make_engine({}).__class__.observe

    class Breaks(real.make_engine({}).__class__):  # type: ignore[misc]
        def observe(self, batch: Any, at: float | None = None) -> Any:
            if batch.header.seq == 2:
                raise ZeroDivisionError("a bug")
            return observe(self, batch)

    object.__setattr__(real, "make_engine", lambda sites, run_id, run_name: Breaks(sites))
    worker = DetectWorker(app.state.engine, real)
    worker.drain()
    assert states(app) == [1, 2, 1]
    assert worker.num_failed_batches == 1
    with app.state.engine.connect() as conn:
        errors = list(conn.execute(sa.select(t.hot_batch.c.detect_error)).scalars())
    assert errors == [None, "ZeroDivisionError: a bug", None]


def test_an_incident_that_cannot_be_written_marks_its_batch_and_leaves_nothing(client: Any, app: Any) -> None:
    agent = Agent(client).register([UP])
    agent.send([UP], [1], fields={"num_inf": 1})
    recorder = Recorder()
    detection = recorder.detection()

    def fold(conn: Any, *args: Any, **kw: Any) -> Any:
        conn.execute(sa.insert(t.silence), [{"run_id": "", "id": "x", "created_at": 0.0, "expires_at": 0.0}])
        raise KeyError("a bug")

    object.__setattr__(detection, "fold", fold)
    DetectWorker(app.state.engine, detection).drain()
    assert states(app) == [2]
    with app.state.engine.connect() as conn:
        assert conn.execute(sa.select(t.silence)).all() == []


@pytest.mark.parametrize("error", [sa.exc.DataError, sa.exc.IntegrityError])
def test_an_incident_that_no_database_takes_stops_no_other_batch(client: Any, app: Any, error: Any) -> None:
    bad, good = (Agent(client, run=run, session=run * 32).register([UP]) for run in "bg")
    for step in (1, 2, 3):
        bad.send([UP], [step], fields={"num_inf": int(step == 2)})
    good.send([UP], [1], fields={"num_inf": 1})
    recorder = Recorder()
    detection = recorder.detection()
    fold = detection.fold

    def refused(conn: Any, run_id: str, *args: Any, **kw: Any) -> Any:
        if run_id == "b":
            raise error("INSERT", None, Exception("this value"))
        return fold(conn, run_id, *args, **kw)

    object.__setattr__(detection, "fold", refused)
    worker = DetectWorker(app.state.engine, detection)
    worker.drain()
    assert sorted(states(app)) == [1, 1, 1, 2]
    assert [folded[0] for folded in recorder.folded] == ["g"]
    with app.state.engine.connect() as conn:
        failed = conn.execute(sa.select(t.hot_batch.c.run_id, t.hot_batch.c.seq).where(t.hot_batch.c.detected == 2))
        assert [tuple(row) for row in failed] == [("b", 2)]


def test_a_unique_key_that_was_taken_meanwhile_is_no_batch_s_fault(client: Any, app: Any) -> None:
    Agent(client).register([UP]).send([UP], [1], fields={"num_inf": 1})
    recorder = Recorder()
    detection = recorder.detection()
    fold, raised = detection.fold, []

    def raced(*args: Any, **kw: Any) -> Any:
        if not raised:
            raised.append(1)
            raise sa.exc.IntegrityError("INSERT", None, Exception("somebody wrote the same event first"))
        return fold(*args, **kw)

    object.__setattr__(detection, "fold", raced)
    worker = DetectWorker(app.state.engine, detection)
    worker.drain()
    assert (states(app), len(recorder.folded), worker.num_failed_batches) == ([1], 1, 0)


@pytest.mark.parametrize("error", [sa.exc.InternalError, sa.exc.ProgrammingError])
def test_what_a_database_says_of_itself_marks_no_batch(client: Any, app: Any, error: Any) -> None:
    """It is read-only, or a right or a table is missing."""
    agent = Agent(client).register([UP])
    for step in (1, 2):
        agent.send([UP], [step], fields={"num_inf": 1})
    recorder = Recorder()
    detection = recorder.detection()
    fold = detection.fold

    def away(*args: Any, **kw: Any) -> Any:
        raise error("INSERT", None, Exception("in a read-only transaction"))

    object.__setattr__(detection, "fold", away)
    worker = DetectWorker(app.state.engine, detection)
    with pytest.raises(error):
        worker.drain()
    assert states(app) == [0, 0]
    object.__setattr__(detection, "fold", fold)
    worker._forget()  # as its thread does after an error
    worker.drain()
    assert (states(app), len(recorder.folded)) == ([1, 1], 2)


def test_the_thread_takes_a_batch_at_once(settings: Any) -> None:
    import asyncio

    import httpx

    recorder, folded = Recorder(), threading.Event()
    detection = recorder.detection()
    fold = detection.fold
    object.__setattr__(detection, "fold", lambda *a, **k: (fold(*a, **k), folded.set())[0])
    app = create_app(settings, detection=detection, dispatcher=lambda e, s: None, pages=False)

    async def run() -> None:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
        ):

            class Waits:
                """The agent of the kit is synchronous: answer it from this loop."""

                def __getattr__(self, name: str) -> Any:
                    def call(*args: Any, **kw: Any) -> Any:
                        return asyncio.run_coroutine_threadsafe(getattr(client, name)(*args, **kw), loop).result(10)

                    return call

            loop = asyncio.get_running_loop()

            def work() -> bool:
                agent = Agent(Waits()).register([UP])
                agent.send([UP], [1], fields={"num_inf": 1})
                return folded.wait(5)

            assert await asyncio.to_thread(work)

    run_async(run())
    assert len(recorder.folded) == 1


def test_after_a_restart_from_step_0_the_engine_is_rebuilt_from_the_newer_attempt(client: Any, app: Any) -> None:
    old = Agent(client).register([UP])
    for step in (1000, 1001):
        old.send([UP], [step])
    new = Agent(client, session="b" * 32).register([UP])
    for step in (0, 1, 2):
        new.send([UP], [step])
    app.state.worker.drain()
    new.send([UP], [3])
    after = Recorder()
    DetectWorker(app.state.engine, after.detection()).drain()
    assert after.engines[0].seen == [(new.session, seq) for seq in (1, 2, 3, 4)]


def test_a_clock_that_is_set_back_changes_no_order(
    client: Any, app: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(client).register([UP])
    now = [2_000_000_000.0]
    monkeypatch.setattr(app.state.ingest.committer, "_clock", lambda: now[0])
    for step in (1, 2, 3):
        now[0] -= 3600
        agent.send([UP], [step])
    app.state.worker.drain()
    assert [seq for _, seq in recorder.engines[0].seen] == [1, 2, 3]


def test_facts_that_change_after_the_clock_was_set_back_reach_the_engine(
    client: Any, app: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [2_000_000_000.0]
    monkeypatch.setattr("fp8watch_server.ingest.routes.time.time", lambda: now[0])
    agent = Agent(client).register([UP, DOWN])
    agent.send([UP], [1])
    app.state.worker.drain()
    now[0] -= 3600
    agent.register_sites([replace(UP, eps=1e-12)])
    agent.send([UP], [2])
    app.state.worker.drain()
    assert recorder.engines[0].sites[UP.id].eps == 1e-12


def test_a_body_that_cannot_be_read_back_holds_up_nobody(client: Any, app: Any, recorder: Recorder) -> None:
    agent = Agent(client).register([UP])
    for step in (1, 2):
        agent.send([UP], [step])
    with writing(app.state.engine) as conn:
        damaged = {"body": b"damaged", "received_at": 1.0}  # the time is part of the cache's key
        conn.execute(sa.update(t.hot_batch).where(t.hot_batch.c.seq == 1).values(**damaged))
    app.state.worker.drain()
    assert states(app) == [2, 1]
    assert [seq for _, seq in recorder.engines[0].seen] == [2]


class Remembers(FakeEngine):
    """An engine that can be saved: what it has seen is its state."""

    def dump(self) -> bytes:
        return json.dumps(self.seen).encode()

    @classmethod
    def load(cls, state: bytes, sites: Any) -> Remembers:
        if not state.startswith(b"["):
            raise ValueError("a state of another version")
        made = cls(sites)
        made.seen = [tuple(item) for item in json.loads(state)]
        return made


def remembering() -> tuple[Recorder, Any]:
    recorder = Recorder()
    detection = recorder.detection()

    def make(sites: Any, run_id: str, run_name: str) -> Remembers:
        recorder.engines.append(Remembers(sites))
        return recorder.engines[-1]  # type: ignore[return-value]

    def load(state: bytes, sites: Any, run_id: str, run_name: str) -> Remembers:
        recorder.engines.append(Remembers.load(state, sites))
        return recorder.engines[-1]  # type: ignore[return-value]

    object.__setattr__(detection, "make_engine", make)
    object.__setattr__(detection, "load_engine", load)
    return recorder, detection


def test_an_engine_that_was_saved_sees_only_what_came_since(
    client: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(client).register([UP])
    _, detection = remembering()
    monkeypatch.setattr(worker_module, "SAVE_EVERY_BATCHES", 3)
    worker = DetectWorker(app.state.engine, detection)
    for step in range(3):
        agent.send([UP], [step])
    worker.drain()  # saved behind the third
    for step in (3, 4):
        agent.send([UP], [step])
        worker.drain()
    agent.send([UP], [5])
    after, detection = remembering()
    DetectWorker(app.state.engine, detection).drain()
    assert [seq for _, seq in after.engines[0].seen] == [1, 2, 3, 4, 5, 6]
    with app.state.engine.connect() as conn:
        assert conn.execute(sa.select(t.detect_state.c.arrival)).scalar_one() == 3


@pytest.mark.parametrize("damage", [b"", b"no frame"])
def test_a_saved_engine_that_cannot_be_used_is_built_up_again(
    client: Any, app: Any, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    agent = Agent(client).register([UP])
    _, detection = remembering()
    monkeypatch.setattr(worker_module, "SAVE_EVERY_BATCHES", 1)
    for step in range(3):
        agent.send([UP], [step])
    DetectWorker(app.state.engine, detection).drain()
    broken = damage or zstandard.compress(b"{}")
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.detect_state).values(state=broken))
    agent.send([UP], [3])
    after, detection = remembering()
    DetectWorker(app.state.engine, detection).drain()
    assert [seq for _, seq in after.engines[-1].seen] == [1, 2, 3, 4]


def test_a_state_that_cannot_be_saved_costs_no_batch(client: Any, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(client).register([UP])
    recorder, detection = remembering()
    monkeypatch.setattr(worker_module, "SAVE_EVERY_BATCHES", 1)
    monkeypatch.setattr(worker_module, "SAVE_SHARE", 1e9)  # as often as there are so many
    worker = DetectWorker(app.state.engine, detection)
    agent.send([UP], [0])
    worker.drain()
    monkeypatch.setattr(recorder.engines[0], "dump", lambda: 1 / 0, raising=False)
    for step in (1, 2):
        agent.send([UP], [step], fields={"num_inf": int(step == 2)})
        worker.drain()
    assert (states(app), worker.num_failed_batches, worker.num_failed_saves) == ([1, 1, 1], 0, 2)
    assert recorder.folded == [("run-1", 1, ((2, UP.id),))]
    assert len(recorder.engines) == 1
    with app.state.engine.connect() as conn:
        assert conn.execute(sa.select(t.detect_state)).first() is None
    after, detection = remembering()  # a restart does not go on from the state of long before
    agent.send([UP], [3])
    DetectWorker(app.state.engine, detection).drain()
    assert [seq for _, seq in after.engines[0].seen] == [1, 2, 3, 4]


def test_replay_counts_samples_not_steps(client: Any, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full statistics each 64th step: the baselines reach 64 times as far back."""
    monkeypatch.setattr(engine_restore, "REPLAY_SAMPLES", 4)
    agent = Agent(client).register([UP])
    for step in range(0, 640, 16):
        agent.send([UP] if step % 64 == 0 else [], [step])
    app.state.worker.drain()
    agent.send([UP], [640])
    after = Recorder()
    DetectWorker(app.state.engine, after.detection()).drain()
    steps = [16 * (seq - 1) for _, seq in after.engines[0].seen]
    assert steps == list(range(384, 656, 16))


def test_a_session_that_says_more_of_itself_is_told_to_the_detectors_again(
    client: Any, app: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(client).register([UP])
    told: list[list[str]] = []
    monkeypatch.setattr(
        FakeEngine, "add_sessions", lambda self, sessions: told.append(next(sorted(s.facts) for s in sessions))
    )
    agent.send([UP], [1])
    app.state.worker.drain()
    agent.facts = {"facts": {"eps": 0.0, "checkpoint_fingerprint": "c"}}
    assert agent.register_session().status_code == 200
    for step in (2, 3):
        agent.send([UP], [step])
        app.state.worker.drain()
    assert told == [["eps"], ["checkpoint_fingerprint", "eps"]]


def test_two_workers_on_one_database_count_a_batch_once(client: Any, app: Any) -> None:
    """What the leader's lock saves from happening, and what happens when it does not."""
    agent = Agent(client).register([UP])
    agent.send([UP], [1], fields={"num_saturated": 5})
    first, second = (DetectWorker(app.state.engine, Recorder().detection()) for _ in range(2))
    judge = second._judge

    def slow(*args: Any) -> Any:
        judged = judge(*args)
        first.drain()  # meanwhile the other one is done with it
        return judged

    second._judge = slow  # type: ignore[method-assign]
    second.drain()
    with app.state.engine.connect() as conn:
        assert conn.execute(sa.select(t.site_total.c.num_saturated)).scalar_one() == 5
    assert (first.num_failed_batches, second.num_failed_batches) == (0, 0)


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_of_two_collectors_one_leads_until_it_dies(app: Any) -> None:
    first, second = Leader(app.state.engine, "x"), Leader(app.state.engine, "x")
    assert [first.held(), second.held(), first.held(), Leader(app.state.engine, "y").held()] == [
        True,
        False,
        True,
        True,
    ]
    assert first._conn is not None
    first._conn.connection.driver_connection.close()  # as when the process dies
    until = time.monotonic() + 40
    while not second.held():  # the server notices by itself
        assert time.monotonic() < until
        time.sleep(0.02)
    with pytest.raises(sa.exc.SQLAlchemyError):
        first.held()
    assert not first.held()
    second.release()
    assert first.held()
    first.release()


def test_sessions_of_one_restart_are_one_attempt(client: Any) -> None:
    def attempt(session: str, rank: int, count: int | None) -> int:
        facts = {} if count is None else {"facts": {"restart_count": count}}
        agent = Agent(client, session=session * 32, rank=rank, **facts)
        agent.register_run()
        return int(agent.register_session().json()["attempt"])

    assert [attempt("a", 0, 0), attempt("b", 1, 0)] == [1, 1]
    assert [attempt("c", 0, 1), attempt("d", 1, 1), attempt("e", 2, 1)] == [2, 2, 2]  # a rank that is new joins
    assert [attempt("f", 1, 0), attempt("0", 0, 0)] == [3, 3]  # a new job under the same run counts from 0 again
    assert attempt("f", 1, 0) == 3
    assert [attempt("1", 5, None), attempt("2", 0, None)] == [3, 4]  # a launcher that does not count
