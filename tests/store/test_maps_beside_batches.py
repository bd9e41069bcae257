"""Tile maps and batches of one session that are committed at the same moment."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from store.kit import SITES, UP, Feed

from fp8watch_agent.record import TileMap
from fp8watch_agent.wire import decode_tile_maps, encode_tile_maps
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import tile_maps


@pytest.mark.parametrize("database_kind", ["postgresql"])  # on SQLite one writes after the other
def test_neither_waits_for_the_other_in_turn(feed: Feed) -> None:
    agent = feed.agent()
    feed.now += 60.0
    one = np.ones(1)
    of_site = TileMap(
        site=UP.id,
        step=1,
        shape=(1, 1),
        amax=one.astype(np.uint16),
        scale_inv=one.astype(np.float32),
        flags=one.astype(np.uint8),
        num_nonfinite=one.astype(np.uint16),
        num_underflow=one.astype(np.uint16),
    )
    maps = decode_tile_maps(encode_tile_maps("run-1", agent.session, 0, 1, [of_site]))
    batches, failed = threading.Thread(target=lambda: told(agent.body(SITES, [1]))), []

    def told(body: bytes) -> None:
        try:
            feed.commit(body, detected=False)
        except Exception as e:
            failed.append(e)

    def between(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT INTO tile_map_batch") and not batches.ident:
            batches.start()  # it locks the run, then waits for the session
            batches.join(1.0)

    sa.event.listen(feed.engine, "after_cursor_execute", between)
    with writing(feed.engine) as conn:
        assert tile_maps.commit_tile_maps(conn, maps, b"x" * 32, now=feed.now)
    sa.event.remove(feed.engine, "after_cursor_execute", between)
    assert batches.ident
    batches.join(20)
    assert not failed
