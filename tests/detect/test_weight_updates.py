"""Updates and gradients that are not those of their step: told with their mode, words and place; what looks alike is silent."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.batch_names import COPIES, SHIFTS
from fp8watch_agent.training_names import WEIGHTS_CHANGED, WEIGHTS_LOOKED
from fp8watch_agent.update_names import (
    ASTRAY,
    COARSE,
    COARSE_BITS,
    DECAY,
    GRADIENT_APART,
    GRADIENT_CUT_OFF,
    GRADIENTS_FEW,
    GRADIENTS_FLUSHED,
    GRADIENTS_KEPT,
    GRADIENTS_LEFT,
    GRADIENTS_NORMAL,
    GRADIENTS_OTHER,
    OF,
    RATE_PARAMETERS,
    RATE_TIMES,
    RECOMPUTED,
    REPEATED,
    SHRINK,
    STEPPED_AGAIN,
    UPDATE_TIMES,
    UPDATES_LOOKED,
    UPDATES_LOST,
)
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.families.weight_updates import REPEAT_STEPS
from fp8watch_server.detect.modes import MODE_BY_SLUG
from fp8watch_server.incidents.explain import explain

AT, STEPS = 80, 112


def made() -> Trace:
    return healthy(3, STEPS, 1, recipe="blockwise", power_2_scale=True)


def at(*steps: int, value: float = 1.0) -> np.ndarray:
    """NaN is "not said": a log of other steps is absent."""
    out = np.full(STEPS, np.nan)
    out[list(steps)] = value
    return out


def incidents(t: Trace, logs: dict[str, np.ndarray]) -> list[Folded]:
    t.logs.update(logs)
    t.absent_logs = True
    return fold(play(Case([t], AT)), t.facts)


def module(t: Trace) -> str:
    return next(f.module for f in t.facts.values() if f.operand == "weight")


LOOKED = {UPDATES_LOOKED: at(*range(AT, AT + 12), value=8)}
TWICE, OFTEN = (AT, AT + 4), (AT, AT + 2, AT + 4)
TOLD = {
    "left": (
        {GRADIENTS_LEFT: at(AT), GRADIENTS_KEPT: at(AT)},
        "optimizer-divergence", f"Gradients are not cleared since step {AT}", "zero_grad",
    ),
    "again": (
        {STEPPED_AGAIN: at(AT + 1)}, "optimizer-divergence", f"The update of step {AT} was applied twice", "second optimizer.step",
    ),
    "times": (
        LOOKED | {UPDATE_TIMES: at(*TWICE, value=2.0)},
        "optimizer-divergence", f"Weights move 2 times as far as the optimizer's step since step {AT}", "besides optimizer.step",
    ),
    "repeated": (
        LOOKED | {REPEATED: at(AT, value=2), f"{OF}{{}}.weight": at(AT)},
        "silent-data-corruption", "The gradient of {}.weight and 1 more is that of the step before", "buckets",
    ),
    "astray": (
        LOOKED | {ASTRAY: at(*TWICE, value=0.2), f"{OF}{{}}.weight": at(*TWICE)},
        "silent-data-corruption", "20 % of the update of {}.weight does not follow from its gradient", "sparse or fused",
    ),
    "rounded": (
        LOOKED | {COARSE: at(*TWICE, value=5), COARSE_BITS: at(*TWICE, value=8), UPDATES_LOST: at(*TWICE, value=0.4)},
        "recipe-mismatch", f"Weights are rounded behind each update since step {AT}: 8 bits of 24", "master",
    ),
    "shrink": (
        LOOKED | {SHRINK: at(*OFTEN, value=0.02), DECAY: at(*OFTEN, value=1e-4)},
        "optimizer-divergence", f"All weights shrink by 2 % a step since step {AT}", "learning rate",
    ),
    "rate": (
        {RATE_TIMES: at(AT, value=8), RATE_PARAMETERS: at(AT, value=3), f"{OF}{{}}.weight": at(AT)},
        "optimizer-divergence", f"The learning rate of {{}}.weight is 8 times its share of the others' since step {AT}",
        "parameter groups",
    ),
    "apart": (
        {f"{GRADIENT_APART}{{}}.weight": at(AT, value=0.34), f"{GRADIENT_APART}elsewhere.bias": at(AT, value=0.2)},
        "silent-data-corruption", f"The optimizer gets another gradient of {{}}.weight and 1 more than backward gave, since step {AT}", "micro-batch",
    ),
    "flushed": (
        {f"{GRADIENT_APART}{{}}.weight": at(AT, value=0.01), GRADIENTS_FLUSHED: at(AT, value=0.25)},
        "gradient-underflow", "25 % of the gradient of {}.weight is 0 when it arrives at the optimizer", "divide behind the sum",
    ),
    "recompute": (
        {f"{RECOMPUTED}{{}}.input": at(AT, value=0.3)},
        "silent-data-corruption", "What is recomputed for {}.input is not what the forward pass computed", "preserve_rng_state",
    ),
}  # fmt: skip


@pytest.mark.parametrize("gap", [2, 9, 14])
def test_looks_that_are_steps_apart_are_of_one_incident(gap: int) -> None:
    looks = range(40, STEPS, gap)
    t = made()
    [incident] = incidents(t, {UPDATES_LOOKED: at(*looks, value=8), UPDATE_TIMES: at(*looks, value=2.0)})
    assert incident.first.onset == 40
    assert looks[-1] - incident.last_step < REPEAT_STEPS


@pytest.mark.parametrize("name", TOLD)
def test_each_is_told_with_its_mode_place_and_fix(name: str) -> None:
    logs, mode, title, fix = TOLD[name]
    t = made()
    where = module(t)
    [incident] = incidents(t, {k.format(where): v for k, v in logs.items()})
    assert (incident.mode, incident.severity, incident.first.onset, incident.named.verdict) == (
        mode,
        "warning",
        AT,
        "shared",
    )
    told = explain(incident.named, t.facts)
    assert title.format(where) in told.title
    assert "FP8 is not the cause" in told.cause
    assert fix in " ".join(f["text"] for f in told.fix)
    assert told.alternatives
    assert all(a["mode"] in MODE_BY_SLUG and a["mode"] != mode for a in told.alternatives)
    if "{}" in title:
        assert incident.first.site is not None
        assert t.facts[incident.first.site].module == where


SILENT = {
    "astray once": LOOKED | {ASTRAY: at(AT, value=0.3), f"{OF}a.weight": at(AT)},
    "astray in one and another": LOOKED
    | {ASTRAY: at(AT, AT + 4, value=0.3), f"{OF}a.weight": at(AT), f"{OF}b.weight": at(AT + 4)},
    "coarse once": LOOKED | {COARSE: at(AT, value=5), COARSE_BITS: at(AT, value=8)},
    "a rate that doubles": {RATE_TIMES: at(AT, value=2.0), RATE_PARAMETERS: at(AT, value=3)},
}


CUT = f"{GRADIENT_CUT_OFF}{{}}.weight"


@pytest.mark.parametrize(
    ("steps", "severity"),
    [((AT,), "info"), ((AT, AT + 30), "warning")],
    ids=["once", "twice"],
)
def test_a_gradient_of_which_nothing_small_is_left_is_told_with_its_share(
    steps: tuple[int, ...], severity: str
) -> None:
    t = made()
    where = module(t)
    found = incidents(t, {CUT.format(where): at(*steps, value=0.93)})
    first = found[0]
    assert (first.mode, first.severity, first.first.onset) == ("gradient-underflow", severity, steps[0])
    assert t.facts[first.first.site].module == where
    told = explain(first.named, t.facts)
    assert (
        told.title
        == f"93 % of the gradient of {where}.weight is 0, and nothing small is left of it, since step {steps[0]}"
    )
    assert told.verdict == "unknown"
    assert "loss scale" in told.fix[0]["text"]
    assert told.alternatives


def test_two_gradients_cut_off_in_one_step_are_a_warning() -> None:
    t = made()
    [incident] = incidents(t, {CUT.format(module(t)): at(AT, value=0.6), CUT.format("elsewhere"): at(AT, value=0.7)})
    assert incident.severity == "warning"
    assert "70 % of the gradient of elsewhere.weight" in explain(incident.named, t.facts).title


@pytest.mark.parametrize("name", SILENT)
def test_what_is_seen_once_or_is_an_adjustment_is_silent(name: str) -> None:
    assert incidents(made(), SILENT[name]) == []


def test_weights_that_were_coarse_from_the_start_are_information() -> None:
    every = range(2, STEPS, 2)
    logs = {UPDATES_LOOKED: at(*every, value=5), COARSE: at(*every, value=5), COARSE_BITS: at(*every, value=8)}
    [incident] = incidents(made(), logs)
    assert (incident.mode, incident.severity) == ("recipe-mismatch", "info")


def test_an_update_that_went_astray_from_the_start_is_information() -> None:
    every = range(4, STEPS, 4)
    t = made()
    logs = {UPDATES_LOOKED: at(*every, value=5), ASTRAY: at(*every, value=0.3), f"{OF}{module(t)}.weight": at(*every)}
    [incident] = incidents(t, logs)
    assert (incident.mode, incident.severity) == ("silent-data-corruption", "info")


def test_a_learning_rate_below_zero_is_told_with_its_step_and_value() -> None:
    t = made()
    t.steps["lr"][AT:] = -2e-6
    [incident] = incidents(t, {})
    assert (incident.mode, incident.severity, incident.first.onset) == ("optimizer-divergence", "warning", AT)
    told = explain(incident.named, t.facts)
    assert told.title == f"The learning rate is below zero since step {AT}: -2e-06"
    assert "FP8 is not the cause" in told.cause
    assert "LambdaLR" in told.fix[0]["text"]


@pytest.mark.parametrize("flushed", [np.nan, 0.3], ids=["apart", "flushed"])
def test_gradients_of_others_that_arrive_otherwise_later_are_of_one_incident(flushed: float) -> None:
    t = made()
    logs = {GRADIENTS_FLUSHED: at(AT)} | {
        f"{GRADIENT_APART}{name}": at(step, value=0.5)
        for name, step in ((f"{module(t)}.weight", AT), ("b.weight", AT + 4), ("c.bias", AT + 9), ("d.weight", AT + 21))
    }
    logs[GRADIENTS_FLUSHED][AT] = flushed
    [incident] = incidents(t, logs)
    assert incident.mode == ("silent-data-corruption" if np.isnan(flushed) else "gradient-underflow")
    assert (incident.severity, incident.first.onset, incident.last_step) == ("warning", AT, AT + 21)
    told = explain(incident.named, t.facts)
    assert f"{module(t)}.weight" in told.title


APART = {f"{GRADIENT_APART}a.weight": at(AT, value=0.3), f"{GRADIENT_APART}a.bias": at(AT, value=0.4)}


@pytest.mark.parametrize(("normal", "few", "mode", "severity"), [
    (1, 1, "recipe-mismatch", "info"), (2, 0, "recipe-mismatch", "info"), (0, 2, "silent-data-corruption", "info"),
    (0, 1, "silent-data-corruption", "warning"), (1, 0, "silent-data-corruption", "warning"),
])  # fmt: skip
def test_normal_noise_on_gradients_is_information_and_few_elements_do_not_warn(
    normal: int, few: int, mode: str, severity: str
) -> None:
    logs = APART | {GRADIENTS_NORMAL: at(AT, value=normal), GRADIENTS_FEW: at(AT, value=few)}
    [incident] = incidents(made(), logs)
    assert (incident.mode, incident.severity) == (mode, severity)
    if mode == "recipe-mismatch":
        told = explain(incident.named, made().facts)
        assert told.title == f"Noise is added to gradients since step {AT}"
        assert "FP8 is not the cause" in told.cause
        assert told.fix
        assert told.alternatives


@pytest.mark.parametrize("logs", [
    APART | {GRADIENTS_FEW: at(AT, value=2)}, APART, APART | {GRADIENTS_FLUSHED: at(AT, value=0.5)}, APART | {GRADIENTS_NORMAL: at(AT, value=2)},
    {WEIGHTS_CHANGED: at(AT, value=3), WEIGHTS_LOOKED: at(AT, value=9)},
], ids=["few", "apart", "flushed", "noise", "written"])  # fmt: skip
def test_what_happens_on_the_way_takes_in_no_fault_of_an_operand(logs: dict[str, np.ndarray]) -> None:
    t = made()
    rows = t.mask(module(t), "input")
    t.set_sqnr(rows, np.where(np.arange(STEPS) >= AT + 3, 18.0, 31.0))
    modes = {i.mode for i in incidents(t, logs)}
    assert len(modes) == 2
    assert "chronic-quantization-noise" in modes


@pytest.mark.parametrize("logs", [
    {f"{GRADIENT_APART}a.weight": at(AT, value=0.01)}, APART | {GRADIENTS_NORMAL: at(AT, value=2)},
    {WEIGHTS_CHANGED: at(AT, value=3), WEIGHTS_LOOKED: at(AT, value=9)},
], ids=["a little apart", "noise", "written"])  # fmt: skip
def test_information_takes_in_no_batch_and_no_divergence(logs: dict[str, np.ndarray]) -> None:
    t = made()
    t.steps["loss"][AT + 4] *= 3
    t.steps["grad_norm"][AT + 4] *= 12
    told = {(i.mode, i.severity) for i in incidents(t, logs)}
    assert ("bad-batch", "warning") in told
    assert len(told) == 2


def test_what_is_flushed_is_said_of_the_parameter_that_lost_most() -> None:
    logs = {f"{GRADIENT_APART}{n}.weight": at(s, value=0.5) for n, s in (("a", AT), ("b", AT + 6), ("c", AT + 12))}
    logs[GRADIENTS_FLUSHED] = at(AT, value=0.2)
    logs[GRADIENTS_FLUSHED][AT + 6] = 0.6
    t = made()
    t.logs.update(logs)
    t.absent_logs = True
    told = [explain(f, t.facts) for f in play(Case([t], AT)) if f.mode == "gradient-underflow"]
    assert [e.title.split(" is 0")[0] for e in told] == [
        "20 % of the gradient of a.weight", "60 % of the gradient of b.weight", "60 % of the gradient of b.weight",
    ]  # fmt: skip
    assert f"at step {AT + 6} they had become 0" in told[2].cause


def test_a_parameter_of_many_elements_says_what_few_did_not() -> None:
    logs = {
        f"{GRADIENT_APART}a.bias": at(AT, value=0.4),
        f"{GRADIENT_APART}a.weight": at(AT + 8, value=0.4),
        GRADIENTS_FEW: at(AT),
    }
    assert [(i.severity, i.first.onset) for i in incidents(made(), logs)] in (
        [("info", AT), ("warning", AT + 8)], [("warning", AT)],
    )  # fmt: skip


def test_what_arrives_otherwise_goes_on_behind_a_restart_of_the_collector() -> None:
    t = made()
    t.logs.update(
        {f"{GRADIENT_APART}{n}.weight": at(s, value=0.5) for n, s in (("a", AT), ("b", AT + 10), ("c", AT + 20))}
    )
    t.absent_logs = True
    one, two = DetectionEngine(t.facts), DetectionEngine(t.facts)
    for i, batch in enumerate(t.batches()):
        if i == (AT + 16) // 8:
            two = DetectionEngine.load(one.dump(), t.facts)
        if i >= (AT + 16) // 8:
            assert repr(two.observe(batch)) == repr(one.observe(batch))
        else:
            one.observe(batch)
    assert two.dump() == one.dump()


@pytest.mark.parametrize(("logs", "mode"), [
    ({GRADIENTS_OTHER: at(*range(4, STEPS), value=5)}, "silent-data-corruption"),
    ({f"{GRADIENT_APART}a.weight": at(AT, value=0.004)}, "silent-data-corruption"),
], ids=["from the first look on", "a little apart"])  # fmt: skip
def test_gradients_that_always_were_others_or_are_nearly_right_are_information(
    logs: dict[str, np.ndarray], mode: str
) -> None:
    [incident] = incidents(made(), logs)
    assert (incident.mode, incident.severity) == (mode, "info")


def test_gradients_that_always_were_others_are_one_incident_however_seldom_they_are_looked_at() -> None:
    """As of an optimizer that mixes gradients: more of them as each has its turn, and then one in eight steps."""
    seen = [*range(4, 30, 2), *range(36, STEPS, 8)]
    count = at(*seen)
    count[seen] = [min(28, 3 + i) for i in range(len(seen))]
    t = made()
    [incident] = incidents(t, {GRADIENTS_OTHER: count})
    assert (incident.severity, incident.first.onset) == ("info", 4)
    assert incident.last_step >= STEPS - 16
    in_all = [e for f in play(Case([t], AT)) for e in f.extra.get("news", ())]
    assert {(e.field, e.value) for e in in_all} >= {("parameters_in_all", int(count[-4]))}


def test_what_goes_on_is_one_incident() -> None:
    logs = {GRADIENTS_LEFT: at(*range(AT, AT + 20)), GRADIENTS_KEPT: at(*range(AT, AT + 20))}
    [incident] = incidents(made(), logs)
    assert incident.last_step >= AT + 15


def test_rows_that_are_copies_are_told_where_they_were_not_and_groups_that_always_were_are_silent() -> None:
    share = at(*range(STEPS), value=0.0)
    share[AT:] = 0.5
    [incident] = incidents(made(), {COPIES: share})
    assert (incident.mode, incident.severity, incident.first.onset) == ("bad-batch", "warning", AT)
    told = explain(incident.named, made().facts)
    assert told.title == f"50 % of the rows of a batch are copies of others since step {AT}"
    assert "seeds" in told.fix[0]["text"]
    once = at(*range(STEPS), value=0.0)
    once[AT : AT + 2] = 0.5
    assert incidents(made(), {COPIES: once}) == []
    assert incidents(made(), {COPIES: at(*range(STEPS), value=0.75)}) == []


def test_labels_that_stand_where_they_are_asked_for_are_information() -> None:
    rng = np.random.default_rng(1)
    shown = 0.2 + 0.03 * rng.standard_normal(STEPS)
    shown[AT:] += 0.2
    [incident] = incidents(made(), {SHIFTS[0]: shown})
    assert (incident.mode, incident.severity) == ("bad-batch", "info")
    assert "More labels stand among the tokens" in explain(incident.named, made().facts).title
