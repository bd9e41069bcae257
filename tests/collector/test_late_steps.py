"""Steps that came too late to be compared with other ranks are counted once, and said."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from collector.kit import Agent, make_site
from detect.scenarios import BY_NAME
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from fp8watch_agent.wire import Batch, encode_batch, rows_of
from fp8watch_server.app import _detection
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.pages.coverage import agents
from fp8watch_server.pipeline import detect_worker, run_engines
from fp8watch_server.pipeline.detect_worker import DetectWorker
from fp8watch_server.pipeline.replay import replay
from fp8watch_server.store.rank_sessions import MANY_LATE_STEPS, of_ranks

UP = make_site("up", order=0)


def came_at(app: Any, at: float) -> None:
    """What waits came at this second."""
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.hot_batch).where(t.hot_batch.c.detected == 0).values(received_at=at))


def told(app: Any) -> list[dict[str, Any]]:
    with app.state.engine.connect() as conn:
        run = {"id": "run-1", "world_size": 2, "attempt": 1}
        return sorted(agents(run, of_ranks(conn, run))["rows"], key=lambda row: row["rank"])


@pytest.fixture
def ranks(client: Any, app: Any) -> list[Agent]:
    """The second one has said nothing while the first was judged alone for a while."""
    made = [Agent(client, session=str(rank) * 32, rank=rank).register([UP]) for rank in range(2)]
    worker = DetectWorker(app.state.engine, _detection(app.state.settings))
    app.state.late = worker
    for k in range(5):
        made[0].send([UP], list(range(40 * k, 40 * k + 40)))
        came_at(app, 100.0 + 10 * k)
        worker.drain()
    assert [row["late"] for row in told(app)] == ["", ""]
    return made


def test_late_steps_are_counted_once_and_said(client: Any, app: Any, ranks: list[Agent]) -> None:
    ranks[1].send([UP], [3])
    came_at(app, 141.0)
    app.state.late.drain()
    first, second = told(app)
    assert (first["late"], second["late"]) == ("", "step 3 came too late to be compared with other ranks")
    assert (second["well"], second["why"]) == (True, [])
    ranks[1].send([UP], list(range(10, 10 + MANY_LATE_STEPS)))
    came_at(app, 142.0)
    app.state.late.drain()
    app.state.late.drain()
    second = told(app)[1]
    said = f"{MANY_LATE_STEPS + 1} steps, the last of them {9 + MANY_LATE_STEPS}, came too late to be compared with other ranks"
    assert (second["why"], second["well"]) == ([said], False)
    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    assert [s.value for s in families["fp8watch_late_steps"].samples] == [MANY_LATE_STEPS + 1]
    [row] = [s for s in client.get("/api/v1/runs/run-1/sessions").json()["items"] if s["rank"] == 1]
    assert (row["num_late_steps"], row["last_late_step"]) == (MANY_LATE_STEPS + 1, 9 + MANY_LATE_STEPS)


def frozen_scale(client: Any, app: Any, run: str) -> tuple[Agent, list[Batch]]:
    """Rank 0 of two, and what it says; the other one never comes."""
    case = BY_NAME["frozen-scale"].make(1, 2)
    trace = case.traces[0]
    return Agent(client, run=run, session=f"{run}0".replace("-", "") * 4).register(trace.sites), list(trace.batches(8))


def send(agent: Agent, batch: Batch) -> None:
    agent.seq += 1
    header = replace(batch.header, run=agent.run, session=agent.session, rank=0, seq=agent.seq)
    body = encode_batch(header, batch.steps, batch.step, batch.site, rows_of(batch))
    assert agent.post(body).status_code == 200


def said_of(app: Any, run: str) -> list[str]:
    with app.state.engine.connect() as conn:
        return list(conn.execute(sa.select(t.incident.c.mode).where(t.incident.c.run_id == run)).scalars())


class Clock:
    """Of the collector, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, app: Any, worker: DetectWorker, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1
            came_at(app, self.now)
            worker.drain()
            worker.tick()


def test_what_waits_for_ranks_is_judged_though_the_collector_begins_again(
    client: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state is saved without it; a batch that comes brings it back."""
    monkeypatch.setattr(detect_worker, "SAVE_EVERY_BATCHES", 1)
    monkeypatch.setattr(detect_worker, "SAVE_SHARE", float("inf"))
    clock, detection = Clock(), _detection(app.state.settings)
    agent, batches = frozen_scale(client, app, "run-1")
    worker = DetectWorker(app.state.engine, detection, clock=clock)
    for i, batch in enumerate(batches):
        send(agent, batch)
        if i % 4 == 3:  # all of it within the first ten seconds
            clock.passes(app, worker)
        if i == len(batches) - 2:
            worker = DetectWorker(app.state.engine, detection, clock=clock)
    clock.passes(app, worker, 15)
    assert "frozen-scale" in said_of(app, "run-1")
    with app.state.engine.connect() as conn:
        found = {i["mode"]: i["first_step"] for i in replay(conn, "run-1").incidents}
        told = dict(conn.execute(sa.select(t.incident.c.mode, t.incident.c.first_step)).all())
    assert told == found


def test_what_waits_for_ranks_is_judged_though_other_runs_have_their_turns(
    client: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_engines, "MAX_ENGINES", 1)
    clock = Clock()
    runs = [frozen_scale(client, app, f"run-{k}") for k in range(2)]
    worker = DetectWorker(app.state.engine, _detection(app.state.settings), clock=clock)
    for i in range(len(runs[0][1])):
        for agent, batches in runs:
            send(agent, batches[i])
        if i % 4 == 3:
            clock.passes(app, worker)
    clock.passes(app, worker, 15)
    assert ["frozen-scale" in said_of(app, f"run-{k}") for k in range(2)] == [True, True]


def test_a_replay_ends_with_what_waits_for_ranks(client: Any, app: Any) -> None:
    clock = Clock()
    agent, batches = frozen_scale(client, app, "run-1")
    worker = DetectWorker(app.state.engine, _detection(app.state.settings), clock=clock)
    for i, batch in enumerate(batches):
        send(agent, batch)
        if i % 4 == 3:
            clock.passes(app, worker)
    clock.passes(app, worker)
    assert said_of(app, "run-1") == []
    with app.state.engine.connect() as conn:
        told = replay(conn, "run-1").incidents
    assert "frozen-scale" in {incident["mode"] for incident in told}


def test_a_collector_that_begins_again_counts_none_of_them_twice(app: Any, ranks: list[Agent]) -> None:
    ranks[1].send([UP], [3, 4])
    came_at(app, 141.0)
    app.state.late.drain()
    after = DetectWorker(app.state.engine, _detection(app.state.settings))
    ranks[0].send([UP], [200])
    came_at(app, 143.0)
    after.drain()
    assert [row["late"] for row in told(app)] == [
        "", "2 steps, the last of them 4, came too late to be compared with other ranks",
    ]  # fmt: skip
