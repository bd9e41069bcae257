"""What enters the model: batches that come again, labels beside their tokens, padding; weights that updates do not reach."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.batch_names import CONCENTRATION, HASH, MASK, SHIFTS, TARGETS
from fp8watch_agent.record import Measured, StepStatus
from fp8watch_server.detect.modes.bad_batch.repeated import RepeatedBatches
from fp8watch_server.incidents.explain import explain

AT, STEPS = 80, 112


class Of:
    """As much of a context as is asked."""

    def __init__(self, step: int) -> None:
        self.now = SimpleNamespace(step=step)
        self.limit = SimpleNamespace(repeated_steps=3)


def made(seed: int = 3, recipe: str = "blockwise") -> Trace:
    t = healthy(seed, STEPS, 1, recipe=recipe, power_2_scale=recipe == "blockwise")
    rng = np.random.default_rng(seed)
    t.logs[HASH] = rng.integers(0, 1 << 52, STEPS).astype(np.float64)
    for shift, name in SHIFTS.items():
        t.logs[name] = np.ones(STEPS) if shift == 1 else rng.uniform(0.02, 0.06, STEPS)
    t.logs[MASK] = rng.normal(0.83, 0.04, STEPS)
    t.logs[CONCENTRATION] = 0.06 * np.exp(rng.normal(0, 0.06, STEPS))
    return t


def incidents(t: Trace) -> list[Folded]:
    return fold(play(Case([t], AT)), t.facts)


def the_one(t: Trace) -> tuple[Folded, str, str]:
    [incident] = incidents(t)
    told = explain(incident.named, t.facts)
    assert incident.named.verdict == "shared"
    assert "FP8 is not the cause" in told.cause
    assert told.fix
    return incident, told.title, told.cause


def test_healthy_batches_are_silent() -> None:
    assert incidents(made()) == []


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_batches_that_come_again_are_told_within_three_steps(lag: int) -> None:
    t = made()
    t.logs[HASH][AT:] = np.resize(t.logs[HASH][AT - lag : AT], STEPS - AT)
    incident, title, _ = the_one(t)
    assert (incident.mode, incident.severity, incident.first.onset) == (
        "bad-batch",
        "warning" if lag == 1 else "info",
        AT,
    )
    assert incident.first.step == AT + 2
    assert title.startswith("The same batch again and again" if lag == 1 else f"The same {lag} batches in turn")
    assert incident.last_step > AT + 24, "it lasts"


def test_a_small_data_set_that_goes_round_and_one_that_is_drawn_from_are_silent() -> None:
    t = made()
    t.logs[HASH] = np.resize(t.logs[HASH][:40], STEPS)
    assert incidents(t) == []
    t.logs[HASH] = made().logs[HASH][np.random.default_rng(0).integers(0, 60, STEPS)]
    assert incidents(t) == []
    t = made()
    t.logs[HASH][AT:] = t.logs[HASH][AT - 60 + np.random.default_rng(0).permutation(60)[: STEPS - AT]]
    assert incidents(t) == [], "replayed out of order, as from a buffer"
    t.logs[HASH][:] = 7.0
    assert incidents(t) == [], "one batch from the first step on is meant"


def test_inner_epochs_over_each_batch_are_meant_and_a_longer_repetition_is_told() -> None:
    """PPO and GRPO go over each batch several times."""
    t = made()
    t.logs[HASH] = np.repeat(made().logs[HASH], 4)[:STEPS]
    t.logs[HASH][:60] = np.repeat(made(4).logs[HASH], 2)[:60]
    t.logs[HASH][:16] = np.repeat(made(5).logs[HASH], 4)[:16]
    assert incidents(t) == []
    t.logs[HASH][AT:] = t.logs[HASH][AT]
    incident, title, _ = the_one(t)
    assert (incident.severity, incident.first.onset) == ("warning", AT + 1)
    assert incident.first.step == AT + 7, "twice as long as those before"
    assert title.startswith("The same batch again and again")


def test_a_repetition_that_begins_out_of_step_is_told_as_early() -> None:
    """Two batches at the distance that the first had, one at another, and from there on three in turn."""
    t = made()
    t.logs[HASH][AT:] = np.resize(t.logs[HASH][[AT - 2, AT - 1, AT - 3]], STEPS - AT)
    [incident] = incidents(t)
    assert (incident.first.onset, incident.first.step) == (AT, AT + 5)


def test_a_loader_that_hangs_after_a_resume_is_told_at_once() -> None:
    detector, kept = RepeatedBatches(), made().logs[HASH]
    assert kept is not None
    told = []
    for step in range(AT):
        if step == AT - 8:
            detector.resume()
        value = kept[min(step, AT - 5)]
        if detector._repeats(Of(step), 0, int(value)):  # type: ignore[arg-type]
            told.append(step)
    assert told == [AT - 2, AT - 1]


def test_a_loader_that_hangs_twice_is_told_twice() -> None:
    t = made()
    for at in (AT, AT + 20):
        t.logs[HASH][at : at + 4] = t.logs[HASH][at - 1]
    assert [i.first.onset for i in incidents(t)] == [AT, AT + 20]


def test_classes_of_small_batches_scatter_in_silence() -> None:
    """32 labels of ten classes: Σ p² is skewed, and a median of deviations makes it look narrow."""
    for seed in (95, 205, 268, 309):
        t = made(seed)
        classes = np.random.default_rng(seed).multinomial(32, np.full(10, 0.1), STEPS) / 32
        t.logs[TARGETS] = (classes**2).sum(axis=1)
        assert incidents(t) == [], seed


def test_what_a_batch_is_made_of_counts_once_where_it_is_used_several_times() -> None:
    t = made()
    t.logs[HASH] = np.repeat(made().logs[HASH], 4)[:STEPS]
    t.logs[CONCENTRATION][AT : AT + 4] = 0.09  # one batch, and the same four times
    assert incidents(t) == []


@pytest.mark.parametrize("share", [0.15, 0.6])
def test_labels_that_are_shifted_twice_are_told_in_their_step(share: float) -> None:
    t = made()
    t.logs[SHIFTS[1]][AT:] -= share
    t.logs[SHIFTS[2]][AT:] += share
    incident, title, _ = the_one(t)
    assert (incident.mode, incident.severity) == ("bad-batch", "warning")
    assert (incident.first.step, incident.first.onset) == (AT, AT)
    assert "of the labels are shifted by +1 since step 80" in title


def test_labels_drawn_at_random_are_told_and_those_that_always_varied_need_three_steps() -> None:
    t = made()
    t.logs[SHIFTS[1]][AT:] = 0.9
    t.logs[SHIFTS[-1]][AT:] += 0.03  # by chance: within what it was, or little more
    assert "10 % of the labels no longer follow from the tokens" in the_one(t)[1]
    t.logs[SHIFTS[1]] = np.random.default_rng(1).uniform(0.95, 0.99, STEPS)
    t.logs[SHIFTS[1]][AT] = 0.7
    assert incidents(t) == []
    t.logs[SHIFTS[1]][AT:] = 0.7
    incident, *_ = the_one(t)
    assert (incident.first.step, incident.first.onset) == (AT + 2, AT)


@pytest.mark.parametrize("data", ["repeated", "labels"])
def test_an_input_that_grows_is_no_matter_of_batches_that_come_again_or_labels_that_are_shifted(data: str) -> None:
    t = made()
    if data == "repeated":
        t.logs[HASH][AT:] = np.resize(t.logs[HASH][AT - 3 : AT], STEPS - AT)
    else:
        t.logs[SHIFTS[1]][AT:] -= 0.6
        t.logs[SHIFTS[2]][AT:] += 0.6
    octaves = 0.3 * np.clip(np.arange(STEPS) - AT - 8, 0, 12)
    t.grow(t.mask("mlp.down_proj", "input"), octaves)
    t.set_kurtosis(t.mask("mlp.down_proj", "input"), np.exp2(octaves))
    assert [i.mode for i in incidents(t)] == ["bad-batch", "outlier-growth"]


def test_a_mask_that_is_dropped_and_a_source_of_noise_are_information() -> None:
    t = made()
    t.logs[MASK][AT:] = 1.0
    incident, title, _ = the_one(t)
    assert (incident.mode, incident.severity) == ("bad-batch", "info")
    assert abs(incident.first.onset - AT) <= 1
    assert "The attention mask covers less since step" in title
    why = explain(incident.first, t.facts).cause
    assert f" and stood there up to step {incident.first.step}: " in why, "nothing is said of the steps behind it"
    t = made()
    t.logs[CONCENTRATION][AT:] *= 0.7
    assert "Tokens are more evenly spread" in the_one(t)[1]


def test_a_level_that_batches_come_back_to_is_told_twice_and_another_one_still() -> None:
    t = healthy(3, 330, 1)
    t.logs[MASK] = 0.98 - 0.04 * (np.arange(330) % 50 >= 36) + np.random.default_rng(3).normal(0, 0.002, 330)
    told = incidents(t)
    assert [i.first.onset // 50 for i in told] == [0, 1]
    t.logs[MASK][300:] = 0.6
    assert [i.first.onset for i in incidents(t)][2:] == [300]


@pytest.mark.parametrize(
    ("then", "title"),
    [
        (1.0, f"All targets are one class since step {AT}"),
        (0.35, "Targets are of fewer classes"),
        (0.05, "Targets are spread over more classes"),
    ],
)
def test_classes_that_become_fewer_or_more_are_told_with_their_step(then: float, title: str) -> None:
    t = made()
    t.logs[TARGETS] = 0.14 * np.exp(np.random.default_rng(5).normal(0, 0.1, STEPS))
    t.logs[TARGETS][AT:] = then
    incident, told, cause = the_one(t)
    assert incident.severity == "info"
    assert abs(incident.first.onset - AT) <= 1
    assert title in told
    assert "FP8 is not the cause" in cause


def stand(t: Trace, modules: tuple[str, ...]) -> None:
    for module in modules:
        hit = t.mask(module=module, operand="weight")
        t.columns["amax_min_nonzero"][:, hit] = 0.7 * t.columns["amax_max"][:, hit]  # of several tiles
        for name in ("amax_max", "amax_min_nonzero", "moment2", "moment4"):
            t.columns[name][AT:, hit] = t.columns[name][AT, hit]


def hashed(t: Trace, module: str, hashes: np.ndarray, every: int) -> None:
    """Hashes of one weight, one in so many steps."""
    hit = t.mask(module=module, operand="weight")
    t.columns.setdefault("weight_hash", np.zeros(t.columns["measured"].shape, dtype=np.int64))
    t.columns["weight_hash"][:, hit] = hashes[:, None]
    t.columns["measured"][np.ix_(np.arange(STEPS) % every == 1, hit)] |= int(Measured.HASH)


def test_weights_that_stand_still_are_named_while_the_others_move() -> None:
    t = made()
    stand(t, (t.sites[0].module,))
    incident, title, _ = the_one(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("dead-layer", "warning", AT)
    assert incident.first.step == AT + 4
    assert title == f"The weight of {t.sites[0].module} stands still since step 80: updates do not reach it"


def standing_hashes() -> np.ndarray:
    moves = np.random.default_rng(4).integers(-(1 << 62), 1 << 62, STEPS)
    return np.where(np.arange(STEPS) < AT, moves, moves[AT])


def one_tile(t: Trace, module: str) -> np.ndarray:
    hit = t.mask(module=module, operand="weight")
    t.columns["amax_min_nonzero"][:, hit] = t.columns["amax_max"][:, hit]
    return hit


@pytest.mark.parametrize("stands", [True, False])
def test_a_weight_of_one_tile_without_hashes_stands_where_all_sums_do(stands: bool) -> None:
    t = made()
    stand(t, (t.sites[0].module,))
    hit = one_tile(t, t.sites[0].module)
    if not stands:
        t.columns["moment4"][AT:, hit] *= 1 + 1e-3 * (np.arange(STEPS - AT) // 3)[:, None]
    told = [i for i in incidents(t) if i.mode == "dead-layer"]
    assert len(told) == stands
    if stands:
        assert (told[0].first.onset, told[0].first.step) == (AT, AT + 4)


@pytest.mark.parametrize("stands", [True, False])
def test_a_weight_of_one_tile_stands_where_its_hash_does(stands: bool) -> None:
    """Its sums stand, rounded as they travel, while a dead unit holds its largest element where it is."""
    t = made()
    module = t.sites[0].module
    stand(t, (module,))
    one_tile(t, module)
    moves = np.random.default_rng(4).integers(-(1 << 62), 1 << 62, STEPS)
    hashed(t, module, standing_hashes() if stands else moves, 8)
    told = [i for i in incidents(t) if i.mode == "dead-layer"]
    assert len(told) == stands
    if stands:
        assert (told[0].first.onset, told[0].first.step) == (AT, AT + 9), "the second hash since"


@pytest.mark.parametrize("moves", ["weight_hash", "moment2"])
def test_a_weight_that_moves_as_a_whole_does_not_stand(moves: str) -> None:
    t = made()
    module = t.sites[0].module
    stand(t, (module,))
    if moves == "weight_hash":
        hashed(t, module, np.arange(STEPS), 2)
    else:
        t.columns[moves][AT:, t.mask(module=module, operand="weight")] *= 1 + 1e-3 * np.arange(STEPS - AT)[:, None]
    assert incidents(t) == []


def test_a_weight_whose_updates_end_while_its_extremes_stand_is_told() -> None:
    t = made()
    module = t.sites[0].module
    stand(t, (module,))
    one_tile(t, module)
    hashes = np.random.default_rng(4).integers(-(1 << 62), 1 << 62, STEPS)
    hashes[AT + 12 :] = 7
    hashed(t, module, hashes, 4)
    [incident] = incidents(t)
    assert incident.first.step == AT + 17


def test_a_weight_of_one_tile_that_is_found_later_is_of_the_same_incident() -> None:
    t = made()
    first, later = t.sites[0].module, next(s.module for s in t.sites if s.module != t.sites[0].module)
    stand(t, (first, later))
    hit = one_tile(t, first)
    t.columns["moment2"][:, hit] = np.linspace(1, 2, STEPS)[:, None]
    t.columns["moment2"][AT + 8 :, hit] = 3.0
    [incident] = [i for i in incidents(t) if i.mode == "dead-layer"]
    assert incident.first.onset == AT
    assert later in explain(incident.named, t.facts).title


def test_what_is_frozen_skipped_or_without_a_learning_rate_stands_in_silence() -> None:
    t = made()
    stand(t, (t.sites[0].module,))
    wgrad = t.mask(module=t.sites[0].module, operand="grad_output", direction="columnwise")
    t.columns["measured"][AT:, wgrad] = 0
    assert incidents(t) == [], "no gradient of it is computed"
    t = made()
    stand(t, tuple({s.module for s in t.sites}))
    t.steps["lr"][AT:] = 0.0
    assert incidents(t) == []
    t.steps["lr"][:] = 2e-3
    t.steps["status"][AT:] = int(StepStatus.SKIPPED)
    assert [i for i in incidents(t) if i.mode == "dead-layer"] == []


def test_a_weight_that_is_unfrozen_stands_in_that_step_in_silence() -> None:
    t = made()
    module = t.sites[0].module
    stand(t, (module,))
    wgrad = t.mask(module=module, operand="grad_output", direction="columnwise")
    t.columns["measured"][AT - 1 : AT + 20, wgrad] = 0  # the look of step AT shows the update of the step before
    hit = t.mask(module=module, operand="weight")
    for name in ("amax_max", "amax_min_nonzero"):
        moves = np.exp2(np.random.default_rng(2).normal(0, 0.01, STEPS - AT - 21))
        t.columns[name][AT + 21 :, hit] = (t.columns[name][AT, hit] * moves[:, None]).astype(np.float32)
    assert incidents(t) == []


def test_a_weight_that_often_stands_is_silent() -> None:
    t = made()
    hit = t.mask(operand="weight")
    for name in ("amax_max", "amax_min_nonzero"):
        t.columns[name][1::3, hit] = t.columns[name][0:-1:3, hit]
    stand(t, (t.sites[0].module,))
    assert incidents(t) == []


def test_weights_of_sixteen_bits_may_stand() -> None:
    t = made()
    stand(t, (t.sites[0].module,))
    hit = t.mask(module=t.sites[0].module, operand="weight")
    for name in ("amax_max", "amax_min_nonzero"):
        bits = t.columns[name][AT:, hit].astype(np.float32).view(np.uint32)
        t.columns[name][AT:, hit] = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    assert incidents(t) == []


def test_where_one_operand_serves_both_gemms_it_is_information() -> None:
    t = made(recipe="current")
    stand(t, (t.sites[0].module,))
    [incident] = incidents(t)
    assert (incident.mode, incident.severity) == ("dead-layer", "info")
    assert "frozen, or updates do not reach " in explain(incident.named, t.facts).title


def test_a_norm_that_doubles_behind_the_backward_pass_is_told_apart() -> None:
    t = made()
    t.steps["grad_norm"] = np.exp2(np.random.default_rng(5).normal(0, 0.15, STEPS))
    t.steps["grad_norm"][AT:] *= 4.0
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("scalar-shift", "warning", AT)
    assert "and not by the backward pass" in explain(incident.named, t.facts).title
    gradients = t.mask(operand="grad_output")
    for name in ("amax_max", "amax_min_nonzero"):
        t.columns[name][AT:, gradients] *= 4.0
    [incident] = [i for i in incidents(t) if i.mode == "scalar-shift"]
    assert incident.severity == "info"
    assert "in the whole backward pass" in explain(incident.named, t.facts).title


def test_a_norm_that_moves_with_the_loss_is_not_laid_on_what_lies_behind() -> None:
    t = made()
    t.steps["grad_norm"] = np.exp2(np.random.default_rng(5).normal(0, 0.15, STEPS))
    t.steps["grad_norm"][AT:] *= 4.0
    t.steps["loss"][AT:] *= 1.3
    assert [i.mode for i in incidents(t)] == ["bad-batch"], "what moved the loss moved the norm"
    t.steps["loss"][AT:] *= 1.18 / 1.3
    [incident] = incidents(t)
    words = explain(incident.named, t.facts)
    assert incident.severity == "info"
    assert words.title.endswith("with the loss")
    assert "data changed" in words.cause
