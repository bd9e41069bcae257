"""Agents of every release that there was are understood: their very request bytes are taken, kept and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from agent.freeze import FROZEN, sample
from collector.kit import Agent, make_site
from support.agents import make_ids, make_maps

from fp8watch_agent.record import Site
from fp8watch_agent.wire import READS
from fp8watch_server.db import schema as t

RUN, SESSION, RANK = "run-1", "abc", 3
STEPS = [7, 8, 11]


def sites() -> list[Site]:
    """Those of the frozen bytes: their ids are older than what ids are made of today."""
    return [replace(make_site(f"layers.{i}"), id=int(id_)) for i, id_ in enumerate(make_ids(4))]


@pytest.fixture
def agent(client: Any) -> Agent:
    return Agent(client, run=RUN, session=SESSION, rank=RANK).register(sites())


def test_every_version_that_is_read_is_frozen() -> None:
    assert {int(path.name.removeprefix("batch-")) for path in FROZEN.glob("batch-?")} == set(READS)


@pytest.mark.parametrize("version", READS)
def test_a_batch_of_every_release_is_taken_kept_and_read(agent: Agent, app: Any, version: int) -> None:
    body = Path(FROZEN, f"batch-{version}").read_bytes()
    for _ in range(2):  # and again: an agent that was not answered sends the same
        answer = agent.post(body)
        assert (answer.status_code, answer.json()["acked"]) == (200, 5), answer.text
    with app.state.engine.connect() as conn:
        (row,) = conn.execute(t.hot_batch.select())
    assert bytes(row.body) == body
    _, (steps, _, ids, rows) = sample()
    for field in ("num_elements", "num_saturated"):
        series = agent.client.get(f"{agent.path.replace('/v1', '/api/v1')}/series?site={ids[0]}&field={field}").json()
        np.testing.assert_array_equal(series["values"], rows[field][[0, 4, 8]].astype(float))
        assert series["steps"] == STEPS == steps["step"].tolist()
    aux = agent.client.get(f"{agent.path.replace('/v1', '/api/v1')}/scalars?name=aux").json()
    assert (aux["steps"][-2:], aux["values"][-2:], aux["nonfinite"][-1][1]) == ([8, 11], [1.0, None], "inf")


def test_tile_maps_of_every_release_are_taken(agent: Agent, app: Any) -> None:
    for path in sorted(FROZEN.glob("maps-?")):
        headers = {"Content-Type": "application/vnd.fp8watch.tile-maps+msgpack", "Content-Encoding": "zstd"}
        answer = agent.client.post("/v1/tile-maps", content=path.read_bytes(), headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"acked": 6}), answer.text
    with app.state.engine.connect() as conn:
        assert {int(row.site) for row in conn.execute(t.tile_map.select())} == {m.site for m in make_maps(2)}


def test_a_release_to_come_is_told_to_wait_and_keeps_its_data(agent: Agent, app: Any) -> None:
    """A 4xx that names the remedy: the agent counts it, and nothing of it is stored."""
    raw = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(Path(FROZEN, "batch-2").read_bytes()))
    raw["header"]["version"] = max(READS) + 1
    answer = agent.post(zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(raw)))
    assert answer.status_code == 422
    assert "upgrade" in answer.text
    with app.state.engine.connect() as conn:
        assert conn.execute(t.hot_batch.select()).all() == []
