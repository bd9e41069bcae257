"""Every answer of the ingest, and that 200 means what it says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
import zstandard
from collector.kit import ZSTD, Agent, make_site, on_sqlite

from fp8watch_agent.record import TileMap
from fp8watch_agent.wire import BATCH_CONTENT_TYPE, MAX_WIRE_BYTES
from fp8watch_server.db import schema as t
from fp8watch_server.http.db_timeout import AT_MOST_S

SITES = [make_site(order=0), make_site(direction="columnwise", order=1)]


def rows(app: Any, table: Any) -> list[Any]:
    with app.state.engine.connect() as conn:
        return list(conn.execute(sa.select(table)).all())


def everything(app: Any) -> dict[str, list[Any]]:
    return {name: rows(app, table) for name, table in t.metadata.tables.items()}


def assert_problem(answer: Any, status: int, *words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    assert problem["rule"]
    assert problem["remedy"]
    for word in words:
        assert word in problem["detail"], problem
    return problem


@pytest.fixture
def agent(client: Any) -> Agent:
    return Agent(client).register(SITES)


def test_a_batch_is_acknowledged_after_commit_and_stored_as_it_came(agent: Agent, app: Any) -> None:
    body = agent.body(SITES, [10, 11])
    answer = agent.post(body)
    assert answer.status_code == 200
    assert answer.json() == {"acked": 1, "captures": []}
    (stored,) = rows(app, t.hot_batch)
    assert bytes(stored.body) == body
    assert (stored.step_min, stored.step_max, stored.num_records) == (10, 11, 4)
    assert [r.step for r in rows(app, t.scalar)] == [10, 11]
    (run,) = rows(app, t.run)
    assert (run.last_step, run.num_batches, run.name) == (11, 1, "a run")


def test_a_fact_has_a_length(client: Any) -> None:
    agent = Agent(client, facts={"left_out": "a" * 65_537})
    assert agent.register_run().status_code == 200
    assert_problem(agent.register_session(), 422, "65536")
    agent.facts = {"facts": {"left_out": "a" * 65_536}}
    assert agent.register_session().status_code == 200


def test_the_same_batch_twice_changes_nothing(agent: Agent, app: Any) -> None:
    body = agent.body(SITES, [1, 2])
    agent.post(body)
    before = everything(app)
    again = agent.post(body)
    assert again.status_code == 200
    assert again.json()["acked"] == 1
    assert everything(app) == before


def test_another_body_under_a_key_that_is_taken_is_refused(agent: Agent, app: Any) -> None:
    agent.send(SITES, [1])
    before = everything(app)
    answer = agent.post(agent.body(SITES, [1], seq=1, scalars={"loss": [3.0]}))
    assert assert_problem(answer, 409)["error"] == "key-reused"
    assert everything(app) == before


def test_the_same_seq_of_another_session_is_new_data(agent: Agent, app: Any) -> None:
    agent.send(SITES, [1])
    other = Agent(agent.client, session="b" * 32).register(SITES)
    other.send(SITES, [1])
    assert sorted(r.attempt for r in rows(app, t.hot_batch)) == [1, 2]
    for one in (agent, other):  # and each is known again by its own
        assert one.post(one.body(SITES, [1], seq=1)).status_code == 200
    assert len(rows(app, t.hot_batch)) == 2


def test_an_unknown_run_session_or_site_asks_for_registration(client: Any, app: Any) -> None:
    agent = Agent(client)
    body = agent.body(SITES, [1])
    assert assert_problem(agent.post(body), 424)["error"] == "unknown-run"
    assert assert_problem(agent.register_session(), 424)["error"] == "unknown-run"
    agent.register_run()
    assert assert_problem(agent.post(body), 424)["error"] == "unknown-session"
    assert assert_problem(agent.register_sites(SITES), 424)["error"] == "unknown-session"
    agent.register_session()
    agent.register_sites(SITES[:1])
    problem = assert_problem(agent.post(body), 424)
    assert (problem["error"], problem["ids"]) == ("unknown-sites", [SITES[1].id])
    assert not rows(app, t.hot_batch)
    agent.register_sites(SITES)
    assert agent.post(body).status_code == 200


def repacked(body: bytes, change: Any) -> bytes:
    """The same batch with its msgpack map changed."""
    got = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(body))
    change(got)
    return zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(got))


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (lambda b: b["columns"].update(amax_max=b"123"), "amax_max"),
        (lambda b: b["columns"].update(nonsense=b""), "nonsense"),
        (lambda b: b["columns"].pop("site"), "site"),
        (lambda b: b["steps"].pop("loss"), "steps.loss"),
        (lambda b: b["steps"].update(status=b"\x09\x00"), "steps.status"),
        (lambda b: b["steps"].update(loss=b"123"), "steps.loss"),
        (lambda b: b["header"].update(version=99), "header"),
        (lambda b: b["header"].update(rank=1), "header"),
        (lambda b: b["header"].update(rank=1 << 40), "header"),
        (lambda b: b["header"].update(logs={"x": [1.0]}), "logs.x"),
    ],
)
def test_one_bad_column_refuses_the_whole_batch_and_is_named(agent: Agent, app: Any, change: Any, column: str) -> None:
    before = everything(app)
    problem = assert_problem(agent.post(repacked(agent.body(SITES, [1, 2]), change)), 422, column)
    assert problem["column"] == column
    assert everything(app) == before


def test_a_body_that_is_no_batch_is_refused(agent: Agent) -> None:
    good = agent.body(SITES, [1])
    for body in (
        b"",
        b"hello",
        good[: len(good) // 2],
        zstandard.compress(b"\xc1"),
        zstandard.compress(b"\x91" * 50_000),
    ):
        assert assert_problem(agent.post(body), 400)["column"] == "body"


def test_only_zstd_of_the_right_type_is_read(agent: Agent) -> None:
    body = agent.body(SITES, [1])
    assert_problem(agent.post(body, Content_Encoding="br"), 415, "br")
    assert_problem(agent.post(body, Content_Encoding=""), 415)
    assert_problem(agent.post(body, Content_Type="application/json"), 415, "application/json")
    assert_problem(agent.client.put(agent.path, content=b"{}", headers=ZSTD), 415)


def test_too_large_a_body_is_to_be_split(agent: Agent) -> None:
    assert_problem(agent.post(b"x" * (MAX_WIRE_BYTES + 1)), 413)

    def endless() -> Any:
        for _ in range(MAX_WIRE_BYTES // 65536 + 2):
            yield b"x" * 65536

    headers = {"Content-Type": BATCH_CONTENT_TYPE, **ZSTD}
    assert_problem(agent.client.post("/v1/batches", content=endless(), headers=headers), 413)


def test_a_bomb_is_refused(agent: Agent) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(b"\0" * (200 << 20))
    assert len(bomb) < 1 << 20
    assert_problem(agent.post(bomb), 413, "inflates")


def test_too_much_in_flight_is_told_to_come_back(agent: Agent, app: Any) -> None:
    app.state.ingest.stats.inflight_bytes = 128 << 20
    answer = agent.post(agent.body(SITES, [1]))
    assert_problem(answer, 429)
    assert float(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/runs/r", b"{", 400, "JSON"),
        ("/v1/runs/r", b'{"world_size": 0}', 422, "world_size"),
        ("/v1/runs/r", b'{"name": "a\\u0000b"}', 422, "NUL"),
        ("/v1/runs/r", b'{"name": "\xff"}', 400, "JSON"),
        ("/v1/runs/" + "r" * 513, b"{}", 422, "run"),
        ("/v1/runs/run-1/sessions/s", b"{}", 422, "rank"),
        ("/v1/runs/run-1/sessions/s", b'{"rank": -1}', 422, "rank"),
        ("/v1/runs/run-1/sites", b'{"session": "' + b"a" * 32 + b'", "sites": [{"id": 1}]}', 422, "sites"),
        ("/v1/runs/run-1/sites", b'{"session": "x", "sites": [', 400, "JSON"),
    ],
)
def test_a_bad_registration_is_refused(agent: Agent, path: str, body: bytes, status: int, word: str) -> None:
    assert_problem(agent.client.put(path, content=body), status, word)


@on_sqlite
def test_the_database_being_away_is_a_503_that_heals(agent: Agent, app: Any, tmp_path: Any) -> None:
    body = agent.body(SITES, [1])
    agent.patient = False
    with app.state.engine.connect() as conn:
        conn.exec_driver_sql("ROLLBACK")
        conn.exec_driver_sql("BEGIN EXCLUSIVE")
        answer = agent.post(body)
        assert_problem(answer, 503)
        assert answer.headers["retry-after"] == "1"
        assert answer.elapsed.total_seconds() < 0.8 * AT_MOST_S, "not as long as a database is ever waited for"
    agent.patient = True
    assert agent.post(body).status_code == 200


def test_tile_maps_are_stored_once_and_read_back(agent: Agent, app: Any) -> None:
    tiles = TileMap(
        site=SITES[0].id,
        step=4,
        shape=(2, 2),
        amax=np.array([0x3F80, 0x7F80, 0x7FC0, 0], dtype=np.uint16),  # 1, Inf, NaN, 0
        scale_inv=np.array([1, 0.5, np.inf, 2], dtype=np.float32),
        flags=np.array([0, 4, 1, 8], dtype=np.uint8),
        num_nonfinite=np.array([0, 1, 3, 0], dtype=np.uint16),
        num_underflow=np.zeros(4, dtype=np.uint16),
    )
    assert agent.post_maps([tiles], seq=1).json() == {"acked": 1}
    before = everything(app)
    assert agent.post_maps([tiles], seq=1).status_code == 200
    assert everything(app) == before
    other = TileMap(**{**tiles.__dict__, "step": 5})
    assert assert_problem(agent.post_maps([other], seq=1), 409)["error"] == "key-reused"
    unknown = TileMap(**{**tiles.__dict__, "site": 12345})
    assert assert_problem(agent.post_maps([unknown], seq=2), 424)["ids"] == [12345]
    got = agent.client.get(f"/api/v1/runs/run-1/sites/{SITES[0].id}/tile-map", params={"step": 4, "rank": 0}).json()
    assert got["shape"] == [2, 2]
    assert got["amax"] == [1, None, None, 0]
    assert got["nonfinite"] == [[1, "inf"], [2, "nan"]]
    assert got["scale_inv"] == [1, 0.5, None, 2]
    assert got["nonfinite_scale_inv"] == [[2, "inf"]]
    assert got["flags"] == [0, 4, 1, 8]
    assert got["steps_available"] == [4]
