"""200 means committed: kill -9 under eight senders loses, tears and invents nothing, and counts nothing twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from collector.killing import Crew, Store, kill_under_load, num_kills_of, serve
from collector.kit import Recorder

from fp8watch_server.worker import DetectWorker

NUM_SENDERS = 8
ACKS_BETWEEN = 30


@pytest.fixture
def store(database_url: str) -> Any:
    made = Store(database_url)
    yield made
    made.close()


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.timeout(1200)
def test_kill_9_under_load(tmp_path: Path, database_url: str, store: Store, long: bool) -> None:
    crew, tally = kill_under_load(
        lambda url_of: Crew(NUM_SENDERS, 2, url_of),
        lambda: serve(tmp_path, database_url),
        store.stored,
        num_kills=num_kills_of(5, 60, long),
        acks_between=ACKS_BETWEEN,
        rng=random.Random(1),
    )
    store.check(crew.senders)
    worker = DetectWorker(store.engine, Recorder().detection())
    while worker.drain():
        pass
    store.check_totals()
    print(f"{tally}; acknowledged {sum(len(s.acked) for s in crew.senders)}")
    assert tally.num_unsure > 0, "the kills hit nobody"
    assert tally.share() >= 0.2, tally
