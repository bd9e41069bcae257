"""Rows that say nothing new share a record: what is merged is what the steps had together, and what is new leaves at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8watch.session.window_merge import MANY_RANKS, MERGE_STEPS, WindowMerge, steps_to_merge
from fp8watch_agent.record import FIELDS, Measured, empty_rows, merge_rows

SITES = 6
LIGHT = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO)


def drawn(rng: np.random.Generator) -> np.ndarray:
    """One step of SITES light rows."""
    rows = empty_rows(SITES)
    for f in FIELDS:
        if f.group & LIGHT and f.name != "measured":
            shape = (SITES,) if f.size == 1 else (SITES, f.size)
            rows[f.name] = rng.integers(0, 100, shape)
    rows["scale_ratio_max"] = rows["scale_ratio_min"] = 0.9
    rows["measured"] = LIGHT
    return rows


@pytest.mark.parametrize(
    ("asked", "ranks", "steps"),
    [(0, 1, 1), (0, MANY_RANKS - 1, 1), (0, MANY_RANKS, MERGE_STEPS), (3, 1, 3), (1, 10**5, 1)],
)
def test_it_is_for_many_ranks_unless_somebody_says_otherwise(asked, ranks, steps):
    assert steps_to_merge(asked, ranks) == steps


def test_what_leaves_is_what_its_steps_had_together():
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 4, rank=1)
    waiting: dict[int, list[np.ndarray]] = {site: [] for site in range(SITES)}
    left = 0
    for step in range(40):
        rows = drawn(rng)
        before = rows.copy()
        for site in range(SITES):
            waiting[site].append(rows[site : site + 1].copy())
        leaves, records = merge.leaving(step, rows, np.ones(SITES, dtype=bool))
        assert rows.tobytes() == before.tobytes()
        for site, record in zip(np.flatnonzero(leaves), records, strict=True):
            expected, *more = waiting[site]
            for other in more:
                merge_rows(expected, other)
            assert record.tobytes() == expected.tobytes()
            assert len(waiting[site]) == 4 or step < 4
            waiting[site] = []
            left += 1
    assert left == SITES * 10


@pytest.mark.parametrize("why", ["restless", "full", "hashed", "clipped"])
def test_what_is_new_leaves_at_once_and_alone(why):
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 8)
    for step in range(1, 20):
        rows, calm = drawn(rng), np.ones(SITES, dtype=bool)
        new = step % 5 == 0
        if new and why == "restless":
            calm[2] = False
        elif new and why == "clipped":
            rows["scale_ratio_max"][2] = 1.6
        elif new:
            rows["measured"][2] |= int(Measured.ENERGIES if why == "full" else Measured.HASH)
        leaves, records = merge.leaving(step, rows, calm)
        if new:
            assert leaves[2]
            assert records[np.count_nonzero(leaves[:2])].tobytes() == rows[2].tobytes()
        assert np.count_nonzero(leaves) <= 2


def test_a_site_that_was_not_called_holds_nothing_back():
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 4)
    seen = 0
    for step in range(1, 13):
        rows = drawn(rng)
        rows[3] = empty_rows(1)[0]
        leaves, _ = merge.leaving(step, rows, np.ones(SITES, dtype=bool))
        assert not leaves[3]
        seen += np.count_nonzero(leaves)
    assert seen == 3 * (SITES - 1)


def test_a_watch_of_many_ranks_sends_each_site_once_in_some_steps_and_a_nan_at_once(attach, mlp, monkeypatch):
    monkeypatch.setenv("FP8WATCH_MERGE_STEPS", "4")
    watch = attach(mlp, overhead_budget=None, every=1 << 20, hash_every=0, probes=[])
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-4)
    x = torch.randn(32, 64)
    sent, calls = [], []
    for step in range(60):
        optimizer.zero_grad()
        mlp(x).backward()
        optimizer.step()
        rows = watch._recorder.step(-1)[1]
        sent.append(set(rows))
        calls.append({site: int(row["num_calls"]) for site, row in rows.items()})
        assert watch._recorder.step(-1)[0]["step"] == step
    everything = sent[0]
    assert all(step == everything for step in sent[:15])
    late = sent[40:]
    assert all(sum(site in step for step in late) == 5 for site in everything)
    assert {n for step in calls[40:] for n in step.values()} == {4}
    broken = x.clone()
    broken[3, 5] = torch.nan
    optimizer.zero_grad()
    mlp(broken).backward()
    optimizer.step()
    rows = watch._recorder.step(-1)[1]
    assert sum(int(row["num_nan"]) > 0 for row in rows.values()) >= 2
    assert watch._recorder.facts["merge_steps"] == 4
    assert not watch.guard.errors


def test_after_a_jump_the_sites_that_jumped_send_all_and_the_others_do_not(attach, mlp, monkeypatch):
    monkeypatch.setenv("FP8WATCH_MERGE_STEPS", "16")
    watch = attach(mlp, overhead_budget=None, every=1 << 20, hash_every=0, probes=[])
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-6)
    x = torch.randn(32, 64)
    heavy = int(Measured.ENERGIES | Measured.GAIN)

    def step(scale: float) -> dict[tuple[str, str, str], int]:
        optimizer.zero_grad()
        mlp(x * scale).backward()
        optimizer.step()
        return {site: int(row["measured"]) & heavy for site, row in watch._recorder.step(-1)[1].items()}

    everything = set(step(1.0))
    for _ in range(40):
        step(1.0)
    jumped = {site for site in everything if site[:2] == ("up", "input")}
    assert jumped <= set(step(64.0))
    after = [step(1.0) for _ in range(10)]
    full = [{site for site, is_full in sent.items() if is_full} for sent in after]
    assert all(jumped <= sent for sent in full)
    assert all(sent < everything for sent in full)
    assert not watch.guard.errors
