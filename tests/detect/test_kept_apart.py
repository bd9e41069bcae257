"""A loss that falls is nobody's consequence, a load that changed the model is what follows from it, a small batch is a small batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case, quantiser_fault
from detect.trace import Trace, healthy

from fp8watch_agent.batch_names import HASH
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.hysteresis import MAX_GROUPS, Latch, began_apart
from fp8watch_server.detect.modes.bad_batch.words import words as batch_words
from fp8watch_server.detect.modes.recipe_mismatch.detector import mismatch
from fp8watch_server.detect.precedence import LOADED, LOSS_FALL, explains
from fp8watch_server.detect.sessions import Change
from fp8watch_server.detect.statistics import without_consequences
from fp8watch_server.incidents.explain import explain

AT, STEPS = 120, 180
DETECT = "server/fp8watch_server/detect"


def found_in(t: Trace) -> list[Finding]:
    return play(Case([t], AT))


def told(t: Trace) -> list[Folded]:
    return fold(found_in(t), t.facts)


@pytest.mark.parametrize(("db", "told_as"), [(32.9, set()), (31.2, set()), (29.5, {"chronic-quantization-noise"})])
def test_noise_that_rises_to_what_the_format_always_has_is_no_fault(db: float, told_as: set[str]) -> None:
    """A gradient of few values had less before."""
    t = healthy(seed=2, num_steps=STEPS)
    mask = t.mask(operand="grad_output")
    t.set_sqnr(mask, np.where(np.arange(STEPS) < AT, 40.0, db))
    assert {f.mode for f in found_in(t)} == told_as


def falls(t: Trace, at: int) -> None:
    t.steps["loss"][at:] *= 0.7


def quiet() -> Trace:
    """With a fifth of the noise in its losses."""
    t = healthy(3, STEPS)
    smooth = 2.2 + 1.2 * np.exp(-np.arange(STEPS) / 120) + 2.5 * np.exp(-np.arange(STEPS) / 15)
    t.steps["loss"] = smooth + 0.2 * (t.steps["loss"] - smooth)
    return t


def jumps(t: Trace, at: int, steps: int) -> None:
    t.steps["loss"][at : at + steps] += 5.0
    t.steps["grad_norm"][at : at + steps] = 12.0


# ---- a loss that falls


@pytest.mark.parametrize("lag", [-6, 6])
def test_a_loss_that_falls_and_a_quantiser_that_breaks_are_two_incidents_each_with_its_step(lag: int) -> None:
    t = quiet()
    quantiser_fault(t, AT, 1, np.random.default_rng(0))
    falls(t, AT + lag)
    got = {i.mode: i for i in told(t)}
    assert set(got) == {"quantiser-fault", "bad-batch"}
    assert got["bad-batch"].named.onset == AT + lag
    assert "fell" in explain(got["bad-batch"].named, t.facts).title
    assert got["quantiser-fault"].first.step == AT


def test_a_loss_that_rises_under_a_broken_quantiser_is_its_consequence() -> None:
    t = quiet()
    quantiser_fault(t, AT, 1, np.random.default_rng(0))
    t.steps["loss"][AT:] *= 1.15
    assert [i.mode for i in told(t)] == ["quantiser-fault"]


def test_what_scales_the_loss_away_explains_that_it_fell() -> None:
    assert explains("gradient-fall", LOSS_FALL)
    assert not any(
        explains(root, LOSS_FALL) for root in ("quantiser-fault", "optimizer-divergence", "nan-in-loss", "bad-batch")
    )


@pytest.mark.parametrize(
    ("before", "after", "share"), [(2.0, 1.5, " by 25 %"), (0.2755, -0.0802, ""), (-1.0, -2.0, "")]
)
def test_of_a_loss_that_may_be_negative_no_share_is_told(before: float, after: float, share: str) -> None:
    t = quiet()
    falls(t, AT)
    [incident] = told(t)
    evidence = tuple(
        type(e)(e.field, after, before, e.unit, e.since_step) if e.field == "loss" else e
        for e in incident.named.evidence
    )
    title, _ = batch_words(Finding(**{**incident.named.__dict__, "evidence": evidence}), None)
    assert title.startswith(f"The loss fell{share} at step")


# ---- a load


def loaded(t: Trace, fact: str = "loaded_weights") -> Finding:
    return mismatch([Change(fact, "0.weight, 1.weight and 4 more of 62", "as saved", "the checkpoint")], AT, 0)


def test_what_follows_from_a_load_that_changed_the_model_is_told_under_it() -> None:
    t = quiet()
    t.steps["loss"][AT:] *= 1.15
    rest = found_in(t)
    assert [f.mode for f in rest] == ["bad-batch"]
    assert [i.mode for i in fold([loaded(t), *rest], t.facts)] == ["recipe-mismatch"]
    assert [i.mode for i in fold(rest, t.facts)] == ["bad-batch"]


def test_another_setting_does_not_make_the_loss_rise_or_a_layer_die() -> None:
    changed = mismatch([Change("eps", 1e-4, 0.0, "the step before")], AT, 0)
    assert changed.kind == "recipe-mismatch"
    assert loaded(healthy(3, 4)).kind == LOADED
    assert not explains(changed.kind, "bad-batch")
    assert explains(LOADED, "dead-layer")


# ---- a small batch


def shrunk(t: Trace, at: int, share: float) -> None:
    for name in ("num_elements", "num_nonzero"):
        column: Any = t.columns[name]
        inputs = t.mask(operand="input")
        column[at, inputs] = (column[at, inputs] * share).astype(column.dtype)


@pytest.mark.parametrize(("share", "severity"), [(1.0, "warning"), (0.75, "warning"), (0.5, "info"), (0.0625, "info")])
def test_a_loss_that_jumps_in_a_small_batch_is_information(share: float, severity: str) -> None:
    t = healthy(3, STEPS)
    jumps(t, AT, 3)
    shrunk(t, AT, share)
    [incident] = told(t)
    assert (incident.mode, incident.severity) == ("bad-batch", severity)
    words = explain(incident.named, t.facts)
    assert ("A small batch at step 120" in words.title) == (severity == "info")
    rows = [e for e in incident.named.evidence if e.field == "batch_rows"]
    assert [e.value / e.baseline for e in rows] == ([share] if rows else [])
    assert bool(rows) == (severity == "info")


def test_a_loss_that_stays_up_behind_a_small_batch_is_no_small_batch() -> None:
    t = healthy(3, STEPS)
    jumps(t, AT, STEPS)
    shrunk(t, AT, 0.0625)
    [incident] = told(t)
    assert "small batch" not in explain(incident.named, t.facts).title


# ---- a batch that was there before, and parameters that begin to train


@pytest.mark.parametrize(
    ("num", "nearly_nothing", "severity"), [(1, True, "info"), (3, True, "warning"), (1, False, "warning")]
)
def test_a_loss_that_jumps_on_a_batch_that_was_there_before_is_not_of_the_inputs(
    num: int, nearly_nothing: bool, severity: str
) -> None:
    """As in full-batch training of graphs, with dropout; where the loss is not nearly 0, something may have been computed wrongly."""
    t = healthy(3, STEPS)
    t.logs[HASH] = np.full(STEPS, 7.0)
    jumps(t, AT, num)
    if nearly_nothing:
        t.steps["loss"][30:] *= 0.01
    [incident] = told(t)
    assert (incident.mode, incident.severity) == ("bad-batch", severity)
    words = explain(incident.named, t.facts)
    assert words.title.endswith(f"and back, on the batch of step {AT - 1}")
    assert ("something was computed wrongly" in words.cause) != nearly_nothing
    assert "one batch was unlike" not in words.cause


def test_a_loss_that_jumps_and_stays_on_a_batch_that_was_there_before_is_no_other_data() -> None:
    t = healthy(3, STEPS)
    t.logs[HASH] = np.full(STEPS, 7.0)
    jumps(t, AT, STEPS)
    [incident] = told(t)
    words = explain(incident.named, t.facts)
    assert "The data changed" not in words.title
    assert "it is not the inputs" in words.cause


@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_a_loss_that_jumps_where_parameters_begin_to_train_says_so(share: float) -> None:
    t = healthy(3, STEPS)
    frozen = np.flatnonzero(t.mask(operand="grad_output"))
    frozen = frozen[: round(share * len(frozen))]
    t.columns["measured"][: AT - 1, frozen] = 0
    jumps(t, AT, 3)
    [incident] = told(t)
    assert (incident.mode, incident.severity) == ("bad-batch", "info" if share > 0.5 else "warning")
    words = explain(incident.named, t.facts)
    assert (f"parameters that began to train at step {AT - 1}" in words.title) == (share > 0.5)
    assert ("one batch was unlike" in words.cause) == (share < 0.5)


# ---- a place is not the model

HERE, THERE = "layers.0.mlp.gate_proj", "layers.2.mlp.down_proj"


def noisy(t: Trace, module: str, at: int) -> None:
    t.set_sqnr(t.mask(module, "input"), np.where(np.arange(t.num_steps) >= at, 18.0, 31.0))


def gets_no_tokens(t: Trace, module: str) -> None:
    c, mask = t.columns, t.mask(module, "input") | t.mask(module, "grad_output")
    for name in ("amax_max", "num_nonzero", "num_underflow", "num_zero_tiles", "num_tiles", "num_elements"):
        c[name][AT - 60 :, mask] = 0
    c["amax_min_nonzero"][AT - 60 :, mask] = np.inf


@pytest.mark.parametrize(("module", "more"), [(THERE, {"chronic-quantization-noise"}), (HERE, set())])
def test_an_expert_without_tokens_takes_in_what_is_wrong_in_its_module_and_nowhere_else(
    module: str, more: set[str]
) -> None:
    t = healthy(3, STEPS)
    gets_no_tokens(t, HERE)
    if module == THERE:
        noisy(t, module, AT)
    assert {i.mode for i in told(t)} == {"dead-layer"} | more


@pytest.mark.parametrize(
    ("module", "modes"), [(THERE, ["frozen-scale", "chronic-quantization-noise"]), (HERE, ["frozen-scale"])]
)
def test_a_scale_that_is_wrong_takes_in_the_noise_of_its_module_alone(module: str, modes: list[str]) -> None:
    t = healthy(3, STEPS, recipe="delayed")
    one = t.mask(HERE, "input")
    for name in ("scale_ratio_max", "scale_ratio_min"):
        t.columns[name][AT - 20 :, one] = 3.0
    noisy(t, module, AT)
    assert [i.mode for i in told(t)] == modes


def test_of_one_step_a_cause_takes_in_what_is_in_its_own_module() -> None:
    t = healthy(3, STEPS)
    clip, noise = (
        Finding(
            mode, "warning", AT, 0, None, None, None, (), "fp8", 0,
            {"sites": [int(t.sites[t.one(module, "input")].id)], "num_sites": 1},
        )
        for mode, module in (("delayed-clip", HERE), ("chronic-quantization-noise", THERE))
    )  # fmt: skip
    assert without_consequences([clip, noise], sites=t.facts) == [clip, noise]
    there = replace(noise, extra=clip.extra)
    assert without_consequences([clip, there], sites=t.facts) == [clip]
    many = replace(clip, extra={**clip.extra, "num_sites": 300})  # of which some are not named
    assert without_consequences([many, noise], sites=t.facts) == [many]


@pytest.mark.parametrize(("at", "places"), [(AT, [(HERE, 10), (THERE, AT)]), (20, [(HERE, 10)])])
def test_noise_that_begins_elsewhere_long_after_some_that_stays_is_told_with_its_place(
    at: int, places: list[tuple[str, int]]
) -> None:
    t = healthy(3, STEPS)
    noisy(t, HERE, 10)
    noisy(t, THERE, at)
    got = told(t)
    assert {i.mode for i in got} == {"chronic-quantization-noise"}
    assert [(t.facts[i.named.site].module, i.named.onset) for i in got] == places
    assert [i.last_step for i in got] == [STEPS - 1] * len(places)
    assert len([f for f in found_in(t) if f.step == STEPS - 1]) == len(places)


def test_alarms_that_began_apart_are_few_and_in_the_order_of_the_rows() -> None:
    latch = Latch(40, 1, 1)
    for step in range(40):
        latch.update(np.arange(40) == 39 - step, np.arange(40) == 39 - step, step)
    rows = np.arange(1, 40)
    groups = began_apart(rows, [latch, Latch(40, 1, 1)], 3)
    assert [g.tolist() for g in groups[:2]] == [[36, 37, 38, 39], [32, 33, 34, 35]]
    assert len(groups) == MAX_GROUPS
    assert sorted(np.concatenate(groups).tolist()) == rows.tolist()
