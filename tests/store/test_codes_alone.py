"""Where only codes were seen, what the cast did is absent from every answer, and never 0."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from store.kit import UP, Feed

from fp8watch_agent.record import FIELDS, Measured, TileMap, holds
from fp8watch_agent.wire import decode_tile_maps, encode_tile_maps
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import queries, registrations, tile_maps

LIGHT = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO)
STEPS = list(range(40))
KNOWN = {"num_nonfinite": 1.0, "amax_max": 3.0, "num_nan": 1.0}
UNKNOWN = ("underflow_ratio", "saturated_ratio", "num_underflow", "num_saturated", "num_inf", "num_sentinel_tiles")


def test_cast_is_without_codes() -> None:
    measured = np.array([LIGHT, LIGHT | int(Measured.CODES), int(Measured.AMAX), 0], dtype=np.int32)
    assert holds(measured, Measured.COUNTS | Measured.CAST).tolist() == [True, False, False, False]
    assert holds(measured, Measured.AMAX | Measured.CAST).tolist() == [True, False, True, False]
    assert holds(measured, Measured.COUNTS).tolist() == [True, True, False, False]
    assert holds(measured, Measured.COUNTS | Measured.CAST | Measured.HASH).tolist() == [False] * 4
    assert {f.name for f in FIELDS if f.group & Measured.CAST} == set(UNKNOWN) - {"underflow_ratio", "saturated_ratio"}


@pytest.mark.parametrize("compacted", [False, True])
def test_what_the_cast_did_is_absent_and_the_rest_is_there(feed: Feed, compacted: bool) -> None:
    """The first half of the steps was seen before the cast, the second half in codes alone."""
    of_codes = np.array(STEPS) >= 20
    fields = {
        "measured": np.where(of_codes, LIGHT | int(Measured.CODES), LIGHT),
        "amax_max": 3.0, "num_elements": 256, "num_nonzero": 200, "num_nan": 1, "num_tiles": 2,
    }  # fmt: skip
    feed.sites = [UP]
    feed.send(feed.agent(), STEPS, fields=fields)
    if compacted:
        assert feed.compact(everything=True).num_records == len(STEPS)
    with feed.engine.connect() as conn:
        for name in UNKNOWN:
            got = queries.series(conn, "run-1", UP.id, name, points=1000)
            seen = {step: value for step, value in zip(got["steps"], got["values"], strict=True) if value is not None}
            assert seen == dict.fromkeys(range(20), 0.0), name
        for name, value in KNOWN.items():
            assert queries.series(conn, "run-1", UP.id, name, points=1000)["values"] == [value] * len(STEPS), name
        if compacted and feed.engine.dialect.name == "postgresql":
            rows = conn.execute(
                sa.text(
                    "SELECT step FROM grafana.series('run-1', :site, 'underflow_ratio', 0, 39) WHERE value IS NOT NULL"
                ),
                {"site": UP.id},
            ).all()
            assert [row.step for row in rows] == list(range(20))


@pytest.mark.parametrize(
    ("evidence", "want"), [({"cast": "absent"}, None), ({"cast": "exact"}, 7), ({"all": "exact"}, 7)]
)
def test_a_tile_map_of_codes_alone_has_no_underflow(feed: Feed, evidence: dict[str, str], want: int | None) -> None:
    site = replace(UP, evidence=evidence)
    feed.sites = [site]
    agent = feed.agent()
    two = np.ones(2)
    made = TileMap(
        site.id, 3, (1, 2), two.astype(np.uint16), two.astype(np.float32), two.astype(np.uint8), two.astype(np.uint16),
        np.full(2, 7, np.uint16),
    )  # fmt: skip
    body = encode_tile_maps("run-1", agent.session, 0, 0, [made])
    with writing(feed.engine) as conn:
        registrations.register_sites(conn, "run-1", agent.session, [site], now=feed.now)
        tile_maps.commit_tile_maps(conn, decode_tile_maps(body), hashlib.sha256(body).digest(), now=feed.now)
    with feed.engine.connect() as conn:
        got = tile_maps.tile_map(conn, "run-1", site.id, 3)
    assert got is not None
    assert got["num_underflow"] == [want] * 2
    assert got["num_nonfinite"] == [1, 1]
