"""A sheet gives back what was put in, to the bit, whole or for some sites; and damage is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from store.filled_store import WINDOWS, fill
from store.kit import UP, Feed

from fp8watch_agent.column_words import expected_scale_inv
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import blocks, compact, queries, rank_merge, sheets
from fp8watch_server.store.block_codec import DamagedBlock
from fp8watch_server.store.compactor import Compactor
from fp8watch_server.store.records import Parts, default_of, dtype_of, size_of

STEP0 = 512


def made(rng: np.random.Generator, num_sites: int, *, even: bool) -> Parts:
    """Records of one source: every field, with what codecs trip over, and steps that differ from site to site."""
    ids = np.sort(rng.choice(1 << 53, num_sites, replace=False).astype(np.uint64))
    same = np.sort(rng.choice(256, 7, replace=False))
    steps = [same if even else np.sort(rng.choice(256, rng.integers(1, 9), replace=False)) for _ in ids]
    site, step = np.repeat(ids, [len(s) for s in steps]), STEP0 + np.concatenate(steps).astype(np.int64)
    n = len(site)
    columns: dict[str, Any] = {}
    for name in blocks.ROLLED_FIELDS:
        dtype, size = np.dtype(dtype_of(name)), size_of(name)
        shape = (n,) if size == 1 else (n, size)
        kind = rng.integers(4)
        if kind == 0 or dtype == np.uint8:  # noise in few of the lanes
            raw = rng.integers(0, 1 << 32, (*shape, 2), dtype=np.uint32).view(np.uint8)
            values = np.ascontiguousarray(raw.reshape(n, -1)[:, : dtype.itemsize * size]).view(dtype).reshape(shape)
            values = values * (rng.random(size) < 0.3) if dtype == np.uint8 else values
        elif kind == 1:
            values = np.full(shape, default_of(name))
        elif kind == 2:
            values = np.broadcast_to((site % np.uint64(9)).astype(np.int64).reshape(n, *[1] * (len(shape) - 1)), shape)
        else:
            values = rng.integers(-5, 5, shape) * 0.5 ** rng.integers(0, 30)
        columns[name] = values.astype(dtype)
        if dtype.kind == "f" and kind == 3:
            columns[name][rng.random(shape) < 0.2] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
    seq = step * 3 if even else rng.integers(0, 1 << 62, n)
    zeros = np.zeros(n, dtype=np.int64)
    return Parts(site, step, zeros + 4, zeros + 2, seq, columns)


def rows_of(parts: Parts) -> list[Any]:
    return [SimpleNamespace(**row, attempt=2, rank=4) for row in sheets.encode(parts, STEP0)]


def same(one: Parts, other: Parts) -> None:
    for name in ("site", "step", "rank", "attempt", "seq"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    for name, values in one.columns.items():
        assert values.tobytes() == other.columns[name].tobytes(), name


@pytest.mark.parametrize("even", [True, False])
def test_what_comes_out_is_what_went_in(even: bool) -> None:
    rng = np.random.default_rng(8)
    for num_sites in (1, 2, 31, 32, 33, 70):
        parts = made(rng, num_sites, even=even)
        rows = rows_of(parts)
        assert len(rows) == -(-num_sites // sheets.SITES_A_SHEET)
        same(parts, sheets.decode(rows, blocks.ROLLED_FIELDS, check=True))
        asked = rng.choice(np.unique(parts.site), min(3, num_sites), replace=False)
        some = sheets.decode(rows, blocks.ROLLED_FIELDS, sites=asked.tolist())
        same(parts.take(np.isin(parts.site, asked)), some)
        known = sheets.decode(rows, blocks.ROLLED_FIELDS, absent=False)
        same(Parts(*(getattr(parts, k) for k in ("site", "step", "rank", "attempt", "seq")), {}), known)


def test_damage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    (row,) = rows_of(made(rng, 5, even=False))
    for name in ("body", "histograms"):
        whole = getattr(row, name)
        for at in rng.choice(len(whole), 60, replace=False).tolist():
            for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]):
                setattr(row, name, damaged)
                with pytest.raises(DamagedBlock):
                    sheets.decode([row], blocks.ROLLED_FIELDS, check=True)
        setattr(row, name, whole)


def test_ranks_merge_alike_one_after_the_other_and_together() -> None:
    """The roll-up adds rank by rank, a query all that it has read: sums agree to the last bit."""
    rng = np.random.default_rng(10)
    whole = made(rng, 3, even=False)
    parts = whole.take(np.repeat(np.arange(len(whole)), 5))
    ranks = np.tile(np.arange(5), len(whole))
    keep = rng.random(len(parts)) < 0.8
    parts = Parts(parts.site, parts.step, ranks, parts.attempt, parts.seq, parts.columns).take(keep)
    for values in parts.columns.values():
        rng.shuffle(values)
    together = rank_merge.over_ranks(parts)
    places, slot = np.unique(parts.site * np.uint64(256) + (parts.step - STEP0).astype(np.uint64), return_inverse=True)
    merge = rank_merge.RankMerge(len(places))
    for rank in range(5):
        of_rank = parts.take(parts.rank == rank)
        merge.add(of_rank.columns, slot[parts.rank == rank])
    for name, values in merge.columns().items():
        assert values.tobytes() == together.columns[name].tobytes(), name


def test_a_cell_of_more_batches_than_a_round_takes_is_rolled_up_once(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(feed, 300, ranks=3, per_batch=10)
    before = feed.answers(windows=WINDOWS)
    monkeypatch.setattr(compact, "MAX_BATCHES", 30)
    done = feed.compact(everything=True)
    assert done.num_rolled_up == 2
    assert done.num_groups == 2 * 3, "a rank of a cell was taken in pieces"
    assert feed.answers(windows=WINDOWS) == before
    assert not Compactor(feed.engine, clock=lambda: feed.now + 1e6).round().anything


def test_a_scale_that_follows_its_amax_takes_no_room_though_not_all_do() -> None:
    rng = np.random.default_rng(11)
    site, step = np.repeat(np.arange(1, 9, dtype=np.uint64), 64), STEP0 + np.tile(np.arange(64), 8)
    zeros = np.zeros(len(site), dtype=np.int64)
    amax = np.exp2(rng.normal(0, 3, len(site))).astype(np.float32)
    scale = expected_scale_inv(amax.view(np.uint32)).view(np.float32).copy()
    scale[[7, 200, 311]] *= 2

    def encoded(columns: dict[str, Any]) -> tuple[Parts, int]:
        parts = Parts(site, step, zeros + 4, zeros + 2, zeros, columns)
        return parts, len(rows_of(parts)[0].body)

    whole, size = encoded({"amax_max": amax, "scale_inv_max": scale})
    same(whole, sheets.decode(rows_of(whole), ["amax_max", "scale_inv_max"], check=True))
    _, without = encoded({"amax_max": amax})
    assert size - without < len(site) / 4


def test_a_cell_of_more_than_a_thousand_sources_is_read_before_it_is_rolled_up(feed: Feed) -> None:
    for attempt in (1, 2):
        feed.send(feed.agent(attempt=attempt), list(range(100, 200)), fields={"amax_max": float(attempt)})
    feed.compact(everything=True)
    with writing(feed.engine) as conn:
        many = [[attempt, rank] for attempt in (1, 2) for rank in range(600)]
        conn.execute(sa.update(t.cell).values(sources=many, shown_attempt=None, shown_rank=None))
    with feed.engine.connect() as conn:
        chart = queries.series(conn, "run-1", UP.id, "amax_max")
    assert (chart["steps"], set(chart["values"])) == (list(range(100, 200)), {2.0})
