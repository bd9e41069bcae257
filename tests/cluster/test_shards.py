"""Runs on several databases: each lies on one of them, and everything finds it there."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
import zstandard
from collector.kit import Agent, Recorder, make_site, served
from support.database import fresh_database

from fp8watch_agent.joined import JOINED_CONTENT_TYPE, JOINED_PATH, join_bodies
from fp8watch_agent.peek import run_of
from fp8watch_agent.record import TileMap
from fp8watch_agent.wire import decompress, encode_tile_maps
from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.db.directory import Directory, ShardMixedUp, order_of
from fp8watch_server.settings import SettingError, Settings

SITES = [make_site("up", order=0), make_site("down", order=1)]
RUNS = [f"team/run-{i}" for i in range(8)]
TILES = TileMap(SITES[0].id, 1, (1, 2), *(np.ones(2, dtype=kind) for kind in ("u2", "f4", "u1", "u2", "u2")))
INFINITE = {"num_inf": [0] * 8 + [1, 0], "num_sentinel_tiles": [0] * 8 + [1, 0]}


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture
def urls(database_url: str, database_kind: str) -> Iterator[dict[str, str]]:
    """Home, and two shards."""
    with fresh_database(database_kind, migrated=False) as a, fresh_database(database_kind, migrated=False) as b:
        yield {"home": database_url, "a": a, "b": b}


def settings_of(urls: dict[str, str], names: str = "ab", **given: Any) -> Settings:
    return Settings(database_url=urls["home"], shards=" ".join(f"{name}={urls[name]}" for name in names), **given)


@pytest.fixture
def collector(urls: dict[str, str]) -> Iterator[Callable[..., tuple[Any, httpx.Client]]]:
    """Makes collectors without threads; `drain` does what these would."""
    opened: list[Any] = []

    def make(settings: Settings | None = None, detection: Any = None) -> tuple[Any, httpx.Client]:
        app = create_app(settings or settings_of(urls), detection=detection, dispatcher=lambda e, s: None)
        server = served(app)
        client = httpx.Client(base_url=server.__enter__(), timeout=20, trust_env=False)
        opened.append((app, server, client))
        return app, client

    yield make
    for app, server, client in opened:
        client.close()
        server.__exit__(None, None, None)
        for ingest in (app.state.ingest, *app.state.ingests.values()):
            ingest.stop()
        for engine in app.state.shards.engines():
            engine.dispose()


def drain(app: Any) -> None:
    """Detect on each database."""
    for station in app.state.stations.values():
        while station.worker.drain():
            pass
        station.worker.tick()
    assert app.state.worker.drain() == 0  # nothing lies at home


def send(client: httpx.Client, run: str, number: int = 1, steps: int = 5, **given: Any) -> Agent:
    agent = Agent(client, run=run, session=f"{number:032x}").register(SITES, name=run)
    agent.send(SITES, list(range(steps)), **given)
    return agent


def runs_in(url: str) -> set[str]:
    engine = make_engine(url)
    with engine.connect() as conn:
        found = set(conn.execute(sa.select(t.hot_batch.c.run_id)).scalars())
        assert found <= set(conn.execute(sa.select(t.run.c.run_id)).scalars())
    engine.dispose()
    return found


def items(client: httpx.Client, path: str, **query: Any) -> list[dict[str, Any]]:
    """All pages of a list."""
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = client.get(path, params={**query, **({"cursor": cursor} if cursor else {})})
        assert answer.status_code == 200, answer.text
        found += answer.json()["items"]
        cursor = answer.json()["next"]
    return found


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql"])
def test_each_run_lies_on_one_shard_and_all_are_listed(urls: dict[str, str], collector: Any) -> None:
    app, client = collector()
    for number, run in enumerate(RUNS):
        send(client, run, number, fields=INFINITE if number % 2 else None)
    lies_in = {name: runs_in(urls[name]) for name in urls}
    assert lies_in["home"] == set()
    assert lies_in["a"] | lies_in["b"] == set(RUNS)
    assert not lies_in["a"] & lies_in["b"]
    assert all(lies_in[order_of(run, "ab")[0]] >= {run} for run in RUNS)
    drain(app)
    assert [r["id"] for r in items(client, "/api/v1/runs", limit=3)] == RUNS[::-1]
    broken = items(client, "/api/v1/incidents", limit=1)
    assert Counter(i["run_id"] for i in broken) == Counter(RUNS[1::2])
    assert [i["opened_at"] for i in broken] == sorted((i["opened_at"] for i in broken), reverse=True)
    page = client.get("/").text
    assert all(page.count(f">{run}<") for run in RUNS)
    assert "4</strong> of 8 need you" in page
    inbox = client.get("/incidents").text
    assert "1</strong> of 1 cause needs you" in inbox  # one cause in four runs
    assert '<td class="n">4</td>' in inbox
    for incident in broken:
        assert client.get(f"/incidents/{incident['id']}").status_code == 200
        assert client.get(f"/incidents/{incident['id']}/report.html").status_code == 200
    for run in RUNS:
        path = f"/api/v1/runs/{run.replace('/', '%2F')}"
        assert client.get(path).json()["last_step"] == 4
        series = client.get(f"{path}/series", params={"field": "amax_max", "site": SITES[0].id})
        assert series.json()["values"] == [2.0] * 5, series.text
        for of in ("", f"/sites/{SITES[0].id}"):
            assert client.get(f"/runs/{run.replace('/', '%2F')}{of}").status_code == 200
    metrics = client.get("/metrics").text
    assert {f'fp8watch_run_step{{run="{run}"}} 4.0' for run in RUNS} <= set(metrics.splitlines())
    assert metrics.count("# TYPE fp8watch_run_step gauge") == 1
    assert {'fp8watch_shard_up{shard="a"} 1.0', 'fp8watch_shard_up{shard="b"} 1.0'} <= set(metrics.splitlines())
    with writing(app.state.shards.named("b")) as conn:
        conn.execute(sa.update(t.hot_batch).values(detected=t.BATCH_FAILED, detect_error="what broke there"))
    health = client.get("/collector").text
    assert f"The detectors broke on {len(lies_in['b'])} batches" in health
    assert health.count('title="what broke there"') == len(lies_in["b"])
    assert [f'<td class="n">{len(lies_in[name])}</td>' in health for name in "ab"] == [True, True]


def test_batches_that_a_relay_joins_and_tile_maps_go_to_the_shards_of_their_runs(
    urls: dict[str, str], collector: Any
) -> None:
    _, client = collector()
    agents = [Agent(client, run=run, session=f"{i:032x}").register(SITES) for i, run in enumerate(RUNS)]
    odd = agents[0].body(SITES, [1])
    plain = msgspec.msgpack.decode(decompress(odd))
    plain["header"] = dict(reversed(plain["header"].items()))  # as another encoder may write it
    turned = zstandard.compress(msgspec.msgpack.encode(dict(reversed(plain.items()))))
    bodies = [("", turned), *(("", agent.body(SITES, [1])) for agent in agents[1:])]
    answer = client.post(JOINED_PATH, content=join_bodies(bodies), headers={"Content-Type": JOINED_CONTENT_TYPE})
    assert [a["status"] for a in answer.json()["answers"]] == [200] * 8, answer.text
    for agent in agents:
        assert agent.post_maps([TILES], 7).status_code == 200
        kept = client.get(f"/api/v1{agent.path.removeprefix('/v1')}/sites/{SITES[0].id}/tile-map")
        assert kept.json()["step"] == 1, kept.text
    assert runs_in(urls["a"]) | runs_in(urls["b"]) == set(RUNS)
    assert not runs_in(urls["home"])
    unknown = Agent(client, run="nobody-knows-it")
    unknown.patient = False
    assert unknown.post(unknown.body(SITES, [1])).json()["error"] == "unknown-run"


@pytest.mark.parametrize(
    "run", ["r", "team/run-0", "é" * 512, "\N{GRINNING FACE}" * 512, "x" * 31, "x" * 32, "x" * 256]
)
def test_the_first_bytes_of_a_body_name_its_run(run: str) -> None:
    agent = Agent(None, run=run)
    body = agent.body(SITES, [1, 2], logs={"run": [1.0, 2.0]})
    assert run_of(body) == run
    assert run_of(encode_tile_maps(run, agent.session, 0, 1, [TILES])) == run
    assert {run_of(body[:cut]) for cut in range(len(body))} <= {None, run}
    rng = np.random.default_rng(0)
    for _ in range(300):  # whatever comes, nothing is raised
        broken = bytearray(decompress(body)[:200])
        broken[rng.integers(0, 40)] = rng.integers(0, 256)
        assert isinstance(run_of(zstandard.compress(bytes(broken))), str | None)


def test_runs_from_before_stay_at_home_and_a_further_shard_moves_none(urls: dict[str, str], collector: Any) -> None:
    _, client = collector(Settings(database_url=urls["home"]))
    old = send(client, "old")
    _, client = collector(settings_of(urls, "a"))
    old.client = client
    old.register(SITES).send(SITES, [5, 6])
    of_b = next(run for run in RUNS if order_of(run, "ab")[0] == "b")  # had there been a b
    on_a = send(client, of_b, 50)
    _, client = collector(settings_of(urls))
    on_a.client = client
    on_a.send(SITES, [5])  # as an agent that was registered before the collector was started
    on_a.register(SITES).send(SITES, [6])
    old.client = client
    old.send(SITES, [7])
    for number, run in enumerate(RUNS):
        send(client, run, number)
    assert runs_in(urls["home"]) == {"old"}
    assert "old" not in runs_in(urls["a"]) | runs_in(urls["b"])
    assert client.get("/api/v1/runs/old").json()["last_step"] == 7
    assert of_b in runs_in(urls["a"]) - runs_in(urls["b"])
    with_c = {run: order_of(run, "abc")[0] for run in map(str, range(999))}
    moved = {place for run, place in with_c.items() if place != order_of(run, "ab")[0]}
    assert moved == {"c"}
    assert all(280 < count < 390 for count in Counter(with_c.values()).values())


def test_collectors_that_place_a_run_at_once_agree(urls: dict[str, str]) -> None:
    engines = [make_engine(urls["home"]) for _ in range(6)]
    found: list[list[str]] = [[] for _ in engines]
    ready = threading.Barrier(len(engines))

    def place(i: int) -> None:
        directory = Directory(engines[i])
        for run in RUNS:
            ready.wait()
            found[i].append(directory.place(run, ["a", "b"] if i % 2 else ["b", "a"]))

    threads = [threading.Thread(target=place, args=(i,)) for i in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.dispose()
    assert found == [found[0]] * len(engines)


def test_what_is_said_of_all_runs_reaches_each_shard(urls: dict[str, str], collector: Any) -> None:
    app, client = collector()
    for number, run in enumerate(RUNS):
        send(client, run, number, fields=INFINITE)
    drain(app)
    incidents = items(client, "/api/v1/incidents")
    (cause,) = {i["cause_id"] for i in incidents}
    answer = client.post(f"/api/v1/causes/{cause}/ack", json={"by": "me"}).json()
    assert (answer["num_incidents"], answer["num_changed"]) == (8, 8)
    assert {i["status"] for i in items(client, "/api/v1/incidents")} == {"acknowledged"}
    one = client.post(f"/api/v1/incidents/{incidents[0]['id']}/resolve", json={"by": "me"})
    assert one.json()["status"] == "resolved"
    silence = client.post("/api/v1/silences", json={"duration_s": 60, "run_id": "team/*"}).json()
    assert [s["id"] for s in items(client, "/api/v1/silences")] == [silence["id"]]
    pages = [client.get(f"/incidents/{i['id']}").text for i in incidents]
    assert all("ilenced" in page for page in pages)
    assert client.delete(f"/api/v1/silences/{silence['id']}").status_code == 204
    assert items(client, "/api/v1/silences") == []
    a, b = (next(run for run in RUNS if order_of(run, "ab")[0] == name) for name in "ab")
    compared = client.get("/api/v1/compare", params={"a": a, "b": b})
    assert compared.json()["common"]["steps"] == 5, compared.text
    assert client.get("/compare", params={"a": a, "b": b}).status_code == 200
    gone = client.delete(f"/api/v1/runs/{a.replace('/', '%2F')}")
    assert gone.status_code == 204
    assert a not in runs_in(urls["a"])
    send(client, a, 99)
    assert a in runs_in(urls["a"])  # one that comes again is where it was


def test_databases_that_do_not_belong_together_are_refused(urls: dict[str, str], collector: Any) -> None:
    _, client = collector()
    for number, run in enumerate(RUNS):
        send(client, run, number)
    for wrong, why in (
        (Settings(database_url=urls["home"]), r"shards that FP8WATCH_SHARDS does not name: \{"),
        (settings_of(urls, "a"), r"does not name: \{'b': \d"),
        (settings_of({**urls, "a": urls["b"], "b": urls["a"]}), "is a shard named 'b'"),
        (settings_of({**urls, "home": urls["a"], "a": urls["home"]}), "is a shard of another directory"),
    ):
        with pytest.raises(ShardMixedUp, match=why):
            create_app(wrong, dispatcher=lambda e, s: None)


def test_each_shard_is_compacted_and_pruned(urls: dict[str, str], collector: Any) -> None:
    app, client = collector(settings_of(urls, keep_steps=256), Recorder().detection())
    runs = {name: next(run for run in RUNS if order_of(run, "ab")[0] == name) for name in "ab"}
    for number, run in enumerate(runs.values()):
        send(client, run, number, steps=512)
    drain(app)
    b, c = t.hot_batch.c, t.cell.c
    for name, run in runs.items():
        asked = {"field": "amax_max", "site": SITES[0].id, "from": 256}
        before = client.get(series_of(run), params=asked).json()
        compactor = app.state.stations[name].compactor
        compactor._cool_after_s = 0.0
        compactor._work()
        with app.state.shards.named(name).connect() as conn:
            assert conn.execute(sa.select(sa.func.count(b.body))).scalar_one() == 0
            cells = conn.execute(sa.select(c.run_id, c.step0, c.kept).order_by(c.step0)).all()
        assert [tuple(cell) for cell in cells] == [(run, 0, t.KEPT_SUMMARY), (run, 256, t.KEPT_DETAIL)]
        assert client.get(series_of(run), params=asked).json() == before


def series_of(run: str) -> str:
    return f"/api/v1/runs/{run.replace('/', '%2F')}/series"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"FP8WATCH_SHARDS": "sqlite:////tmp/a.db"}, "name=URL of one or more databases"),
        ({"FP8WATCH_SHARDS": "a=sqlite:////tmp/a.db a=sqlite:////tmp/b.db"}, "stands once"),
        ({"FP8WATCH_SHARDS": "A b=sqlite:////tmp/a.db"}, "small letters"),
        ({"FP8WATCH_SHARDS": "a=mysql://x/y"}, "sqlite and postgresql are known"),
        (
            {
                "FP8WATCH_SHARDS": "a=postgresql://u:secret-word@h/a b=sqlite:////tmp/b.db",
                "FP8WATCH_QUEUE": "nats://n:4222",
                "FP8WATCH_DATABASE_URL": "postgresql://h/x",
            },
            "shards b of FP8WATCH_SHARDS are SQLite",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(SettingError, match=re.escape(why)) as e:
        Settings.from_environ(given)
    assert "secret-word" not in str(e.value)


def test_a_password_of_a_shard_is_a_secret() -> None:
    settings = Settings.from_environ({"FP8WATCH_SHARDS": "a=postgresql://u:secret-word@h/a"})
    assert settings.shard_urls == {"a": "postgresql://u:secret-word@h/a"}
    assert "secret-word" in settings.secrets
    assert "secret-word" not in repr(settings)
