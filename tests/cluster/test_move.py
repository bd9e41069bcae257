"""A run is moved between databases: whole, once, and going on; ended at any point, the same command finishes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.kit import Agent, Recorder, make_site, served
from support.database import fresh_database

from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import order_of
from fp8watch_server.db.fence import tables_of_runs, take_down
from fp8watch_server.db.moves_under_way import UnderWay, moves_under_way
from fp8watch_server.moving.command import main
from fp8watch_server.moving.move import CannotMove, Move
from fp8watch_server.settings import Settings

SITES = [make_site("up", order=0), make_site("down", order=1)]
OF_A, BESIDE = [run for run in map("it's/run-{}".format, range(64)) if order_of(run, "ab")[0] == "a"][:2]
POINTS = ("noted", "copied", "refused", "fenced", "in place", "whole", "switched", "deleted", "cleaned")
QUICK = ("refused", "fenced", "switched", "cleaned")
INFINITE = {"num_inf": [1, 0], "num_sentinel_tiles": [1, 0]}


class Killed(BaseException):
    """As kill -9: nothing is tidied."""


@pytest.fixture
def urls(database_url: str) -> Iterator[dict[str, str]]:
    with fresh_database("postgresql") as a, fresh_database("postgresql") as b:
        yield {"home": database_url, "a": a, "b": b}


@pytest.fixture
def database_kind() -> str:
    return "postgresql"


@pytest.fixture
def app(urls: dict[str, str]) -> Iterator[Any]:
    settings = Settings(database_url=urls["home"], shards=f"a={urls['a']} b={urls['b']}")
    made = create_app(settings, dispatcher=lambda e, s: None, pages=False)
    yield made
    for ingest in (made.state.ingest, *made.state.ingests.values()):
        ingest.stop()
    for engine in made.state.shards.engines():
        take_down(engine, OF_A)
        engine.dispose()


@pytest.fixture
def client(app: Any) -> Iterator[httpx.Client]:
    with served(app) as url, httpx.Client(base_url=url, timeout=20, trust_env=False) as made:
        yield made


def rows_of(url: str, run: str) -> dict[str, list[str]]:
    """All rows of a run, as text."""
    engine = make_engine(url)
    try:
        with engine.connect() as conn:
            found = {
                table.name: sorted(
                    conn.execute(
                        sa.text(f'SELECT x::text FROM "{table.name}" x WHERE run_id = :run'), {"run": run}
                    ).scalars()
                )
                for table in tables_of_runs()
            }
    finally:
        engine.dispose()
    return {name: rows for name, rows in found.items() if rows}


def work(app: Any, name: str = "a", *, compact: bool = False) -> None:
    """What the threads of a shard would do now."""
    station = app.state.stations[name]
    while station.worker.drain():
        pass
    station.worker.tick()
    if compact:
        station.compactor._cool_after_s = 0.0
        station.compactor._work()


def filled(app: Any, client: httpx.Client) -> tuple[Agent, list[bytes]]:
    """A run with sheets, an incident, messages, and batches that nobody has looked at; and another one beside it."""
    agent, beside = (
        Agent(client, run=run, session=f"{i:032x}").register(SITES) for i, run in enumerate((OF_A, BESIDE))
    )
    beside.send(SITES, [1])
    sent = [agent.body(SITES, list(range(start, start + 64))) for start in range(0, 256, 64)]
    sent.append(agent.body(SITES, [256], fields=INFINITE))
    for body in sent:
        assert agent.post(body).status_code == 200
    work(app, compact=True)
    sent.append(agent.body(SITES, [257]))
    assert agent.post(sent[-1]).status_code == 200
    return agent, sent


def mover(app: Any, to: str, crash: Callable[[str], None] = lambda point: None, run: str = OF_A) -> Move:
    return Move(app.state.shards, run, to, crash=crash)


@pytest.mark.parametrize(
    "point", [point if point in QUICK else pytest.param(point, marks=pytest.mark.long) for point in POINTS]
)
def test_ended_at_any_point_it_is_finished_by_the_same_command(
    app: Any, client: httpx.Client, urls: dict[str, str], point: str
) -> None:
    agent, sent = filled(app, client)
    agent.patient = False
    beside = rows_of(urls["a"], BESIDE)

    def crash(at: str) -> None:
        if at == point:
            raise Killed

    with pytest.raises(Killed):
        mover(app, "b", crash).run()
    late = agent.body(SITES, [258])
    answer = agent.post(late)
    open_yet = POINTS.index(point) < POINTS.index("fenced")
    assert answer.status_code in ((200,) if open_yet else (503,)), answer.text
    if not open_yet:
        # and not made anew where it was; where the old copy is there, there is nothing new to write
        there_still = point in (
            "fenced",
            "in place",
            "whole",
            "switched",
            "deleted",
        )  # the last is undone with its transaction
        assert agent.register_run().status_code in ((200, 503) if there_still else (503,))
    work(app)
    before = rows_of(urls["a"], OF_A)
    mover(app, "b").run()
    assert rows_of(urls["a"], OF_A) == {}
    assert rows_of(urls["a"], BESIDE) == beside
    there = rows_of(urls["b"], OF_A)
    if before:
        assert there == before
    assert there["sheet"]
    assert len(there["incident"]) == 1
    app.state.shards.directory.refresh()
    for body in (*sent, late):  # what was there is known
        assert agent.post(body).status_code == 200
    work(app, "b")
    run = client.get(f"/api/v1/runs/{agent.path.removeprefix('/v1/runs/')}").json()
    assert run["last_step"] == 258
    engine = app.state.shards.named("b")
    with engine.connect() as conn:
        assert conn.execute(sa.select(t.run.c.num_batches).where(t.run.c.run_id == OF_A)).scalar_one() == len(sent) + 1
        assert conn.execute(sa.select(sa.func.count()).select_from(t.incident)).scalar_one() == 1
        left = "SELECT count(*) FROM information_schema.schemata WHERE schema_name LIKE 'fp8watch_move%%'"
        assert conn.exec_driver_sql(left).scalar_one() == 0
    with app.state.shards.named("a").connect() as conn:
        left = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'fp8watch_moves%%'"
        assert conn.exec_driver_sql(left).scalar_one() == 0
    mover(app, "b").run()  # nothing is left to do
    mover(app, "a").run()
    app.state.shards.directory.refresh()
    assert rows_of(urls["b"], OF_A) == {}
    agent.patient = True
    agent.register(SITES).send(SITES, [259])
    assert len(rows_of(urls["a"], OF_A)["incident"]) == 1


def test_what_changes_while_it_is_copied_goes_too(app: Any, client: httpx.Client, urls: dict[str, str]) -> None:
    agent, _ = filled(app, client)

    def crash(point: str) -> None:
        if point == "copied":  # rows come, change and go
            for start in range(258, 514, 64):
                agent.send(SITES, list(range(start, start + 64)), fields={"num_saturated": 3})
            work(app, compact=True)
            before.update(rows_of(urls["a"], OF_A))

    before: dict[str, list[str]] = {}
    mover(app, "b", crash).run()
    assert rows_of(urls["b"], OF_A) == before
    agent.patient = False  # before this collector has heard of the move
    assert agent.register_run().status_code == agent.post(agent.body(SITES, [999])).status_code == 503
    assert rows_of(urls["a"], OF_A) == {}


def test_a_move_that_fails_leaves_the_run_where_it_is(app: Any, client: httpx.Client, urls: dict[str, str]) -> None:
    agent, _ = filled(app, client)
    agent.patient = False
    before = rows_of(urls["a"], OF_A)

    def crash(point: str) -> None:
        if point == "in place":
            assert agent.post(agent.body(SITES, [600])).status_code == 503
            agent.seq -= 1
            work(app)  # detectors meet the fence, and go on with other runs
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        mover(app, "b", crash).run()
    assert rows_of(urls["a"], OF_A) == before
    assert rows_of(urls["b"], OF_A) == {}
    agent.send(SITES, [600])
    with app.state.engine.connect() as conn:
        row = conn.execute(sa.select(t.shard_of_run).where(t.shard_of_run.c.run_id == OF_A)).one()
    assert (row.shard, row.moving_to, row.refuses, row.num_moves) == ("a", None, False, 0)


def test_moves_that_make_no_sense_are_refused(app: Any, client: httpx.Client) -> None:
    filled(app, client)
    with pytest.raises(CannotMove, match="there is no run 'nowhere'"):
        mover(app, "b", run="nowhere").run()

    def another(point: str) -> None:
        with pytest.raises(CannotMove, match="by another process"):
            mover(app, "b").run()
        raise Killed

    with pytest.raises(Killed):
        mover(app, "b", another).run()
    with pytest.raises(CannotMove, match="finish that one first"):
        mover(app, "").run()


def test_a_run_from_before_there_were_shards_leaves_home(urls: dict[str, str]) -> None:
    settings = Settings(database_url=urls["home"])
    made = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)
    with served(made) as url, httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        Agent(client, run=OF_A).register(SITES).send(SITES, [1])
    made.state.ingest.stop()
    made.state.engine.dispose()
    settings = Settings(database_url=urls["home"], shards=f"a={urls['a']} b={urls['b']}")
    made = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)
    before = rows_of(urls["home"], OF_A)
    mover(made, "b").run()
    assert rows_of(urls["b"], OF_A) == before
    assert rows_of(urls["home"], OF_A) == {}
    for engine in made.state.shards.engines():
        engine.dispose()


def test_a_move_that_nobody_finishes_is_told(
    app: Any,
    client: httpx.Client,
    urls: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In `/metrics`, and with the remedy by `fp8watch shards list`."""
    Agent(client, run=OF_A).register(SITES).send(SITES, [1])
    seen: list[UnderWay] = []

    def crash(point: str) -> None:
        with app.state.shards.home.connect() as conn:
            seen.extend(moves_under_way(conn))
        if point == "fenced":
            raise Killed

    def listed() -> str:
        assert main(["list"]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if OF_A in line)

    with pytest.raises(Killed):
        mover(app, "b", crash).run()
    assert {move.at_work for move in seen} == {True}
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", urls["home"])
    monkeypatch.setenv("FP8WATCH_SHARDS", f"a={urls['a']} b={urls['b']}")
    assert f"its batches are refused; start it again: fp8watch shards move {OF_A} b" in listed()
    metrics = client.get("/metrics").text
    assert 'fp8watch_moves_cut_short{refused="true"} 1.0' in metrics
    assert 'fp8watch_moves_cut_short{refused="false"} 0.0' in metrics
    mover(app, "b").run()
    assert listed().endswith(OF_A)
    with app.state.shards.home.connect() as conn:
        assert moves_under_way(conn) == []
