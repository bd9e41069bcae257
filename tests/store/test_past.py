"""What was compacted can be shown to detectors again, as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from store.kit import SITES, UP, Feed, made_up

from fp8watch_agent.record import FIELD_BY_NAME, HISTOGRAMS
from fp8watch_server.pipeline import engine_restore
from fp8watch_server.pipeline.replay import replay
from fp8watch_server.store import history
from fp8watch_server.store.block_codec import short_mantissa
from fp8watch_server.store.retention import DAY_S, Policy, prune

COLUMNS = ("amax_max", "signal_energy", "num_underflow", "num_nan", "amax_hist", "worst_tile", "measured")
TENANT = "default"


def said(feed: Feed) -> dict[str, Any]:
    """Everything that batches say, whatever batch it stands in."""
    out: dict[str, Any] = {}
    with feed.engine.connect() as conn:
        for old in history.batches(conn, "run-1", TENANT):
            h, batch = old.batch.header, old.batch
            assert (h.session[:16], h.rank) == (f"{old.rank:016x}", old.rank)
            assert (h.num_records, h.num_steps) == (len(batch.step), len(batch.steps))
            for i, row in enumerate(batch.steps):
                at = f"{old.attempt} {old.rank} {row['step']}"
                assert at not in out, "a step came twice"
                out[at] = row.tobytes()
                out[f"{at} id"] = h.batch_ids[i] if h.batch_ids else None
                for name, values in h.logs.items():
                    out[f"{at} {name}"] = repr(values[i])
            columns = {n: batch.sent.get(n) if n in HISTOGRAMS else batch.column(n) for n in COLUMNS}
            for name, values in columns.items():
                if values is None:
                    continue
                assert values.dtype == (np.uint8 if name in HISTOGRAMS else FIELD_BY_NAME[name].dtype)
                kept = short_mantissa(values) if values.dtype == np.float64 else values
                for site, step, value in zip(batch.site.tolist(), batch.step.tolist(), kept, strict=True):
                    out[f"{old.attempt} {old.rank} {step} {site} {name}"] = value.tobytes()
    return out


def fill(feed: Feed) -> None:
    rng = np.random.default_rng(5)
    for rank in (0, 1):
        agent = feed.agent(rank=rank)
        for first in range(0, 300, 30):
            steps = list(range(first, first + 30))
            loss = rng.normal(2, 1, 30)
            loss[3:6] = np.nan, np.inf, -np.inf
            logs: dict[str, list[float | None]] = {"aux": [None, float("nan"), *map(float, range(28))]}
            feed.send(agent, steps, fields=made_up(rng, 30, 3), scalars={"loss": list(loss)}, logs=logs)
    again = feed.agent(rank=0, attempt=2)
    feed.send(again, list(range(280, 320)), SITES[:2], fields=made_up(rng, 40, 2))


def test_blocks_say_what_the_batches_said(feed: Feed) -> None:
    fill(feed)
    before = said(feed)
    assert len(before) > 10_000
    feed.compact()
    assert said(feed) == before, "some in blocks, some hot, and one batch in both"
    feed.compact(everything=True)
    assert said(feed) == before


def test_ranks_take_turns(feed: Feed) -> None:
    fill(feed)
    feed.compact(everything=True)
    with feed.engine.connect() as conn:
        first = [(old.rank, int(old.batch.steps["step"][0])) for old in history.batches(conn, "run-1", TENANT)]
    newest = {0: 0, 1: 0}
    for rank, step in first:
        newest[rank] = max(newest[rank], step)
        assert abs(newest[0] - newest[1]) <= 2 * history.STEPS_A_PIECE or step >= 280
    assert len(first) == 2 * (32 + 6) + 5


def test_a_replay_finds_the_same_when_all_is_in_blocks(feed: Feed) -> None:
    for rank in (0, 1):
        agent = feed.agent(rank=rank)
        for step in range(0, 48, 16):
            bad = (np.arange(16) + step == 21) * (rank == 1)
            feed.send(agent, list(range(step, step + 16)), [UP], fields={"num_inf": bad.astype(int)})

    def found() -> tuple[list[tuple[Any, ...]], int | None, int]:
        with feed.engine.connect() as conn:
            got = replay(conn, "run-1")
        return (
            [(i["mode"], i["first_step"], i["place"]["ranks"]) for i in got.incidents],
            got.first_step,
            got.num_cells_left_out,
        )

    before = found()
    assert before == ([("inf-laundering", 21, [1])], 0, 0)
    feed.compact(everything=True)
    assert found() == before
    prune(feed.engine, Policy(), feed.now + 2e6 + DAY_S)
    assert found() == ([], None, 1), "what is kept of all ranks together is no rank"


class Sees:
    """An engine that remembers what it was shown."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def observe(self, batch: Any, at: float | None = None) -> None:
        self.steps += [(batch.header.rank, int(step)) for step in batch.steps["step"]]


@pytest.mark.parametrize("everything", [False, True])
def test_an_engine_is_built_up_again_from_blocks_where_hot_batches_are_too_few(
    feed: Feed, monkeypatch: pytest.MonkeyPatch, everything: bool
) -> None:
    monkeypatch.setattr(engine_restore, "REPLAY_SAMPLES", 100)
    for rank in (0, 1):
        agent = feed.agent(rank=rank)
        for first in range(0, 600, 60):
            feed.send(agent, list(range(first, first + 60)), [UP])
    hot = Sees()
    with feed.engine.connect() as conn:
        engine_restore.replay(conn, hot, "run-1", TENANT, 1 << 40)
    assert min(hot.steps) == (0, 480)
    feed.compact(everything=everything)
    after = Sees()
    with feed.engine.connect() as conn:
        engine_restore.replay(conn, after, "run-1", TENANT, 1 << 40)
    for rank in (0, 1):
        of_rank = [step for r, step in after.steps if r == rank]
        assert of_rank == list(range(of_rank[0], 600)), "each step once, in order"
        assert len(of_rank) >= 88  # the blocks of the last cell, or those and the hot steps behind them
