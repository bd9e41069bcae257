"""200 means committed: kill -9 under eight senders loses, tears and invents nothing, and counts nothing twice.

The many kills come in parts, each with a database of its own: what is looked at after each kill stays small, and no step
is old enough to become a block, so every body can be compared with what was sent.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from collector.killing import Crew, Store, kill_under_load, num_kills_of_part, serve
from collector.kit import Recorder
from support.counts import in_turn

from fp8watch_server.pipeline.detect_worker import DetectWorker

NUM_SENDERS = 8
ACKS_BETWEEN = 8
FEW, NUM_PARTS = 5, 10
RESTS_ON = "server/fp8watch_server/ingest", "server/fp8watch_server/store", "server/fp8watch_server/db"


@pytest.fixture
def store(database_url: str) -> Any:
    made = Store(database_url)
    yield made
    made.close()


@pytest.mark.parametrize("part", [0, *in_turn(range(1, NUM_PARTS + 1), pytest.mark.heavy(15, *RESTS_ON))])
@pytest.mark.timeout(600)
def test_kill_9_under_load(tmp_path: Path, database_url: str, store: Store, part: int) -> None:
    began = time.monotonic()
    crew, tally = kill_under_load(
        lambda url_of: Crew(NUM_SENDERS, 2, url_of),
        lambda: serve(tmp_path, database_url),
        store.keys,
        num_kills=num_kills_of_part(NUM_PARTS) if part else FEW,
        acks_between=ACKS_BETWEEN,
        rng=random.Random(part),
    )
    took_s = time.monotonic() - began
    store.check(crew.senders)
    worker = DetectWorker(store.engine, Recorder().detection())
    while worker.drain():
        pass
    store.check_totals()
    num_acked = sum(len(s.acked) for s in crew.senders)
    print(f"{tally}; {num_acked} acknowledged; {took_s / tally.num_kills:.2f} s a kill")
    assert tally.num_unsure > 0, "the kills hit nobody"
    assert tally.share() >= 0.2, tally
