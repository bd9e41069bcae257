"""A token is worth the runs that it names, and a session belongs to whoever registered it first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.kit import Agent, Serving, make_site
from support.agents import make_maps, make_session, make_sites, record

from fp8watch_agent import sync
from fp8watch_agent.record import TileMap
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.wire import encode_batch
from fp8watch_server.auth import command
from fp8watch_server.auth.command import Unusable, end_of
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine

SITE = make_site()
KEY = "Fp8watch-Session-Key"


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """A collector as a process, on loopback and without a token yet."""
    with Serving(tmp_path, "--port", "0") as made:
        yield made


@pytest.fixture
def token(serving: Serving, capsys: pytest.CaptureFixture[str]) -> Any:
    """Make one by the command."""

    def create(*argv: str) -> str:
        status = command.main(["--database-url", serving.env["FP8WATCH_DATABASE_URL"], "create", *argv])
        out, err = capsys.readouterr()
        assert status == 0, err
        return str(out.strip())

    return create


@contextmanager
def client_of(serving: Serving, token: str = "", key: str = "") -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {KEY: key} if key else {}
    with httpx.Client(base_url=serving.url, headers=headers, trust_env=False, timeout=20) as client:
        yield client


def let_in(client: httpx.Client) -> None:
    """A token is known to the collector within seconds."""
    until = time.monotonic() + 20
    while client.put("/v1/runs/x").status_code == 401:
        assert time.monotonic() < until
        time.sleep(0.1)


def everything(agent: Agent) -> dict[str, Any]:
    """Every request that writes, as this agent."""
    maps = [TileMap(**{**m.__dict__, "site": SITE.id, "step": 1}) for m in make_maps(1)]
    seq = agent.seq
    answers = {
        "run": agent.register_run("another name"),
        "session": agent.register_session(),
        "sites": agent.register_sites([SITE]),
        "batch": agent.post(agent.body([SITE], [1], seq=seq + 1)),
        "tile maps": agent.post_maps(maps, seq=99),
    }
    agent.seq = seq
    return {what: answer.status_code for what, answer in answers.items()}


def test_a_token_is_worth_the_runs_that_it_names(serving: Serving, token: Any) -> None:
    ours, theirs = token("a", "--runs", "team-a-*,shared"), token("b", "--runs", "team-b-*")
    reader = token("people", "--scopes", "read")
    with client_of(serving, ours) as a, client_of(serving, theirs) as b, client_of(serving, reader) as people:
        let_in(a)
        let_in(b)
        victim = Agent(a, run="team-a-1").register([SITE], name="ours")
        victim.send([SITE], [0])
        before = people.get("/api/v1/runs/team-a-1").json()
        thief = Agent(b, run="team-a-1", session=victim.session)
        thief.seq = victim.seq
        assert everything(thief) == dict.fromkeys(("run", "session", "sites", "batch", "tile maps"), 403)
        refusal = thief.register_run().json()
        assert refusal["error"] == "token-runs"
        assert "team-b-*" in refusal["detail"]
        assert "fp8watch token create" in refusal["remedy"]
        after = people.get("/api/v1/runs/team-a-1").json()
        assert (after["name"], after["last_step"]) == (before["name"], before["last_step"]) == ("ours", 0)
        victim.send([SITE], [1])
        assert set(everything(Agent(a, run="shared")).values()) == {200}
        assert set(everything(Agent(b, run="team-b-1")).values()) == {200}
        assert b.put("/v1/runs/TEAM-B-1", json={}).status_code == 403
        assert people.get("/api/v1/runs/shared").status_code == 200


def test_a_token_ends_when_it_says(serving: Serving, token: Any) -> None:
    soon, late = token("soon", "--expires", "1h"), token("late", "--expires", "2d")
    engine = make_engine(serving.env["FP8WATCH_DATABASE_URL"])
    with engine.begin() as conn:
        ends = {row.name: row.expires_at for row in conn.execute(sa.select(t.token))}
        conn.execute(sa.update(t.token).where(t.token.c.name == "soon").values(expires_at=time.time() - 1))
    engine.dispose()
    assert ends["late"] - ends["soon"] == pytest.approx(47 * 3600, abs=60)
    with client_of(serving, late) as good, client_of(serving, soon) as gone:
        let_in(good)
        answer = gone.put("/v1/runs/x", json={})
        assert answer.status_code == 401
        assert "expired" in answer.json()["detail"]


@pytest.mark.parametrize("given", ["", "0d", "5", "1w", "2020-01-01", "tomorrow", "1.5d"])
def test_an_end_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(Unusable, match="90d, 12h"):
        end_of(given, time.time())


def test_only_the_scope_ingest_is_held_to_runs(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    url = serving.env["FP8WATCH_DATABASE_URL"]
    for argv, word in (
        (("x", "--runs", "a-*", "--scopes", "read"), "only the scope ingest"),
        (("x", "--runs", ","), "shell patterns"),
    ):
        assert command.main(["--database-url", url, "create", *argv]) == 2
        assert word in capsys.readouterr().err


def test_a_session_belongs_to_whoever_registered_it(serving: Serving) -> None:
    with (
        client_of(serving, key="a" * 32) as ours,
        client_of(serving, key="b" * 32) as theirs,
        client_of(serving) as none,
    ):
        victim = Agent(ours).register([SITE])
        victim.send([SITE], [0])
        for client in (theirs, none):
            thief = Agent(client, session=victim.session)
            thief.seq = victim.seq
            assert everything(thief) == {"run": 200, "session": 403, "sites": 403, "batch": 403, "tile maps": 403}
            assert thief.register_session().json()["error"] == "session-key"
        answer = victim.send([SITE], [1])
        assert answer["acked"] == victim.seq
        again = Agent(ours).register([SITE])  # as `fp8watch sync` does
        assert everything(again)["session"] == 200
        shown = ours.get("/api/v1/runs/run-1/sessions").text + ours.get("/api/v1/runs/run-1").text
        assert "key" not in shown
        old = Agent(none, session="c" * 32, rank=1).register([SITE])  # of a release without keys
        Agent(theirs, session=old.session, rank=1).register([SITE])
        old.send([SITE], [0])


def test_of_a_real_agent_nobody_takes_a_sequence_number(serving: Serving, tmp_path: Path) -> None:
    session = make_session(key="5ec2e7" * 5, rank=0, world_size=1)
    settings = AgentSettings(
        collector=serving.url, spool_dir=tmp_path / "spool", ring_bytes=1 << 20, poll_interval_s=0.02
    )
    recorder = Recorder(settings, session)
    record(recorder, range(4))
    assert recorder.flush(20)
    with client_of(serving) as client:
        thief = Agent(client, run=session.run_id, session=session.session)
        for seq in range(60):
            thief.seq = seq
            assert thief.post(thief.body(make_sites(1), [9])).status_code in (403, 424)
        record(recorder, range(4, 8))
        assert recorder.flush(20)
        recorder.close()
        health = recorder.health()
        assert health.records.dropped == {}
        assert health.records.acknowledged == 24
        assert client.get(f"/api/v1/runs/{session.run_id}").json()["last_step"] == 7


@pytest.mark.heavy(17, "server/fp8watch_server/ingest", "server/fp8watch_server/store/registrations.py")
def test_two_jobs_in_one_run_are_an_incident(tmp_path: Path) -> None:
    with (
        Serving(tmp_path, "--port", "0", FP8WATCH_TEST_WHOLE="1") as serving,
        client_of(serving, key="a" * 32) as one,
        client_of(serving, key="b" * 32) as other,
    ):
        jobs = [
            Agent(client, run="shared", session=name * 32, pid=pid).register([SITE])
            for client, name, pid in ((one, "a", 7), (other, "b", 8))
        ]
        incidents: list[Any] = []
        for step in range(30):
            for job in jobs:
                header, columns = job.batch([SITE], [step])
                columns[0]["time"] = time.time()
                assert job.post(encode_batch(header, *columns)).status_code == 200
            time.sleep(2)
            incidents = one.get("/api/v1/runs/shared/incidents").json()["items"]
            if incidents:
                break
    assert [(i["mode"], i["severity"], i["attempt"]) for i in incidents] == [("two-jobs-one-run", "warning", 2)]
    assert "process 8 on node-1" in incidents[0]["cause"]
    assert 10 <= step <= 20


def test_what_a_spool_holds_is_sent_with_its_key(serving: Serving, tmp_path: Path) -> None:
    """One session has its key beside it; of another everything but a body is lost; a third comes after it."""
    folder = tmp_path / "spool"
    settings = AgentSettings(spool_dir=folder, ring_bytes=1 << 20, poll_interval_s=0.02)
    for i, name in enumerate(("one", "two", "three")):
        recorder = Recorder(settings, make_session(session=name, key=name * 8, rank=i, started_at=1e9 + i))
        record(recorder, [i])
        assert recorder.flush(20)
        recorder.close()
    with client_of(serving, key="another") as client:
        Agent(client, run="run-1", session="two", rank=1).register(make_sites(3))
        assert sync.main(["--spool-dir", str(folder), "--collector", serving.url, "--timeout", "5"]) == 1
        assert [p.name[:3] for p in folder.glob("*.spool")] == ["two"]
        assert client.get("/api/v1/runs/run-1").json()["last_step"] == 2
