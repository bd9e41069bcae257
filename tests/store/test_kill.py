"""The compactor and retention are killed at every point where it could matter: nothing is lost, nothing comes twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store.filled_store import fill
from store.kit import SITES, Feed

from fp8watch_server.db import schema as t
from fp8watch_server.store import queries

HERE = Path(__file__)
COMPACT = [f"compact.{name}" for name in ("encoded", "claimed", "blocks", "released", "committed")]
ROLL_UP = [f"rollup.{name}" for name in ("encoded", "part", "shown", "committed")]
PRUNE = [f"prune.{name}" for name in ("marked", "source", "done")]


@pytest.fixture
def kill_at(feed: Feed, database_url: str) -> Iterator[Callable[[str], str]]:
    env_path = [str(HERE.parents[1]), str(HERE.parents[2] / "server"), str(HERE.parents[2] / "agent")]
    code = f"import sys; sys.path[:0] = {env_path!r}; from store.killed import main; main()"
    command = [sys.executable, "-c", code, database_url, str(feed.now + 1e6)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def kill(point: str) -> str:
            process.stdin.write(f"{point}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        yield kill
        process.stdin.close()
        process.wait(20)


def test_killed_anywhere_compaction_loses_nothing_and_doubles_nothing(
    feed: Feed, kill_at: Callable[[str], str]
) -> None:
    fill(feed, 300)
    want = {rank: feed.records(rank=rank) for rank in (None, 0, 1)}

    def changed() -> list[int | None]:
        """Ranks whose records are no longer what they were (pytest would explain `==` of the lists for minutes)."""
        return [rank for rank, records in want.items() if feed.records(rank=rank) != records]

    for point in [*COMPACT, *ROLL_UP]:
        assert kill_at(point) == "killed", f"{point} was never reached: the kill has proven nothing"
        assert changed() == [], point
    assert kill_at("nowhere") == "passed"
    assert changed() == []
    assert feed.count(t.hot_batch) == 0
    assert feed.count(t.sheet) == 2 * 3  # cells × (two ranks and their roll-up): no orphan is left
    assert feed.count(t.cell, t.cell.c.shown_rank.is_(None)) == 0


def test_killed_anywhere_retention_keeps_the_sums_that_it_promises(feed: Feed, kill_at: Callable[[str], str]) -> None:
    fill(feed, 600)
    assert kill_at("nowhere") == "passed"
    with feed.engine.connect() as conn:
        want = [queries.series(conn, "run-1", s.id, "num_underflow", 300) for s in SITES]
        top = queries.top(conn, "run-1", "num_nonfinite", 3, 0, 255)
        loss = queries.scalars(conn, "run-1", "loss")
    for point in PRUNE:
        assert kill_at(point) == "killed", point
        with feed.engine.connect() as conn:
            assert [queries.series(conn, "run-1", s.id, "num_underflow", 300) for s in SITES] == want, point
            assert queries.scalars(conn, "run-1", "loss") == loss, point
            assert queries.top(conn, "run-1", "num_nonfinite", 3, 0, 255) == top, point
    assert kill_at("prune.nowhere") == "passed"
    assert feed.count(t.sheet) == 2  # roll-ups of two cells; of the first only the summary is left
    assert feed.count(t.sheet, t.sheet.c.rank >= 0) == 0
    assert feed.count(t.block, t.block.c.step0 == 0) == 0
    with feed.engine.connect() as conn:
        assert queries.top(conn, "run-1", "num_nonfinite", 3, 0, 255) == top
        assert queries.series(conn, "run-1", SITES[0].id, "num_underflow", 0, 255)["steps"] == []
