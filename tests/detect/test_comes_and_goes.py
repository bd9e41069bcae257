"""An amax that a site came to before and went back from, as that of an expert without tokens for a while, is no outlier; one that was told is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.light import lightly
from detect.trace import Trace, healthy

from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.statistics import Statistics

FC2, IDLE = "layers.1.mlp.down_proj", -12.0
EARLY = (20, 25, 33, 34, 35, 40)
"""Steps of the warm-up in which it has tokens."""


def with_tokens(steps: Iterable[int], num_steps: int = 160, octaves: float = 0.0, **how: int) -> Trace:
    """One input is what a bias makes of empty slots, in all steps but these."""
    t = healthy(3, num_steps, **how)
    filled = np.isin(t.steps["step"], list(steps))
    t.grow(t.mask(FC2, "input"), np.where(filled, octaves, IDLE))
    return t


def told(*traces: Trace, cut: int | None = None, before: bool = False, each: int = 1) -> list[Folded]:
    """Incidents about that input.

    Args:
        cut: after this batch the engine is read back from a state.
        before: one of before these levels were kept.
        each: full samples come so often.
    """
    engine, found = DetectionEngine(traces[0].facts), []
    for i, batch in enumerate(b for t in traces for b in (t.batches() if each == 1 else lightly(t.batches(), each))):
        if i == cut:
            if before:
                del engine._statistics._base.came_to
            engine = DetectionEngine.load(engine.dump(), traces[0].facts)
        found += engine.observe(batch)
    return [i for i in fold(found, traces[0].facts) if i.mode == "outlier-growth"]


@pytest.mark.parametrize("last", [range(50, 70), range(140, 160), range(54, 57)], ids=["soon", "much-later", "briefly"])
def test_an_expert_that_gets_tokens_again_has_no_outlier(last: range) -> None:
    assert told(with_tokens([*EARLY, *range(43, 49), *last])) == []


def test_nor_has_it_where_each_second_step_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Statistics, "sample", lambda self, now, **_: now if self.num_steps % 2 == 0 else None)
    assert told(with_tokens([*EARLY, *range(43, 49), *range(140, 160)])) == []


@pytest.mark.parametrize("each", [1, 8])
def test_nor_does_its_input_grow(each: int) -> None:
    """Where full samples say that its kurtosis is another, and where most steps have none."""
    tokens = [*EARLY, *range(43, 49), *range(140, 160)]
    trace = with_tokens(tokens)
    trace.columns["moment4"][np.ix_(np.isin(trace.steps["step"], tokens), trace.mask(FC2, "input"))] *= 4.0
    assert told(trace, each=each) == []


def empty_until(step: int, octaves: float) -> Trace:
    """Its rows are all alike until then; the other layers have an input of the same name."""
    t = with_tokens(range(step, 160), octaves=octaves)
    before, one = t.steps["step"] < step, t.mask(FC2, "input")
    t.columns["amax_min_nonzero"][np.ix_(before, one)] = t.columns["amax_max"][np.ix_(before, one)]
    return t


def test_an_expert_that_gets_its_first_tokens_has_no_outlier_unless_it_is_above_the_others() -> None:
    assert told(empty_until(120, 0.0)) == []
    assert [i.first.onset for i in told(empty_until(120, 4.0))] == [120]


def test_empty_slots_that_leap_themselves_are_told() -> None:
    """A channel of what the bias makes is ×3000: all rows are alike still, and no larger than those of the others."""
    t, one = empty_until(120, 0.0), np.flatnonzero(healthy(3, 1).mask(FC2, "input"))
    t.columns["amax_min_nonzero"][:, one] = t.columns["amax_max"][:, one]
    assert [i.first.onset for i in told(t)] == [120]


def test_an_input_whose_rows_differ_has_no_empty_slots() -> None:
    t, one = with_tokens(range(120, 160)), np.flatnonzero(healthy(3, 1).mask(FC2, "input"))
    apart = np.where(t.steps["step"] < 120, 2.0, 8.0)[:, None]
    t.columns["amax_min_nonzero"][:, one] = t.columns["amax_max"][:, one] / apart
    assert [i.first.onset for i in told(t)] == [120]


def test_where_there_are_no_others_or_one_tile_the_first_tokens_are_told() -> None:
    alone = empty_until(120, 0.0)
    alone.sites = [replace(s, module="expert.down_proj") if s.module.endswith(FC2) else s for s in alone.sites]
    assert [i.first.onset for i in told(alone)] == [120]
    whole = empty_until(120, 0.0)
    whole.columns["num_tiles"][:, whole.mask(FC2, "input")] = 1
    assert [i.first.onset for i in told(whole)] == [120]


def test_what_it_came_to_goes_with_the_state_and_into_the_next_session() -> None:
    tokens = [*EARLY, *range(43, 49), *range(140, 160)]
    assert told(with_tokens(tokens), cut=15) == []
    first, second = with_tokens(tokens, 120), with_tokens(tokens, 40, first_step=120)
    first.session, second.session = f"{1:032x}", f"{2:032x}"
    assert told(first, second) == []


def test_a_state_of_before_knows_no_such_level() -> None:
    trace = with_tokens([*EARLY, *range(43, 49), *range(140, 160)])
    assert [i.first.onset for i in told(trace, cut=15, before=True)] == [140]


def test_what_is_higher_than_ever_before_is_told() -> None:
    trace = with_tokens([*EARLY, *range(43, 49), *range(54, 70)])
    trace.grow(trace.mask(FC2, "input"), np.where(trace.steps["step"] >= 56, 4.0, 0.0))
    assert [i.first.onset for i in told(trace)] == [56]


def test_what_leaped_once_or_twice_in_a_warm_up_is_no_level() -> None:
    assert [i.first.onset for i in told(with_tokens([30, 40, *range(120, 160)]))] == [120]


def test_growth_that_goes_on_is_no_level() -> None:
    """An outlier of the warm-up that has not come back since, and leaps once more behind it."""
    t = healthy(3, 160)
    t.grow(t.mask("mlp.down_proj", "input"), np.where(t.steps["step"] >= 44, 10.0, 0.0))
    assert [i.first.onset for i in told(t)] == [50]


@pytest.mark.parametrize("gap", [10, 60])
def test_an_outlier_that_comes_for_some_steps_and_comes_again_is_told_each_time(gap: int) -> None:
    t = healthy(3, 260)
    at = np.arange(260) - 100
    t.grow(t.mask(FC2, "input"), np.where((at >= 0) & (at % (gap + 5) < 5), 11.5, 0.0))
    got = told(t)
    assert got[0].first.onset == 100
    assert len(got) == (1 if gap == 10 else 3)  # after 20 quiet samples an incident is over
    assert got[-1].last_step >= 230


def test_a_loss_that_jumps_while_an_expert_gets_tokens_again_is_told() -> None:
    trace = with_tokens([*EARLY, *range(43, 49), *range(140, 160)])
    trace.steps["loss"][140:142] += 2.5
    trace.steps["grad_norm"][140:142] = 12.0
    engine = DetectionEngine(trace.facts)
    found = [f for b in trace.batches() for f in engine.observe(b)]
    assert "bad-batch" in {i.mode for i in fold(found, trace.facts)}


@pytest.mark.parametrize("layers", [("layers.1",), ("layers.0", "layers.1", "layers.2")], ids=["one", "all"])
def test_what_comes_and_goes_from_the_warm_up_on_is_an_outlier_in_one_layer_alone(layers: tuple[str, ...]) -> None:
    """Garbage in each fifth step is no expert: its like have nothing of it. Where all come to as much it is how they are."""
    t = healthy(3, 260)
    for layer in layers:
        t.grow(t.mask(f"{layer}.mlp.down_proj", "input"), np.where(t.steps["step"] % 5 == 0, 9.0, 0.0))
    got = told(t)
    assert bool(got) is (len(layers) == 1)
    if got:
        assert got[0].first.onset <= 65
        assert got[-1].last_step >= 250
