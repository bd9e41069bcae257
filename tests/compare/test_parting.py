"""Where two sides part, on made-up losses and amax: both signs, and the sentence that is said of it."""

from __future__ import annotations

import numpy as np
import pytest

from fp8watch_server.compare import answer, fact_differences, words
from fp8watch_server.compare.first_difference import Parting, find
from fp8watch_server.compare.sides import Amax

OPERANDS = ("input", "weight", "input", "weight", "grad_output")
NAMES = ("a input", "a weight", "b input", "b weight", "b grad_output")
SCATTER = np.array([0.1, 0.0, 0.1, 0.0, 0.4])
NUM_STEPS = 200


class Pair:
    """Two sides of one training: the same weights; other data, unless they are twins."""

    def __init__(self, seed: int, *, twins: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.steps = np.arange(NUM_STEPS)
        fall = 2.0 + 3.0 * np.exp(-self.steps / 40)
        level = np.cumsum(np.full((5, NUM_STEPS), 0.002), axis=1)
        noise = [rng.standard_normal((5, NUM_STEPS)) * SCATTER[:, None] for _ in range(2)]
        batch = [0.05 * rng.standard_normal(NUM_STEPS) for _ in range(2)]
        if twins:
            noise[1], batch[1] = noise[0], batch[0]
        self.loss = [fall + b for b in batch]
        self.level = [level + n for n in noise]
        self.bad = [np.zeros((5, NUM_STEPS), bool) for _ in range(2)]
        self.measured = [np.ones((5, NUM_STEPS), bool) for _ in range(2)]

    def parting(self) -> Parting:
        amax = [Amax(np.where(b, np.nan, x), b, m) for x, b, m in zip(self.level, self.bad, self.measured, strict=True)]
        return find(self.steps, (self.loss[0], self.loss[1]), (amax[0], amax[1]), OPERANDS, from_the_start=True)

    def said(self) -> str:
        of = words.Compared(steps=self.steps.tolist(), num_sites=5, num_measured_sites=5, num_with_loss=NUM_STEPS)
        return words.sentence(self.parting(), of, NAMES)


@pytest.mark.parametrize("twins", [False, True])
def test_healthy_pairs_do_not_part(twins: bool) -> None:
    for seed in range(16):
        pair = Pair(seed, twins=twins)
        if twins and seed % 2:  # as FP8 and BF16: a little apart everywhere, and more from step to step
            rng = np.random.default_rng(1000 + seed)
            wander = np.cumsum(0.0004 * rng.standard_normal((5, NUM_STEPS)), axis=1)
            pair.level[1] = pair.level[1] + 0.01 * rng.standard_normal((5, NUM_STEPS)) + wander
            pair.loss[1] = pair.loss[1] * (1 + 0.0003 * rng.standard_normal(NUM_STEPS))
        assert pair.parting().step is None, (seed, pair.parting())
    assert "do not part" in Pair(0).said()
    assert (
        Pair(0, twins=True).said().startswith("They are identical to the last bit in loss and amax of 5 common sites")
    )


def test_the_first_site_in_the_order_of_execution_is_named() -> None:
    for seed in range(10):
        pair = Pair(seed)
        pair.level[1][2:, 120:] += 1.5  # what follows from it moves in the same step
        found = pair.parting()
        assert (found.step, found.sites[0], found.by) == (120, 2, "amax"), seed
        assert pair.said().startswith("They part at step 120, first in b input and")


def test_a_single_step_is_no_parting_and_one_that_is_far_out_is() -> None:
    pair = Pair(3)
    pair.level[1][0, 90] += 3.0
    assert pair.parting().step is None
    pair.level[1][0, 90] += 5.0
    assert (pair.parting().step, pair.parting().sites) == (90, (0,))


def test_what_is_not_finite_on_one_side_alone_is_a_parting_and_on_both_is_none() -> None:
    pair = Pair(4)
    pair.bad[1][4, 70] = True
    assert (pair.parting().step, pair.parting().sites, pair.parting().by) == (70, (4,), "nonfinite")
    pair.bad[0][4, 70] = True
    assert pair.parting().step is None
    pair.loss[0][150:] = np.nan
    assert (pair.parting().step, pair.parting().sites) == (150, ())
    assert "in the loss; no site that was compared left its band before" in pair.said()


def test_the_origin_lies_where_twins_first_differ_though_the_noise_hides_it_for_long() -> None:
    pair = Pair(5, twins=True)
    pair.level[1][3, 100:] += 0.002
    pair.loss[1][110:] += 1.0
    found = pair.parting()
    assert (found.identical, found.step, found.sites, found.seen_at) == (100, 100, (3,), 110)
    assert pair.said() == (
        "They are identical to the last bit before step 100, and part there, first in b weight. "
        "They leave the noise at step 110. The losses part from step 110 on."
    )


def test_twins_that_differ_by_a_bit_and_stay_together_do_not_part_and_are_not_called_identical() -> None:
    pair = Pair(6, twins=True)
    pair.level[1][0, 30:] += 1e-7
    assert pair.parting().step is None
    assert (
        "identical to the last bit before step 30, differ from there on, first in a input, and do not part"
        in pair.said()
    )


def test_rounding_long_before_is_not_the_origin() -> None:
    pair = Pair(7, twins=True)
    pair.level[1][0, 2:] += 1e-7
    pair.level[1][2, 150:] += 1.5
    found = pair.parting()
    assert (found.identical, found.step, found.sites) == (2, 150, (2,))


def test_a_loss_that_drifts_is_seen_though_no_step_leaves_the_band() -> None:
    for seed in range(10):
        pair = Pair(seed)
        pair.loss[1] = pair.loss[1] + np.where(pair.steps > 60, 0.12, 0.0)
        found = pair.parting()
        assert found.by == "drift", seed
        assert found.step is not None
        assert 60 < found.step < 130


def test_other_weights_at_the_start_are_said_and_their_amax_is_not_held_against_each_other() -> None:
    pair = Pair(8)
    pair.level[1][[1, 3]] += 0.3
    assert pair.parting().weights_differ == 2
    assert pair.parting().step is None
    assert pair.said().startswith("They do not start from the same weights (2 of 2 differ at their first step).")
    assert "amax is not held against the other's" in pair.said()


def test_a_gap_before_the_parting_is_said() -> None:
    pair = Pair(9)
    pair.level[1][2, 120:] += 3.0
    for side in pair.measured:
        side[:, :] = False
        side[:, ::8] = True
    assert pair.parting().step == 120
    assert "first in b input (measured on both sides at step 112 before, and not in between)" in pair.said()


def test_nothing_measured_is_nothing_said() -> None:
    found = Parting(step=4, by="amax", sites=(0,), seen_at=4)
    assert words.sentence(found, words.Compared(steps=[3, 4]), NAMES) == "They part at step 4, first in a input."
    assert words.sentence(Parting(), words.Compared(), ()) == "They have no step in common: nothing can be compared."
    of = words.Compared(steps=[3, 4], num_sites=5)
    assert "nothing can be said" in words.sentence(Parting(), of, NAMES)
    lines = " ".join(words.not_looked_at(of))
    assert "whether they saw the same data was not looked at" in lines
    assert "logged on both sides in 0 of 2 common steps" in lines
    assert "never measured in the same step on both sides: 5 of 5" in lines


def test_where_they_leave_the_noise_comes_before_the_step_back_to_which_a_site_was_out() -> None:
    found = Parting(step=89, by="amax", sites=(0,), seen_at=150)
    said = words.sentence(found, words.Compared(steps=[3, 4], num_with_loss=2), NAMES)
    assert said == (
        "They leave the noise at step 150; what was outside of its band longest until then is a input, from step 89 on. "
        "The losses do not part."
    )


def test_settings_come_before_what_follows_from_them() -> None:
    facts = [
        {"fact": f, "a": "1", "b": "2"} for f in ("recipe", "checkpoints", "input.tile", "torch version", "margin")
    ]
    told = [(f["fact"], f["follows"]) for f in fact_differences.settings_first(facts)]
    assert told == [
        ("recipe", False), ("torch version", False), ("checkpoints", True), ("input.tile", True), ("margin", True),
    ]  # fmt: skip
    alone = fact_differences.settings_first(facts[1:])  # of one recipe a margin is a setting
    assert [f["fact"] for f in alone if f["follows"]] == ["checkpoints"]


def test_of_a_site_that_both_have_in_another_direction_the_direction_is_named() -> None:
    def of(number: int, module: str, direction: str) -> dict[str, object]:
        return {"id": number, "module": module, "operand": "input", "direction": direction}

    sites = [of(1, "a", "rowwise"), of(2, "a", "columnwise"), of(3, "b", "rowwise")]
    assert answer._only(sites, [1]) == ["a input (columnwise)", "b input"]  # type: ignore[arg-type]
