"""A loss that jumps has a cause: the LR, an input that leaped, the data; what began first is no consequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.light import lightly
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.record import Measured
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import Explanation, explain

AT, STEPS = 120, 160
DETECT = "server/fp8watch_server/detect"
FC2 = "layers.1.mlp.down_proj"


def made(seed: int = 3) -> Trace:
    return healthy(seed, STEPS)


def loss_jumps(t: Trace, at: int, steps: int = STEPS) -> None:
    t.steps["loss"][at : at + steps] += 2.5
    t.steps["grad_norm"][at : at + steps] = 12.0


def leaps(t: Trace, at: int, octaves: float = 10.0) -> None:
    """One channel of one input is ×1000 from `at` on; its tile hides it from the kurtosis."""
    t.grow(t.mask(FC2, "input"), np.where(np.arange(t.num_steps) >= at, octaves, 0.0))


def unmeasured(t: Trace, *, but_each: int = 1 << 30) -> None:
    """Nothing but scalars leaves, except in some steps."""
    silent = np.arange(t.num_steps) % but_each != 0
    t.columns["measured"][silent & (np.arange(t.num_steps) >= AT - 8)] = 0


def found_in(t: Trace) -> list[Finding]:
    return play(Case([t], AT))


def incidents(t: Trace) -> list[Folded]:
    return fold(found_in(t), t.facts)


def said(t: Trace) -> Explanation:
    [incident] = incidents(t)
    return explain(incident.named, t.facts)


def test_a_learning_rate_that_leaps_right_before_the_loss_is_the_cause_though_no_weight_was_measured() -> None:
    t = made()
    t.steps["lr"][AT:] = 6e-2
    loss_jumps(t, AT + 1)
    unmeasured(t)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity) == ("optimizer-divergence", "critical")
    assert incident.first.onset == AT
    assert incident.first.verdict == "unknown"
    words = said(t)
    assert "LR 0.002 → 0.06" in words.title
    assert "not measured" in words.cause
    assert "0.002" in words.fix[0]["text"]


def test_a_learning_rate_that_leaps_for_one_step_and_healthy_quantisers_are_no_matter_of_fp8() -> None:
    t = made()
    t.steps["lr"][AT] = 6e-2
    loss_jumps(t, AT + 1, 2)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity) == ("optimizer-divergence", "warning")
    assert incident.first.verdict == "shared"
    assert incident.first.onset == AT


def test_a_learning_rate_that_leaped_long_before_is_not_blamed_for_a_batch() -> None:
    t = made()
    t.steps["lr"][AT - 30 :] = 6e-2
    loss_jumps(t, AT, 2)
    assert [i.mode for i in incidents(t)] == ["bad-batch"]


def test_of_a_learning_rate_that_leaps_twice_the_last_leap_is_named() -> None:
    t = made()
    t.steps["lr"][AT - 20 :] = 8e-3
    t.steps["lr"][AT:] = 8e-2
    loss_jumps(t, AT + 1)
    unmeasured(t)
    [incident] = incidents(t)
    assert (incident.mode, incident.first.onset) == ("optimizer-divergence", AT)
    assert "LR 0.008 → 0.08" in said(t).title


def test_a_loss_that_peaks_later_is_told_with_the_step_of_its_peak() -> None:
    t = made()
    loss_jumps(t, AT, 3)
    t.steps["loss"][AT + 2] += 40
    [incident] = incidents(t)
    [loss] = [e for e in incident.named.evidence if e.field == "loss"]
    assert (loss.value > 40, loss.since_step) == (True, AT + 2)


@pytest.mark.parametrize(("steps", "more", "severity"), [(1, 0.0, "info"), (3, 0.0, "warning"), (1, 3.0, "warning")])
def test_an_odd_batch_that_is_over_in_one_step_warns_nobody(steps: int, more: float, severity: str) -> None:
    t = made()
    loss_jumps(t, AT, steps)
    t.steps["loss"][AT] += more
    [incident] = incidents(t)
    assert (incident.mode, incident.severity) == ("bad-batch", severity)


@pytest.mark.parametrize("light", [False, True])
def test_an_input_that_leaps_is_told_at_once_whatever_its_kurtosis(light: bool) -> None:
    t = made()
    leaps(t, AT)
    loss_jumps(t, AT)
    batches = lightly(t.batches(), 64) if light else t.batches()
    engine = DetectionEngine(t.facts)
    got = fold([f for b in batches for f in engine.observe(b)], t.facts)
    assert [(i.mode, i.first.step) for i in got] == [("outlier-growth", AT)]
    first = got[0].first
    assert t.facts[first.site or 0].module == FC2
    assert first.tile == (3, 1)
    words = explain(first, t.facts)
    assert "leaped by" in words.title
    assert "channels 128 to 255" in words.cause


def test_inputs_of_ordinary_size_are_told_with_the_step_in_which_they_were_measured() -> None:
    t = made()
    loss_jumps(t, AT)
    words = said(t)
    assert words.title.startswith(f"The loss jumped at step {AT} and was not back after 5 steps")
    assert f"at step {AT}," in words.cause
    assert "ordinary size" in words.cause
    assert words.verdict == "shared"


def larger(t: Trace, but_the_first: bool = False) -> None:
    """Inputs are three times what they were, from a step on."""
    t.grow(t.mask(None, "input"), 1.6 * (np.arange(t.num_steps) >= AT))
    if but_the_first:
        first = min((s for s in t.sites if s.operand == "input"), key=lambda s: s.order).module
        t.grow(t.mask(first, "input"), -1.6 * (np.arange(t.num_steps) >= AT))


@pytest.mark.parametrize("steps", [2, STEPS])
def test_what_enters_the_model_larger_is_told_where_the_first_input_is(steps: int) -> None:
    t = made()
    loss_jumps(t, AT, steps)
    larger(t)
    words = said(t)
    assert words.title.startswith("What enters the model is larger" if steps == STEPS else "Bad batch")
    assert "from the first GEMM on" in words.cause
    assert "2.04 octaves" in words.cause, "of the one that is furthest above its own past"
    assert "normalisation" in words.fix[1]["text"]
    assert words.verdict == "shared"


def test_inputs_that_are_larger_behind_the_first_gemm_are_no_matter_of_the_data() -> None:
    t = made()
    loss_jumps(t, AT)
    larger(t, but_the_first=True)
    words = said(t)
    assert words.title.startswith(f"The loss jumped at step {AT} and was not back")
    assert words.verdict == "unknown"
    assert "data" not in words.cause


@pytest.mark.parametrize("inputs_move", [False, True])
def test_a_loss_that_decays_from_a_jump_is_one_jump(inputs_move: bool) -> None:
    """As behind a head that is drawn anew: the median of before stays for a while, and single losses dip into what was usual."""
    t = made()
    after = np.arange(STEPS - AT)
    loss, norm = t.steps["loss"], t.steps["grad_norm"]
    usual = np.median(loss[:AT])
    loss[AT:] = usual * (1 + 0.95 * np.exp(-after / 14.0))
    loss[AT + 6 :: 9] = usual
    norm[AT:] *= 1 + 10 * np.exp(-after / 14.0)
    if inputs_move:
        larger(t, but_the_first=True)
    jumps = [f for f in found_in(t) if f.mode == "bad-batch" and not f.extra.get("goes_on")]
    assert [(f.severity, f.onset) for f in jumps] == [("warning", AT)]
    assert [(i.severity, i.first.onset) for i in incidents(t) if i.mode == "bad-batch"] == [("warning", AT)]


def test_a_batch_that_is_worse_by_far_is_told_while_a_jump_goes_on() -> None:
    t = made()
    loss_jumps(t, AT)
    t.steps["loss"][AT + 8 : AT + 10] += 30.0
    t.steps["grad_norm"][AT + 8 : AT + 10] = 80.0
    assert {f.onset for f in play(Case([t], AT)) if f.mode == "bad-batch"} == {AT, AT + 8}


def test_a_loss_that_takes_its_time_to_come_back_is_not_of_one_batch() -> None:
    t = made()
    loss_jumps(t, AT, 4)
    [incident] = [i for i in incidents(t) if i.mode == "bad-batch"]
    words = explain(incident.named, t.facts)
    assert words.title.startswith(f"Loss jumped at step {AT}: ")
    assert words.title.endswith(", and back within 4 steps")
    assert "one batch was unlike the others" not in words.cause
    assert "Either several batches in a row were unlike the others" in words.cause


def test_a_loss_that_is_most_of_the_way_back_is_not_of_one_batch() -> None:
    t = made()
    loss_jumps(t, AT, 2)
    t.steps["loss"][AT : AT + 2] += 5.0
    t.steps["loss"][AT + 2 :] += 1.5
    first = next(i for i in incidents(t) if i.mode == "bad-batch")
    words = explain(first.first, t.facts)
    assert words.title.endswith(", and most of the way back within 2 steps")
    assert f"came back to {float(t.steps['loss'][AT + 2]):.4g} within 2 steps" in words.cause
    assert "one batch was unlike the others" not in words.cause


def test_a_loss_that_came_back_and_jumps_again_is_told() -> None:
    t = healthy(3, 200)
    loss_jumps(t, AT, 12)
    larger(t, but_the_first=True)
    t.grow(t.mask(None, "input"), -1.6 * (np.arange(t.num_steps) >= AT + 12))
    loss_jumps(t, 180, 3)
    found = [i for i in incidents(t) if i.mode == "bad-batch"]
    assert [i.first.onset for i in found] == [AT, 180]


@pytest.mark.parametrize("steps", [2, STEPS])
def test_a_jump_in_steps_without_measurements_makes_no_claim_about_inputs(steps: int) -> None:
    t = made()
    loss_jumps(t, AT, steps)
    unmeasured(t)
    words = said(t)
    assert words.verdict == "unknown"
    assert "No input was measured" in words.cause
    assert "ordinary" not in words.cause
    assert "data changed" not in words.title.lower()
    assert "overhead_budget=None" in words.fix[0]["text"]


@pytest.mark.parametrize(("lost_db", "severity"), [(0.0, "info"), (6.0, "warning")])
def test_an_input_that_grows_warns_when_its_quantiser_no_longer_bears_it(lost_db: float, severity: str) -> None:
    t = made()
    inputs, since = t.mask(FC2, "input"), np.clip(np.arange(t.num_steps) - AT, 0, 12)
    t.grow(inputs, 0.3 * since)
    t.set_kurtosis(inputs, np.exp2(0.3 * since))
    t.set_sqnr(inputs, t.sqnr(inputs) - lost_db / 12 * since[:, None])
    found = [i for i in incidents(t) if i.mode == "outlier-growth"]
    assert [i.severity for i in found] == [severity]


def test_a_leap_that_is_measured_later_takes_the_jump_of_the_loss_over() -> None:
    t = made()
    leaps(t, AT)
    loss_jumps(t, AT)
    unmeasured(t, but_each=13)  # measured before at 117, and next at 130
    got = found_in(t)
    assert got[0].mode == "bad-batch"
    [incident] = fold(got, t.facts)
    assert incident.mode == "outlier-growth"
    assert explain(incident.named, t.facts).cause.count("last seen before step 118") == 1


def test_bad_batches_before_an_inf_are_an_incident_of_their_own() -> None:
    t = made()
    loss_jumps(t, AT, 3)
    i = t.one(FC2, "input")
    c = t.columns
    c["num_inf"][AT + 3, i], c["num_sentinel_tiles"][AT + 3, i], c["amax_max"][AT + 3, i] = 1, 1, np.inf
    got = incidents(t)
    assert {(i.mode, i.first.onset) for i in got} == {("bad-batch", AT), ("inf-laundering", AT + 3)}
    cut = next(i.first for i in got if i.mode == "bad-batch")
    assert f"before values broke at step {AT + 3}" in explain(cut, t.facts).title


def test_a_loss_that_jumps_after_an_inf_is_its_consequence() -> None:
    t = made()
    loss_jumps(t, AT + 1, 3)
    i = t.one(FC2, "input")
    c = t.columns
    c["num_inf"][AT, i], c["num_sentinel_tiles"][AT, i], c["amax_max"][AT, i] = 1, 1, np.inf
    assert [i.mode for i in incidents(t)] == ["inf-laundering"]


def test_the_first_step_is_the_onset_of_a_batch_and_not_the_step_that_understood_it() -> None:
    t = made()
    loss_jumps(t, AT, 3)
    [finding] = found_in(t)
    assert (finding.onset, finding.step) == (AT, AT + 3)


# ---- counts come in every step, energies now and then


Change = Callable[[Trace], None]


def noisy(t: Trace) -> None:
    t.set_sqnr(t.mask(FC2, "input", "rowwise"), np.full(t.num_steps, 25.0))


def test_noise_that_only_full_samples_hold_is_counted_by_them() -> None:
    t = healthy(3, 200)
    noisy(t)
    engine = DetectionEngine(t.facts)
    found = [f for b in lightly(t.batches(), 16) for f in engine.observe(b)]
    assert {f.mode for f in found} == {"chronic-quantization-noise"}
    assert {f.extra["stride"] for f in found} == {16}  # so that an incident lasts from one sample to the next
    assert len(fold(found, t.facts)) == 1


def test_inputs_between_samples_must_stand_far_above_where_no_kurtosis_says_outlier() -> None:
    t = made()
    t.columns["amax_max"][:, t.mask(FC2, "input")] = 4.0  # its band is narrow: two octaves are seventeen of its σ
    leaps(t, AT, 2.0)
    engine = DetectionEngine(t.facts)
    assert [f for b in lightly(t.batches(), 64) for f in engine.observe(b)] == []


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.heavy(3, DETECT)) for s in (1, 2))])
def test_healthy_runs_of_light_rows_raise_nothing(recipe: str, seed: int) -> None:
    t = healthy(seed, 400, recipe=recipe)
    engine = DetectionEngine(t.facts)
    got = fold([f for b in lightly(t.batches(), 64) for f in engine.observe(b)], t.facts)
    assert [i.mode for i in got if i.severity != "info"] == []


def test_what_a_light_row_holds_is_what_is_tested_here() -> None:
    t = made()
    [*_, last] = lightly(t.batches(), 64)
    groups = {int(m) for m in last.column("measured")}
    assert groups == {int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO)}
