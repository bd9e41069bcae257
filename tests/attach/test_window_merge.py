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


WINDOW = ("window_steps_back", "amax_steps_back")


def together(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of one site merged, without what is said of their steps."""
    merged, *more = (row.copy() for row in rows)
    for other in more:
        merge_rows(merged, other)
    return merged


def without_steps(record: np.ndarray) -> np.ndarray:
    """A record without what is said of its steps."""
    record = np.array([record])
    for name in WINDOW:
        record[name] = 0
    record["measured"] &= ~int(Measured.WINDOW)
    return record


def test_what_leaves_is_what_its_steps_had_together_and_says_which_they_are():
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 4, rank=1)
    waiting: dict[int, list[np.ndarray]] = {site: [] for site in range(SITES)}
    left = 0
    for step in range(40):
        rows = drawn(rng)
        before = rows.copy()
        for site in range(SITES):
            waiting[site].append(rows[site : site + 1].copy())
        leaving = merge.leaving(step, rows, np.ones(SITES, dtype=bool))
        assert rows.tobytes() == before.tobytes()
        assert not leaving.before.any()
        for site, record in zip(np.flatnonzero(leaving.now), leaving.records, strict=True):
            held = waiting[site]
            assert without_steps(record).tobytes() == together(held).tobytes()
            assert len(held) == 4 or step < 4
            assert record["window_steps_back"] == len(held) - 1
            largest = step - len(held) + 1 + int(np.argmax([row["amax_max"][0] for row in held]))
            assert step - record["amax_steps_back"] == largest
            assert bool(record["measured"] & int(Measured.WINDOW)) == (len(held) > 1)
            waiting[site] = []
            left += 1
    assert left == SITES * 10


NEW = 2  # the site that something is new at


def made_new(why: str, rows: np.ndarray, calm: np.ndarray) -> None:
    if why == "restless":
        calm[NEW] = False
    elif why == "clipped":
        rows["scale_ratio_max"][NEW] = 1.6
    else:
        rows["measured"][NEW] |= int(Measured.ENERGIES if why == "full" else Measured.HASH)


@pytest.mark.parametrize("why", ["restless", "full", "hashed", "clipped"])
def test_what_is_new_leaves_at_once_and_alone(why):
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 8)
    for step in range(1, 20):
        rows, calm = drawn(rng), np.ones(SITES, dtype=bool)
        new = step % 5 == 0
        if new:
            made_new(why, rows, calm)
        leaving = merge.leaving(step, rows, calm)
        if new:
            assert leaving.now[NEW]
            assert leaving.records[np.count_nonzero(leaving.now[:NEW])].tobytes() == rows[NEW].tobytes()
        assert np.count_nonzero(leaving.now) <= 2


@pytest.mark.parametrize("why", ["restless", "clipped"])
def test_what_leaves_its_band_takes_the_window_before_it_along_and_is_in_none(why):
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 8)
    held: list[np.ndarray] = []
    ended = 0
    for step in range(1, 40):
        rows, calm = drawn(rng), np.ones(SITES, dtype=bool)
        if new := step % 5 == 0:
            made_new(why, rows, calm)
        leaving = merge.leaving(step, rows, calm)
        assert np.flatnonzero(leaving.before).tolist() == ([NEW] if new and held else [])
        if leaving.before[NEW]:
            [window] = leaving.windows
            assert without_steps(window).tobytes() == together(held).tobytes()
            assert window["window_steps_back"] == len(held) - 1  # its last step is the one before this
            ended += 1
        if new:
            held = []
        else:
            held.append(rows[NEW : NEW + 1].copy())
        if leaving.now[NEW] and not new:
            record = leaving.records[np.count_nonzero(leaving.now[:NEW])]
            assert without_steps(record).tobytes() == together(held).tobytes()
            held = []
    assert ended >= 5


def test_full_statistics_of_a_calm_site_end_no_window():
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 8)
    for step in range(1, 20):
        rows, calm = drawn(rng), np.ones(SITES, dtype=bool)
        if step % 5 == 0:
            made_new("full", rows, calm)
        assert not merge.leaving(step, rows, calm).before.any()


def taken(merge: WindowMerge, rng: np.random.Generator, steps: range) -> None:
    for step in steps:
        merge.leaving(step, drawn(rng), np.ones(SITES, dtype=bool))


def test_a_step_in_which_something_broke_ends_every_window():
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 64)
    taken(merge, rng, range(1, 5))
    rows = drawn(rng)
    rows["measured"][0] = 0
    leaving = merge.leaving(5, rows, None)
    assert leaving.before.all(), "that of a site which was not measured as well"
    assert (leaving.windows["window_steps_back"] == 3).all()
    assert np.flatnonzero(~leaving.now).tolist() == [0]
    assert leaving.records.tobytes() == rows[1:].tobytes()
    assert not merge.rest()[0].any()


@pytest.mark.parametrize("step", [3, 4, 500])
def test_steps_that_do_not_follow_are_in_no_window_with_those_before(step):
    """Training went back, a step was done again, or steps are missing."""
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 64)
    taken(merge, rng, range(1, 5))
    leaving = merge.leaving(step, drawn(rng), np.ones(SITES, dtype=bool))
    assert leaving.before.all()
    assert (leaving.windows["window_steps_back"] == 3).all()


@pytest.mark.parametrize("apart", [2, 10, 100])
def test_steps_that_are_numbered_further_apart_leave_too(apart):
    rng, merge, seen = np.random.default_rng(0), WindowMerge(SITES, 8), np.zeros(SITES, dtype=int)
    for step in range(0, 40 * apart, apart):
        leaving = merge.leaving(step, drawn(rng), np.ones(SITES, dtype=bool))
        assert step <= apart or not leaving.before.any()  # how far they are apart, the second step tells
        assert (leaving.records["window_steps_back"] < 8).all()
        seen += leaving.now
    assert (seen >= 40 * min(apart, 8) // 8 - 2).all()


def test_a_site_that_was_not_called_holds_nothing_back():
    rng, merge = np.random.default_rng(0), WindowMerge(SITES, 4)
    seen = 0
    for step in range(1, 13):
        rows = drawn(rng)
        rows[3] = empty_rows(1)[0]
        leaves = merge.leaving(step, rows, np.ones(SITES, dtype=bool)).now
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
    assert {int(row["num_calls"]) for row in rows.values()} == {1}
    header, before = watch._recorder.step(-2)
    assert header["step"] == 59
    assert set(before) == everything  # what was held back left with it, as records of the step before
    assert {int(row["window_steps_back"]) + 1 for row in before.values()} == {1, 2, 3, 4}
    assert all(row["num_calls"] == row["window_steps_back"] + 1 for row in before.values())
    assert watch._recorder.facts["merge_steps"] == 4
    assert not watch.guard.errors


def test_the_last_steps_of_a_watch_leave_at_its_end_and_what_was_paused_is_in_no_window(attach, mlp, monkeypatch):
    monkeypatch.setenv("FP8WATCH_MERGE_STEPS", "64")
    watch = attach(mlp, overhead_budget=None, every=1 << 20, hash_every=0, probes=[])
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-6)
    x = torch.randn(32, 64)

    def steps(num):
        for _ in range(num):
            optimizer.zero_grad()
            mlp(x).backward()
            optimizer.step()

    steps(40)
    recorder = watch._recorder
    everything, calls = set(recorder.step(0)[1]), []
    watch.pause()
    steps(3)
    watch.resume()
    calls.append({int(row["num_calls"]) for row in recorder.step(-1)[1].values()})
    steps(5)
    watch.detach()
    header, last = recorder.step(-1)
    assert header["step"] == 47
    assert set(last) == everything
    sums = dict.fromkeys(everything, 0)
    for i in range(len(recorder.steps)):
        for site, row in recorder.step(i)[1].items():
            sums[site] += int(row["num_calls"])
            assert row["window_steps_back"] + 1 == row["num_calls"]
    assert set(sums.values()) == {45}
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
