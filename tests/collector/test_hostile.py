"""Whatever is sent, the collector answers below 500, and what it took can still be read."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
import zstandard
from collector.kit import ZSTD, Agent, make_site, run_async

from fp8watch_agent.envelope import MAX_NAME_CHARS
from fp8watch_agent.record import TileMap
from fp8watch_agent.wire import (
    BATCH_CONTENT_TYPE,
    TILE_MAPS_CONTENT_TYPE,
    WireError,
    decode_batch,
    decode_tile_maps,
    encode_batch,
    encode_tile_maps,
)
from fp8watch_server.app import _detection
from fp8watch_server.db import schema as t
from fp8watch_server.pipeline.detect_worker import DetectWorker

SITES = [make_site("up", order=0), make_site("down", order=1)]
ABSURD = [0, 1, -1, 2, 1 << 31, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, 1.5, float("nan"), None, "", "x\0y", "\x7f"]
ABSURD += [{"a": float("inf"), "ended": float("nan")}, {"loss": [None, 1e308]}, ["b", None], "s" * 512, [], {}]
NUM_BODIES = {"sqlite": 10_000, "postgresql": 2_000}
REFUSED_SENT = 20
"""Of the bodies that the codec refuses one in so many goes the whole way; what it lets pass always does."""
NUM_REGISTRATIONS = 300
AT_ONCE = 64


async def call(app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> int:
    """One request straight into the application."""
    raw, _, query = path.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": raw,
        "raw_path": quote(raw, errors="surrogatepass").encode(),
    }
    scope |= {
        "query_string": quote(query, safe="=&", errors="surrogatepass").encode(),
        "root_path": "",
        "scheme": "http",
        "server": ("x", 80),
        "client": ("y", 1),
    }
    scope["headers"] = [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
    answer: list[Any] = []
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answer.append(message)

    await app(scope, receive, send)
    return int(answer[0]["status"])


def mutated(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[at] = rng.randrange(256)
        elif kind == 1 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 9)]
        else:
            del data[at + rng.randrange(64) :]
    return bytes(data)


def numbers_mutated(rng: random.Random, raw: bytes) -> bytes:
    """Well-formed, with absurd values in it: gets past the codec."""
    body = msgspec.msgpack.decode(raw)
    header = body["header"]
    for _ in range(rng.choice((1, 2))):
        name = rng.choice([*header, "health", "logs", "batch_ids"])
        header[name] = rng.choice(ABSURD)
    for name in list(body["columns"]):
        if rng.random() < 0.3:
            body["columns"][name] = rng.randbytes(len(body["columns"][name]))
    if rng.random() < 0.3:
        for name in ("loss", "grad_norm", "time", "present"):
            body["steps"][name] = rng.randbytes(len(body["steps"][name]))
    return msgspec.msgpack.encode(body)


def test_mutated_bodies_never_get_a_5xx_and_leave_a_readable_run(client: Any, app: Any, database_kind: str) -> None:
    agent = Agent(client).register(SITES)
    agent.send(SITES, [1, 2])
    rng = random.Random(8)
    inflate, deflate = zstandard.ZstdDecompressor().decompress, zstandard.ZstdCompressor(level=1).compress
    batch = agent.body(SITES, [3, 4], health={"dropped_x": 1.0}, logs={"aux": [1.0, None]})
    tiles = TileMap(
        site=SITES[0].id,
        step=3,
        shape=(2, 3),
        amax=np.arange(6, dtype=np.uint16),
        scale_inv=np.ones(6, dtype=np.float32),
        flags=np.zeros(6, dtype=np.uint8),
        num_nonfinite=np.ones(6, dtype=np.uint16),
        num_underflow=np.zeros(6, dtype=np.uint16),
    )
    maps = encode_tile_maps(agent.run, agent.session, 0, 5, [tiles])
    answers: dict[int, int] = {}

    accepted: set[bytes] = {agent.body(SITES, [1, 2], seq=1)}

    num_refused = 0

    async def one(i: int) -> None:
        nonlocal num_refused
        whole = i % 3 == 0
        if i % 4 == 3:
            path, kind = "/v1/tile-maps", TILE_MAPS_CONTENT_TYPE
            body = mutated(rng, maps) if whole else deflate(mutated(rng, inflate(maps)))
        else:
            path, kind = "/v1/batches", BATCH_CONTENT_TYPE
            change = numbers_mutated if i % 2 else mutated
            body = mutated(rng, batch) if whole else deflate(change(rng, inflate(batch)))
        try:
            (decode_tile_maps if kind == TILE_MAPS_CONTENT_TYPE else decode_batch)(body)
        except WireError:
            num_refused += 1
            if num_refused % REFUSED_SENT:
                return
        while (status := await call(app, "POST", path, body, {"Content-Type": kind, **ZSTD})) == 503:
            await asyncio.sleep(0.2)  # a busy machine
        answers[status] = answers.get(status, 0) + 1
        assert status < 500, (status, body.hex())
        if status == 200 and kind == BATCH_CONTENT_TYPE:
            accepted.add(body)

    async def storm() -> None:
        for start in range(0, NUM_BODIES[database_kind], AT_ONCE):  # together, as they come: they share their groups
            await asyncio.gather(*(one(i) for i in range(start, start + AT_ONCE)))
        for i in range(NUM_REGISTRATIONS):
            path, value = registration(rng, i)
            status = await call(app, "PUT", path, value, {"Content-Type": "application/json"})
            answers[status] = answers.get(status, 0) + 1
            assert status < 500, (status, path, value)

    run_async(storm())
    assert {200, 400, 409, 422, 424} <= set(answers), answers  # the storm reached every part

    with app.state.engine.connect() as conn:
        stored = {bytes(body) for body in conn.execute(sa.select(t.hot_batch.c.body)).scalars()}
    assert stored == accepted  # of what was refused nothing is there, and nothing else is
    print(f"{NUM_BODIES[database_kind]} bodies, {num_refused} refused by the codec; requests: {answers}")
    while app.state.worker.drain():
        pass
    run = "/api/v1/runs/run-1"
    paths = ["/metrics", "/api/v1/runs", run, f"{run}/sites", f"{run}/incidents", f"{run}/scalars?name=loss"]
    for site in SITES:
        paths += [f"{run}/sites/{site.id}/histogram", f"{run}/series?site={site.id}&field=tile_sqnr_db"]
    paths += [f"{run}/{q}?field={f}" for q in ("heatmap", "top") for f in ("amax_max", "underflow_ratio", "kurtosis")]
    for path in paths:
        assert client.get(path).status_code == 200, path


def registration(rng: random.Random, i: int) -> tuple[str, bytes]:
    session = {"rank": 0, "world_size": 1, "mesh": {"dp": 1}, "host": "h", "facts": {"a": 1, "b": 0.5}}
    sites = {"session": "a" * 32, "sites": [msgspec.to_builtins(SITES[0])]}
    choices: list[tuple[str, Any]] = [
        ("/v1/runs/run-1", {"name": "n", "world_size": 1}),
        ("/v1/runs/run-1/sessions/s", session),
        ("/v1/runs/run-1/sites", sites),
        (f"/v1/runs/r{i}\0", {}),
        (f"/v1/runs/{'é' * 300}{i}", {}),
    ]
    path, value = rng.choice(choices)
    raw = msgspec.json.encode(value)
    if rng.random() < 0.3:
        return path, raw.replace(b"1", rng.choice([b"1e400", b"9" * 40, b"-1", b"NaN", b'"\\ud800"', b"[" * 5000]))
    return path, mutated(rng, raw) if rng.random() < 0.8 else raw


def test_texts_that_no_database_holds_stop_nobody(client: Any, app: Any) -> None:
    """A NUL in the names of what a run logs, of its health and of its batches, and a name longer than an index takes."""
    rng = random.Random(10)
    hostile, other = Agent(client, run="hostile").register(SITES), Agent(client, run="other").register(SITES)
    hostile.patient = False
    long = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(8000))
    nan = [1.0] * 16 + [float("nan")]
    header, columns = hostile.batch(SITES, list(range(17)), logs={"x\0": nan, "x": [2.0] * 17, long: [3.0] * 17})
    header = msgspec.structs.replace(header, health={"dropped_\0": 1.0}, batch_ids=["b\0"] * 17)
    body = encode_batch(header, *columns)
    assert hostile.post(body).status_code == 200
    assert hostile.post(body).status_code == 200
    other.send(SITES, [0, 1], fields={"num_nan": [0, 0, 1, 1]})
    worker = DetectWorker(app.state.engine, _detection(app.state.settings), clock=lambda: time.time() + 60)
    while worker.drain():
        pass
    worker.tick()  # the other rank of each run is waited for no longer
    assert worker.num_failed_batches == 0
    with app.state.engine.connect() as conn:
        rows = conn.execute(sa.select(t.hot_batch.c.detected, t.hot_batch.c.detect_error)).all()
        found = dict(conn.execute(sa.select(t.incident.c.run_id, t.incident.c.title)).all())
        names = set(conn.execute(sa.select(t.logged.c.name)).scalars())
        batch_ids = set(conn.execute(sa.select(t.scalar.c.batch_id).where(t.scalar.c.run_id == "hostile")).scalars())
    assert [tuple(row) for row in rows] == [(t.BATCH_DETECTED, None)] * 2
    assert set(found) == {"hostile", "other"}
    assert "x\ufffd" in found["hostile"]
    assert names == {"x\ufffd", "x", long[:MAX_NAME_CHARS]}
    assert batch_ids == {"b\ufffd"}
    for path in ("/metrics", "/api/v1/runs/hostile", "/api/v1/runs/hostile/incidents"):
        assert client.get(path).status_code == 200, path


def test_queries_bear_hostile_parameters(client: Any, app: Any) -> None:
    Agent(client).register(SITES).send(SITES, [1])
    rng = random.Random(9)
    values = [
        "",
        "-1",
        "nan",
        "1e9",
        "9" * 30,
        "%00",
        "<script>",
        "' OR 1=1 --",
        "amax_max",
        "loss",
        "..%2f..",
        "\\u00e9",
    ]

    async def storm() -> None:
        for _ in range(150):
            tail = rng.choice(
                ["series", "top", "heatmap", "scalars", "incidents", "sites/1/histogram", "sites/x/tile-map"]
            )
            names = rng.sample(
                ["site", "field", "name", "from", "to", "points", "rank", "n", "cursor", "limit", "step"], 4
            )
            query = "&".join(f"{n}={rng.choice(values)}" for n in names)
            path = f"/api/v1/runs/{rng.choice(['run-1', 'none', rng.choice(values)])}/{tail}?{query}"
            assert await call(app, "GET", path) < 500, path

    run_async(storm())


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/runs/%00",
        "/runs/a%00b",
        "/api/v1/incidents/%00",
        "/api/v1/incidents?mode=%00",
        "/api/v1/compare?a=%00&b=x",
    ],
)
def test_a_nul_in_an_address_is_refused(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 400
