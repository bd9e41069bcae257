"""A collector with a queue: accepted means acknowledged by the stream; workers commit in order, once by key."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy.exc import DataError, IntegrityError, InternalError, OperationalError, ProgrammingError

from fp8watch_server.worker.loop import _is_refusal

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.kit import app_of, arrivals, eventually, working
from cluster.nats_servers import Node
from collector.killing import SITES
from collector.kit import Agent, make_site, served
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db import leader, lease
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.ingest.queue_front import QueueFront
from fp8watch_server.queue import subjects
from fp8watch_server.settings import SettingError, Settings
from fp8watch_server.worker.lanes import Lanes

MIB = 1 << 20


def test_what_was_accepted_is_committed_later_in_order_and_once(
    front: httpx.Client, database_url: str, node: Node
) -> None:
    """Nothing is stored without a worker; the queue is killed and comes again; two workers, and what is sent twice."""
    engine = make_engine(database_url)
    agents = [Agent(front, run="run-1", session=f"{r:032x}", rank=r).register(SITES) for r in range(3)]
    bodies = []
    for step in range(10):
        for agent in agents:
            bodies.append((agent, agent.body(SITES, [step])))
            assert agent.post(bodies[-1][1]).status_code == 200
    for agent, body in bodies[::5]:
        assert agent.post(body).json()["acked"] in range(1, 11)
    assert arrivals(engine) == []
    node.kill()
    node.start()
    with working(database_url, node.url) as one, working(database_url, node.url) as other:
        eventually(lambda: len(arrivals(engine)) >= 30, said=lambda: (one.counts, other.counts))
        late = agents[0].body(SITES, [11])
        eventually(lambda: front.get("/readyz").status_code == 200)
        assert agents[0].post(late).status_code == 200
        eventually(lambda: len(arrivals(engine)) >= 31)
    stored = arrivals(engine)
    assert len(stored) == len(set(stored)) == 31
    for rank in range(3):
        seqs = [seq for _, r, seq in stored if r == rank]
        assert seqs == sorted(seqs)
    assert one.counts.refused + other.counts.refused == 0
    engine.dispose()


def test_what_is_wrong_is_refused_before_it_is_accepted(front: httpx.Client) -> None:
    agent = Agent(front, run="run-1").register(SITES)
    body = agent.body(SITES, [1])
    assert agent.post(body).status_code == 200
    other = agent.body(SITES, [1], seq=1, fields={"amax_max": 3.0})
    assert agent.post(other).status_code == 409
    assert agent.post(b"junk").status_code == 400
    assert Agent(front, run="nowhere").post(Agent(front, run="nowhere").body(SITES, [1])).status_code == 424
    stranger = make_site("elsewhere")
    answer = agent.post(agent.body([stranger], [2]))
    assert (answer.status_code, answer.json()["ids"]) == (424, [stranger.id])
    agent.register_sites([stranger])
    assert agent.post(agent.body([stranger], [2])).status_code == 200
    assert Agent(front, run="run-1", rank=5).post(Agent(front, rank=5).body(SITES, [1], seq=9)).status_code == 422
    keyed = Agent(front, run="run-1", session="b" * 32, rank=1)
    front.headers["fp8watch-session-key"] = "right"
    keyed.register(SITES)
    body = keyed.body(SITES, [1])
    front.headers["fp8watch-session-key"] = "wrong"
    assert keyed.post(body).status_code == 403
    front.headers["fp8watch-session-key"] = "right"
    assert keyed.post(body).status_code == 200


def test_a_full_queue_refuses_healthy_batches_and_takes_broken_ones(
    database_url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a broken one cannot be committed at once."""
    monkeypatch.setattr(QueueFront, "_short_cut", lambda self, item: Future())
    app = app_of(database_url, node.url, MIB)
    engine = make_engine(database_url)
    with served(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        eventually(lambda: client.get("/readyz").status_code == 200)
        sites, rng = [make_site(f"m{i}", order=i) for i in range(100)], np.random.default_rng(1)
        agent = Agent(client, run="run-1").register(sites)
        agent.patient = False
        num_taken, step = 0, 0
        names = ("amax_max", "signal_energy", "noise_energy", "moment2", "moment4", "tile_noise_ratio_sum")

        def body(**more: int) -> bytes:
            noise = {name: rng.random(800) for name in names}
            return agent.body(sites, list(range(step, step + 8)), fields={**noise, **more})

        while (answer := agent.post(body())).status_code == 200:
            num_taken, step = num_taken + 1, step + 8
            assert num_taken < 100
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        broken = body(num_nan=3)  # as large as one that had no room
        assert agent.post(broken).status_code == 200
        with working(database_url, node.url, max_bytes=MIB):
            eventually(lambda: len(arrivals(engine)) == num_taken + 1)
        assert agent.seq in {seq for _, _, seq in arrivals(engine)}
        app.state.ingest.stop()
        app.state.engine.dispose()
    engine.dispose()


def test_a_batch_that_no_database_takes_is_kept_aside_and_blocks_nobody(
    front: httpx.Client, database_url: str, node: Node
) -> None:
    """Its run is deleted between acceptance and commit."""
    import sqlalchemy as sa
    from nats.aio.client import Client

    from fp8watch_server.db import schema as t

    engine = make_engine(database_url)
    gone = Agent(front, run="gone", session="a" * 32).register(SITES)
    stays = Agent(front, run="stays", session="b" * 32).register(SITES)
    for agent in (gone, stays):
        agent.send(SITES, [1])
    with engine.begin() as conn:
        for table in (t.site, t.session, t.run):
            conn.execute(sa.delete(table).where(table.c.run_id == "gone"))
    with working(database_url, node.url) as worker:
        eventually(lambda: worker.counts.refused == 1 and arrivals(engine) == [("stays", 0, 1)])

    async def kept() -> tuple[int, str]:
        nc = Client()
        await nc.connect(node.url)
        js = nc.jetstream()
        num = (await js.stream_info(subjects.REFUSED.name)).state.messages
        msg = await js.get_msg(subjects.REFUSED.name, 1)
        await nc.close()
        return num, (msg.headers or {})[subjects.WHY_HEADER]

    with ThreadPoolExecutor(1) as own:  # the loop of a browser's tests may run in this thread
        assert own.submit(lambda: asyncio.run(kept())).result() == (1, "Unknown: run")
    engine.dispose()


def test_while_the_database_is_away_batches_are_accepted_and_wait(
    front: httpx.Client, database_url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commits of a worker fail for a while, as those of a database that is away do."""
    from sqlalchemy.exc import OperationalError

    from fp8watch_server.ingest import group_commit

    engine, whole, num_failed = make_engine(database_url), group_commit.commit_group, [0]

    def away(*args: Any, **given: Any) -> Any:
        num_failed[0] += 1
        raise OperationalError("COMMIT", None, Exception("away"))

    agent = Agent(front, run="run-1").register(SITES)
    monkeypatch.setattr(group_commit, "commit_group", away)
    for step in range(5):
        agent.send(SITES, [step])
    with working(database_url, node.url) as worker:
        eventually(lambda: num_failed[0] > 0)
        agent.send(SITES, [5])
        monkeypatch.setattr(group_commit, "commit_group", whole)
        eventually(lambda: len(arrivals(engine)) == 6, 15, lambda: worker.counts)
    assert [seq for _, _, seq in arrivals(engine)] == [1, 2, 3, 4, 5, 6]
    engine.dispose()


def test_a_batch_is_put_aside_for_its_values_alone() -> None:
    """A right that was taken away, a table that is not there yet: the next batch would be answered as this one."""
    errors = (DataError, IntegrityError, ProgrammingError, InternalError, OperationalError)
    refused = {kind for kind in errors if _is_refusal(kind("INSERT", {}, Exception()))}
    assert refused == {DataError, IntegrityError}


def test_while_the_database_takes_no_changes_nothing_is_put_aside(
    front: httpx.Client, database_url: str, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a standby, or on a disk that is full: each batch by itself is answered as all of them are."""
    import sqlalchemy as sa

    engine = make_engine(database_url)
    name = engine.url.database

    def read_only(what: str) -> None:
        value = " = on" if what == "SET" else ""
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(sa.text(f'ALTER DATABASE "{name}" {what} default_transaction_read_only{value}'))

    agent = Agent(front, run="run-1").register(SITES)
    for step in range(5):
        agent.send(SITES, [step])
    read_only("SET")
    try:
        with working(database_url, node.url) as worker:
            eventually(lambda: worker.counts.restarts > 2, said=lambda: worker.counts)
            assert (worker.counts.committed, worker.counts.refused) == (0, 0)
            read_only("RESET")
            eventually(lambda: len(arrivals(engine)) == 5, 15, lambda: worker.counts)
            assert worker.counts.refused == 0
    finally:
        read_only("RESET")
    assert [seq for _, _, seq in arrivals(engine)] == [1, 2, 3, 4, 5]
    waits = [r.getMessage() for r in caplog.records if "the worker waits" in r.getMessage()]
    assert len(waits) == 1
    assert "cannot execute" in waits[0]
    assert "in a read-only transaction" in waits[0]
    engine.dispose()


def test_workers_share_the_lanes_and_take_over_those_of_one_that_hangs(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    engine = make_engine(database_url)
    one, other, third = Lanes(engine), Lanes(engine), Lanes(engine)
    everything = set(range(subjects.NUM_LANES))
    assert one.hold() == everything
    assert other.hold() == set()
    assert len(one.hold()) == subjects.NUM_LANES // 2
    assert other.hold() == set(), "what may be in hand is not given away"
    one.give_back()
    assert one.hold() | other.hold() == everything
    assert not one.hold() & other.hold()

    def both() -> bool:
        one.beat()
        return len(other.hold()) == subjects.NUM_LANES

    def only_other() -> bool:
        return other.hold() == everything

    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        assert not both(), "one that beats keeps its lanes"
        time.sleep(0.05)
    eventually(only_other)
    third.release()
    for lanes in (one, other):
        lanes.release()
    engine.dispose()


def test_leadership_ends_with_a_process_that_hangs_and_not_with_a_round_that_takes_long(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 3.0)
    monkeypatch.setattr(leader, "BEAT_S", 0.1)
    engine = make_engine(database_url)
    works, waits = leader.Leader(engine, "work"), leader.Leader(engine, "work")
    assert works.held()
    until = time.monotonic() + 6.0
    while time.monotonic() < until:  # a long round
        assert not waits.held()
        time.sleep(0.1)
    with works._lock:  # as a process that is stopped
        eventually(waits.held)
    with pytest.raises(SQLAlchemyError):
        works.held()
    assert not works.held()
    waits.release()
    engine.dispose()


def test_without_a_queue_its_client_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys, json\nfrom fp8watch_server.app import create_app\nfrom fp8watch_server.settings import Settings\n"
        "import fp8watch_server.cli\n"
        f"create_app(Settings(database_url='sqlite:///{tmp_path / 'a.db'}'))\n"
        "names = ('nats', 'fp8watch_server.queue', 'fp8watch_server.worker', 'fp8watch_server.ingest.queue_front')\n"
        "print(json.dumps([m for m in sys.modules if m.startswith(names)]))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(got.stdout) == []


def test_settings_of_the_queue_are_checked() -> None:
    pg = {"FP8WATCH_DATABASE_URL": "postgresql://u@h/d"}
    good = Settings.from_environ({**pg, "FP8WATCH_QUEUE": "nats://app:secretsecret@a:4222, tls://b"})
    assert good.queue == "nats://app:secretsecret@a:4222,tls://b"
    assert "secretsecret" in good.secrets
    assert "app" not in good.secrets
    for given in ("http://a", "nats://", "nats://a:b:c", "nats://a/path"):
        with pytest.raises(SettingError, match="nats://host:4222"):
            Settings.from_environ({**pg, "FP8WATCH_QUEUE": given})
    with pytest.raises(SettingError, match="SQLite"):
        Settings.from_environ({"FP8WATCH_QUEUE": "nats://a"})
    with pytest.raises(SettingError, match="1, 3 or 5"):
        Settings.from_environ({**pg, "FP8WATCH_QUEUE_REPLICAS": "2"})


def test_subjects_and_message_ids() -> None:
    """Names are hostile: one token each; lanes are shared by the ranks of a group; the body is part of the id."""
    for run in ("a.b", "x y", "*", ">", "é" * 80, "~" + "0" * 32, "ok-1"):
        subject = subjects.subject_of(subjects.HEALTHY, "default", run, 3)
        assert subject.count(".") == 3
        assert not set(subject) & set(" *>\t\r\n")
    lanes = [subjects.lane_of("run", rank) for rank in range(0, 256 * 8, 256)]
    assert sorted(lanes) == list(range(8))
    assert subjects.lane_of("run", 0) == subjects.lane_of("run", 255)
    one, other = (subjects.message_id("r", "s", 0, 1, bytes([i]) * 32) for i in range(2))
    assert one != other
