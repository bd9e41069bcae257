"""What follows from a cause that is known is told under its name: an LR that left its range, a weight that was written, a young history."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.training_names import SECOND_LOOKED, SECOND_ZERO
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.lr_schedule import Schedule
from fp8watch_server.detect.modes.recipe_mismatch.detector import loaded, mismatch
from fp8watch_server.detect.sessions import Change
from fp8watch_server.incidents.explain import explain

AT, STEPS = 120, 180
FC2, Q = "layers.1.mlp.down_proj", "layers.0.attn.q_proj"
LOGIT = "max_attention_logit/layers.0.attn"
since = np.maximum(np.arange(STEPS) - AT, 0)


def found_in(t: Trace) -> list[Finding]:
    return play(Case([t], AT))


def told(t: Trace) -> list[Folded]:
    return fold(found_in(t), t.facts)


def with_logits(t: Trace, octaves: float, begins: int = AT) -> None:
    t.logs[LOGIT] = 25.0 * np.exp2(octaves * np.maximum(np.arange(STEPS) - begins, 0))


def climbing(rate: float, most: float, begins: int = AT) -> np.ndarray:
    return 2e-3 * np.minimum(rate ** np.maximum(np.arange(STEPS) - begins, 0), most)


# ---- the learning rate


def test_an_lr_that_climbs_out_of_its_range_is_a_jump_from_its_first_step_beyond_it() -> None:
    schedule = Schedule(50, 10)
    for step, lr in enumerate(climbing(1.15, 20)):
        schedule.observe(step, float(lr), learn=True)
    assert schedule.jump_step == AT + 1
    assert schedule.last_leap is not None
    assert schedule.last_leap[:2] == (AT + 1, pytest.approx(2e-3))
    assert schedule.last_leap[2] == pytest.approx(4e-2)
    assert schedule.warm(STEPS)


def test_an_lr_that_leaps_under_a_schedule_leaped_from_where_it_stood() -> None:
    """The median of what it was lies 12 steps back."""
    lrs = np.linspace(2e-2, 5e-3, 60)
    schedule = Schedule(0, 0)
    for step, lr in enumerate([*lrs, 30 * lrs[-1], 30 * lrs[-1]]):
        schedule.observe(step, float(lr), learn=step < len(lrs))
    assert schedule.last_leap == (60, pytest.approx(5e-3), pytest.approx(0.15))
    assert schedule.lr_before == pytest.approx(5e-3)
    assert schedule.usual_lr is not None
    assert schedule.usual_lr > 6e-3
    schedule.observe(62, 5e-3, learn=True)
    assert schedule.lr_before == schedule.usual_lr, "no jump is on"


def test_a_warm_up_to_where_it_was_and_one_from_nothing_are_no_climb() -> None:
    again = np.concatenate([np.full(80, 2e-3), 2e-4 * 1.1 ** np.minimum(np.arange(60), 24)])
    for lrs in (again, 1e-5 * 1.1 ** np.minimum(np.arange(80), 60)):
        schedule = Schedule(50, 10)
        for step, lr in enumerate(lrs):
            schedule.observe(step, float(lr), learn=True)
            assert schedule.jump_step is None


def test_a_restart_within_a_warm_up_is_no_place_where_the_lr_stood() -> None:
    """It goes on from a checkpoint, below the LR that the steps before the crash had."""
    schedule = Schedule(50, 10)
    for steps in (range(300), range(251, 2200)):
        schedule.resume()
        for step in steps:
            schedule.observe(step, 3e-4 * min(1.0, (step + 1) / 2000), learn=True)
            assert schedule.jump_step is None, step
    for step in range(2200, 2260):
        schedule.observe(step, 3e-4 * 1.15 ** (step - 2200), learn=True)
    assert schedule.lr_before == pytest.approx(3e-4), "where it stood is known"


def test_a_restart_with_another_lr_than_the_one_that_stood_is_a_jump() -> None:
    schedule = Schedule(50, 10)
    for step in range(80):
        schedule.observe(step, 2e-3, learn=True)
    schedule.resume()
    schedule.observe(80, 2e-2, learn=True)
    assert schedule.jump_step == 80
    assert schedule.lr_before == pytest.approx(2e-3)


def test_logits_that_grow_when_the_lr_has_left_its_range_are_the_optimizers() -> None:
    t = healthy(5, STEPS, 2, lr=climbing(1.15, 20))
    with_logits(t, 0.15, AT + 12)
    [incident] = told(t)
    assert incident.mode == "optimizer-divergence"
    assert AT < incident.first.onset <= AT + 2
    words = explain(incident.first, t.facts)
    assert "LR 0.002 →" in words.title
    assert "layers.0.attn" in words.title


def test_logits_that_grow_long_after_the_lr_leaped_are_told_by_themselves() -> None:
    lr = np.where(np.arange(STEPS) < 80, 2e-3, 8e-3)
    t = healthy(5, STEPS, 2, lr=lr)
    with_logits(t, 0.15, AT + 10)
    assert [i.mode for i in told(t)] == ["attention-logit-growth"]


def test_logits_that_grow_again_after_one_leap_of_the_lr_open_nothing_new() -> None:
    t = healthy(5, STEPS, 2, lr=np.where(np.arange(STEPS) < AT, 2e-3, 1e-2))
    with_logits(t, 0.12, AT)
    t.logs[LOGIT][AT + 15 :] = t.logs[LOGIT][AT + 15]
    t.logs["max_attention_logit/layers.1.attn"] = 30.0 * np.exp2(0.12 * np.maximum(np.arange(STEPS) - AT - 15, 0))
    found = [f for f in found_in(t) if f.extra.get("kind") == "logits"]
    assert [bool(f.extra["consequence"]) for f in found] == [False, *[True] * (len(found) - 1)]
    assert len(found) > 3


# ---- what the optimizer writes


def zeros(t: Trace, first: int, last: int) -> None:
    steps = np.arange(STEPS)
    t.logs[SECOND_LOOKED] = np.full(STEPS, 1000.0)
    t.logs[SECOND_ZERO] = np.where((steps >= first) & (steps <= last), 300.0, 0.0)


def leaps(t: Trace, octaves: float, at: int = AT) -> None:
    t.grow(t.mask(FC2, "weight"), np.where(np.arange(STEPS) >= at, octaves, 0.0))


def test_a_weight_that_leaps_under_moments_that_are_wrong_is_no_flipped_bit() -> None:
    t = healthy(3, STEPS)
    zeros(t, AT - 4, AT + 4)
    leaps(t, 2.0)
    assert [i.mode for i in told(t)] == ["optimizer-divergence"]
    alone = healthy(3, STEPS)
    leaps(alone, 2.0)
    assert [i.mode for i in told(alone)] == ["silent-data-corruption"]


@pytest.mark.parametrize(
    ("at", "octaves", "severity"), [(14, 0.6, "warning"), (14, 2.0, "critical"), (AT, 0.6, "critical")]
)
def test_a_little_leap_is_no_page_where_the_optimizer_has_hardly_been_seen(at, octaves, severity) -> None:
    """Shampoo makes its preconditioners anew every few steps: then an update is larger than those before."""
    t = healthy(3, STEPS)
    leaps(t, octaves, at)
    for name in ("num_nan", "num_inf"):
        t.columns[name][:] = 0
    t.columns["measured"][:, t.mask(None, "grad_output")] = 0
    t.steps["grad_norm"] = np.nan
    found = [i for i in told(t) if i.mode == "silent-data-corruption"]
    assert [i.severity for i in found] == [severity]


@pytest.mark.parametrize(
    ("every", "module"), [(3, FC2), (8, FC2), (8, None)], ids=["one-in-three", "one-in-eight", "all"]
)
def test_a_leap_between_two_looks_is_of_a_step_between_them(every: int, module: str | None) -> None:
    """Where Linears have turns, others may be looked at in each step."""
    t = healthy(3, STEPS)
    leaps(t, 6.0)
    turn = np.arange(STEPS) % every == 2
    t.columns["amax_max"][np.ix_(~turn, t.mask(module, "weight"))] = np.nan
    [incident] = [i for i in told(t) if i.mode == "silent-data-corruption"]
    seen = next(step for step in range(AT, STEPS) if turn[step])
    words = explain(incident.named, t.facts)
    assert incident.named.step == seen
    assert words.title.endswith(f"octaves, since a step from {seen - every + 1} to {seen}")
    assert (
        f"between the looks at steps {seen - every} and {seen}, alone, and the gradient before it was not measured"
        in words.cause
    )


def test_second_moments_that_stay_wrong_keep_their_incident_open() -> None:
    t = healthy(3, STEPS)
    zeros(t, AT, AT + 40)
    [incident] = told(t)
    assert (incident.first.step, incident.last_step) == (AT, AT + 40)


def test_a_weight_that_leaped_is_told_in_the_step_that_it_breaks() -> None:
    t = healthy(3, STEPS)
    leaps(t, 100.0)
    t.steps["loss"][AT:] = np.nan
    rows = t.mask("layers.2", "input")
    t.columns["num_nan"][AT:, rows] = 5
    [incident] = [i for i in told(t) if i.first.onset >= AT]
    assert incident.mode == "silent-data-corruption"
    assert incident.named.onset == AT
    assert t.facts[incident.named.site or 0].module == FC2


def test_a_weight_that_leaps_farthest_while_all_scatter_is_no_flipped_bit_when_values_break() -> None:
    """A divergence by plain SGD: they grow in turns, until the loss is no number."""
    t = healthy(3, STEPS)
    rng = np.random.default_rng(0)
    for module in dict.fromkeys(site.module for site in t.sites):
        t.grow(t.mask(module, "weight"), rng.uniform(-0.3, 0.9) * (np.arange(STEPS) >= AT))
    leaps(t, 2.0)
    t.steps["loss"][AT:] = np.nan
    t.columns["num_nan"][AT:, t.mask("layers.2", "input")] = 5
    assert "silent-data-corruption" not in {i.mode for i in told(t)}


def test_a_weight_that_leaps_behind_values_that_broke_before_is_their_consequence() -> None:
    t = healthy(3, STEPS)
    leaps(t, 100.0, AT + 1)
    t.steps["loss"][AT:] = np.nan
    t.columns["num_nan"][AT:, t.mask("layers.2", "input")] = 5
    assert "silent-data-corruption" not in {i.mode for i in told(t)}


# ---- what shrinks


@pytest.mark.parametrize("each", [0.02, 0.25])
def test_weights_that_lose_a_share_of_themselves_in_each_step_are_told(each: float) -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(None, "weight"), np.log2(1 - each) * since)
    [incident] = told(t)
    assert (incident.mode, incident.severity) == ("optimizer-divergence", "warning")
    assert abs(incident.first.onset - AT) <= 3
    words = explain(incident.first, t.facts)
    assert "weights shrink together" in words.title
    assert "Weight decay" in words.cause


def test_inputs_that_shrink_together_while_weights_stand_are_told() -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(None, "input"), np.log2(1 - 0.05) * since)
    incident = told(t)[0]
    assert incident.mode == "optimizer-divergence"
    assert "inputs shrink together" in explain(incident.first, t.facts).title


def test_an_input_that_most_layers_read_is_one_that_shrinks() -> None:
    """An embedding of time that each block of a U-Net is given, beside a few inputs that stand."""
    t = healthy(3, STEPS)
    shared, alone = t.mask("q_proj", "input") | t.mask("up_proj", "input"), t.mask(None, "input")
    assert np.count_nonzero(shared) > 3
    t.columns["measured"][:, alone & ~shared & ~t.mask("layers.0.mlp.down_proj")] = 0
    same = np.flatnonzero(shared)
    for name in ("amax_max", "amax_min_nonzero"):
        t.columns[name][:, same] = t.columns[name][:, same[:1]]
    t.grow(shared, np.log2(1 - 0.05) * since)
    assert "shrinking" not in {f.extra.get("kind") for f in found_in(t)}


def test_three_inputs_that_shrink_are_told_with_those_who_read_them() -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(None, "input"), np.log2(1 - 0.05) * since)
    one, other = (t.mask(f"{name}_proj", "input", "rowwise") for name in "qk")
    t.columns["amax_max"][:, other] = t.columns["amax_max"][:, one]
    found = next(f for f in found_in(t) if f.extra.get("kind") == "shrinking")
    num = {e.field: e.value for e in found.evidence}["shrinking_inputs"]
    assert found.extra["num_sites"] > num >= 3
    assert f"read at {found.extra['num_sites']} sites" in explain(found, t.facts).cause


@pytest.mark.parametrize("operand", ["weight", "input"])
def test_what_becomes_smaller_at_once_does_not_shrink(operand: str) -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(None, operand), np.where(np.arange(STEPS) >= AT, -0.7, 0.0))
    assert "shrinking" not in {f.extra.get("kind") for f in found_in(t)}


# ---- what is no failure


def test_a_history_that_lags_in_a_young_model_is_not_chronic() -> None:
    for first, said in ((0, []), (60, ["chronic-quantization-noise"])):
        t = healthy(3, STEPS, recipe="delayed")
        rows = t.mask(FC2, "input")
        noisy = (np.arange(STEPS) >= first) & (np.arange(STEPS) < first + 45)
        t.set_sqnr(rows, np.where(noisy, 25.0, 31.0))
        assert [i.mode for i in told(t)] == said


def test_a_loss_that_scatters_by_a_factor_has_no_bad_batch() -> None:
    t = healthy(3, STEPS)
    t.steps["loss"] = 3.0 * np.exp(np.random.default_rng(7).normal(0, 0.5, STEPS))
    t.steps["loss"][AT] = 3.0 * np.exp(1.5)
    t.steps["grad_norm"][AT] = 12.0
    assert told(t) == []
    t.steps["loss"][AT] = 3.0 * np.exp(3.5)
    assert [i.mode for i in told(t)] == ["bad-batch"]


SCATTERED = [
    2.85, 2.57, 2.61, 2.69, 2.37, 2.39, 2.31, 2.27, 2.22, 2.17, 2.1, 1.9, 1.75, 1.78, 1.46, 1.66, 1.45, 1.34, 1.28, 1.03,
    1.13, 1.3, 0.94, 0.96, 0.97, 0.94, 0.69, 0.67, 0.57, 0.6, 0.54, 0.54, 0.67, 0.5, 0.35, 0.63, 0.51, 0.4, 0.43, 0.52,
    0.47, 0.39, 0.42, 0.61, 0.43, 0.33, 0.45, 0.39, 0.4, 0.66, 0.36, 0.28, 0.57, 0.7, 0.24, 0.38, 0.26, 0.27, 0.26, 0.19,
    0.54, 0.31, 0.27, 0.28, 0.45, 0.38, 0.2, 0.14, 0.41, 0.38, 0.19, 0.38, 0.3, 0.22, 0.19, 0.25, 0.25, 0.14, 0.34, 0.36,
    0.17, 0.17, 0.43, 0.14, 0.2, 1.29, 1.72, 0.89, 1.68, 1.92, 1.62, 1.41, 2.54, 1.37, 1.9, 1.07, 1.12, 1.98, 1.83, 1.85,
    2.55, 1.32, 1.6, 1.33, 1.87, 1.36, 1.55, 1.49, 1.99, 1.36, 1.27, 1.26,
]  # fmt: skip
"""Losses of a Swin on digits, whose pixels change places from step 85 on."""


def test_a_loss_that_scatters_by_a_factor_and_stays_up_is_told() -> None:
    t = healthy(3, len(SCATTERED))
    t.steps["loss"] = SCATTERED
    [incident] = told(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("bad-batch", "info", 85)
    assert explain(incident.named, t.facts).title == "The loss rose by 415 % at step 85 and stays: 0.2871 → 1.478"


def test_tiles_below_the_range_of_a_scale_are_no_fault_of_the_quantiser() -> None:
    t = healthy(3, STEPS)
    rows = t.mask(FC2, "input")
    t.set_sqnr(rows, np.where(np.arange(STEPS) >= AT, 1.0, 31.0))
    assert "quantiser-fault" in {f.mode for f in found_in(t)}
    t.columns["amax_min_nonzero"][AT:, rows] = 2.0**-120
    assert "quantiser-fault" not in {f.mode for f in found_in(t)}


# ---- where


def test_what_was_loaded_otherwise_has_the_place_of_its_weight() -> None:
    facts = list(healthy(3, 2).facts.values())

    def places(said: str) -> list[str]:
        return [f.module for f in loaded([Change("loaded_weights", said, "as saved", "the checkpoint")], facts)]

    assert places(f"{FC2}.weight, {Q}.weight of 21") == [
        f.module for f in facts if f.module in (FC2, Q) and f.operand == "weight"
    ]
    assert places(f"{FC2}.weight of 21") == [FC2]
    assert places(f"{FC2}.weight, {Q}.weight, x.weight and 12 more of 21") == []
    assert places(f"{FC2}.weight, x.weight and 8 more of 21") == [FC2]
    assert places("none of 12: the optimizer has none") == []


@pytest.mark.parametrize(
    ("names", "title"),
    [
        ("a of 62", "a of 62"),
        ("a, b, c of 62", "a, b, c of 62"),
        ("a, b, c, d of 62", "a, b, c and 1 more of 62"),
        ("a, b, c, d, e, f, g, h and 40 more of 62", "a, b, c and 45 more of 62"),
        ("none of 12: the optimizer has none", "none of 12: the optimizer has none"),
    ],
)
def test_a_title_names_few_of_what_was_loaded_otherwise(names: str, title: str) -> None:
    found = mismatch([Change("loaded_weights", names, "as saved", "the checkpoint")], AT, 0)
    words = explain(found, {})
    assert words.title == f"What was loaded is not what was saved: weights of {title}"
    assert names in words.cause


def test_of_two_that_explain_each_other_the_earlier_is_the_cause() -> None:
    from fp8watch_server.detect.statistics import without_consequences

    t = healthy(3, STEPS)
    leaps(t, 2.0)
    leap = next(f for f in found_in(t) if f.mode == "silent-data-corruption")
    later = replace(leap, mode="optimizer-divergence", step=leap.step + 2, extra={"sites": [], "num_sites": 0})
    for began, cause in ((leap.step + 2, leap), (leap.step - 2, None), (leap.step, None)):
        grows = replace(later, extra={**later.extra, "began": began})
        assert without_consequences([leap, grows]) == [cause or grows]
