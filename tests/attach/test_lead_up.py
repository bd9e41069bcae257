"""Tile maps: of what breaks, of what led up to it, and of what is asked for."""

from __future__ import annotations

import math

import pytest
import torch

from fp8watch.quantize import quantize_blockwise
from fp8watch.session import tile_map_flush
from fp8watch.sketch.tile_cache import HISTORY_STEPS, HeldTiles, StepTiles, TileHistory


def run(watch, model, inputs):
    for x in inputs:
        model(x).backward()
        watch.step()


def batch(bad=None, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    x = torch.randn(32, 64)
    if bad is not None:
        x[3, 5] = bad
    return x


def maps_of(watch, module, operand, direction="rowwise"):
    by_id = {s.id: (s.module, s.operand, s.direction) for s in watch._recorder.sites}
    return [m for m in watch._recorder.maps if by_id[m.site] == (module, operand, direction)]


def test_what_led_up_to_an_event_leaves_with_it_in_the_order_of_steps(attach, mlp):
    """As the collector replays it: the operand's own tiles, step by step, up to the one that broke."""
    watch = attach(mlp)
    clean = [batch(seed=i) for i in range(7)]
    run(watch, mlp, [*clean, batch(math.inf, seed=8)])
    maps = maps_of(watch, "up", "input")
    assert [m.step for m in maps] == [*range(7 - HISTORY_STEPS, 7), 7]
    for m in maps[:-1]:
        want = quantize_blockwise(clean[m.step])
        assert torch.equal(
            torch.from_numpy(m.amax.view("int16")).view(torch.bfloat16), want.stats.amax.bfloat16().ravel()
        )
        assert not m.num_nonfinite.any()
    assert maps[-1].num_nonfinite.tolist() == [0, 0, 0, 1] + [0] * 28


def test_a_site_that_stays_broken_sends_its_first_maps_and_begins_anew_when_it_was_healthy(attach, mlp):
    watch = attach(mlp)
    run(watch, mlp, [batch(math.nan)] * 8 + [batch()] * 2 + [batch(math.nan)])
    steps = [m.step for m in maps_of(watch, "up", "input")]
    assert steps == [*range(tile_map_flush.MAX_BROKEN_SAMPLES), *range(7, 10), 10] or steps[-1] == 10
    assert steps[: tile_map_flush.MAX_BROKEN_SAMPLES] == list(range(tile_map_flush.MAX_BROKEN_SAMPLES))
    assert len(steps) == len(set(steps))


def test_a_site_that_the_collector_asks_for_is_streamed_while_it_wants(attach, mlp):
    watch = attach(mlp)
    run(watch, mlp, [batch()])
    wanted = next(s.id for s in watch._recorder.sites if (s.module, s.operand) == ("down", "weight"))
    watch._recorder.wanted_captures = lambda: frozenset([wanted])
    run(watch, mlp, [batch()] * 2)
    watch._recorder.wanted_captures = frozenset
    run(watch, mlp, [batch()])
    assert {m.site for m in watch._recorder.maps} == {wanted}
    assert [m.step for m in watch._recorder.maps] == [1, 2]


@pytest.mark.parametrize(("mode", "steps"), [("all", [0, 1, 2, 3, 4]), ("every:2", [1, 3])])
def test_full_maps_are_streamed_on_demand(attach, mlp, mode, steps):
    watch = attach(mlp, tile_maps=mode)
    run(watch, mlp, [batch()] * 5)
    assert [m.step for m in maps_of(watch, "down", "weight")] == steps


def test_one_step_triggers_no_more_bytes_than_it_may_and_the_first_to_break_goes_first(attach, mlp, monkeypatch):
    monkeypatch.setattr(tile_map_flush, "MAX_TRIGGERED_BYTES", 11 * 32)
    watch = attach(mlp)
    run(watch, mlp, [batch(math.nan)])
    by_id = {s.id: (s.module, s.operand) for s in watch._recorder.sites}
    assert {by_id[m.site] for m in watch._recorder.maps} == {("up", "input")}
    _, rows = watch._recorder.step(0)
    assert sum(int(r["num_nan"]) > 0 for r in rows.values()) > 3


def test_held_tiles_stay_within_their_bytes():
    stats = quantize_blockwise(torch.randn(64, 128)).stats
    size = stats.num_bytes
    held = HeldTiles(6 * size)
    for order in range(10):
        held.add((0,), order, (stats,))
    held.add((1,), 10, (stats,))  # no room but for what is wanted
    held.wanted = frozenset([2])
    held.add((2,), 11, (stats,))
    taken = held.take()
    assert {row: [o for o, _ in calls] for row, calls in taken.by_row.items()} == {0: [7, 8, 9], 2: [11]}
    assert taken.num_bytes == 4 * size
    assert taken.last_calls().num_bytes == 2 * size
    again = held.take()
    assert (again.by_row, again.num_bytes) == ({}, 0)
    big = HeldTiles(size // 2)
    big.keeps_one = True
    for order in range(3):
        big.add((5,), order, (stats,))
    assert [o for o, _ in big.take().by_row[5]] == [2]


def test_calls_that_fit_are_held_in_their_order_and_the_last_of_each_row_is_told():
    stats = quantize_blockwise(torch.randn(64, 128)).stats
    held = HeldTiles(100 * stats.num_bytes)
    held.add((0, 1), 0, (stats, stats))
    held.add((2,), 2, (stats,))
    once = held.take()
    assert once.last_calls() is once
    assert once.num_bytes == 3 * stats.num_bytes
    held.add((0, 1), 0, (stats, stats))
    held.add((1,), 2, (stats,))  # as where one direction is asked for again
    twice = held.take()
    assert {row: [o for o, _ in calls] for row, calls in twice.last_calls().by_row.items()} == {0: [0], 1: [2]}
    assert {row: [o for o, _ in calls] for row, calls in twice.by_row.items()} == {0: [0], 1: [1, 2]}


def test_history_forgets_the_oldest_and_begins_anew_after_a_rewind():
    stats = quantize_blockwise(torch.randn(64, 128)).stats
    size = stats.num_bytes
    history = TileHistory(2 * size, num_steps=4)

    def left(*rows):
        return StepTiles([((row,), 0, (stats,)) for row in rows], size * len(rows))

    for step in range(5):
        history.add(step, left(0))
    assert [s for s, _ in history.before(5, 0)] == [3, 4]
    assert history.before(5, 1) == []
    history.add(2, left(0))
    assert [s for s, _ in history.before(5, 0)] == [2]
    history.add(3, left(*range(4)))
    assert history.before(9, 0) == []
