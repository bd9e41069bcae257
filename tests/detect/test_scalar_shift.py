"""Scalars that people log: rules for any name, bands for names that many trainers share; healthy noise is silent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.record import StepPresent
from fp8watch_server.detect.modes.scalar_shift.known_names import known
from fp8watch_server.detect.modes.scalar_shift.levels import Levels
from fp8watch_server.incidents.explain import explain

AT, STEPS = 120, 200
KL, DIFF = "rollout_corr/kl", "train_rollout_logprob_abs_diff"


def made(seed: int = 3, num: int = STEPS) -> Trace:
    return healthy(seed, num, 1)


def noise(seed: int, sigma: float, num: int = STEPS) -> np.ndarray:
    return np.exp(np.random.default_rng([seed, 8]).normal(0, sigma, num))


def incidents(t: Trace) -> list[Folded]:
    return fold(play(Case([t], AT)), t.facts)


def said(t: Trace) -> str:
    [incident] = incidents(t)
    return explain(incident.named, t.facts).title


def test_a_logged_value_that_is_no_number_warns_in_its_step() -> None:
    t = made()
    t.logs["aux/z_loss"] = 1e-3 * noise(1, 0.2)
    t.logs["aux/z_loss"][AT] = np.inf
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("scalar-shift", "warning", AT)
    assert "aux/z_loss is Inf since step 120" in said(t)


def test_a_mean_over_nothing_that_is_infinite_now_and_then_from_the_start_is_silent() -> None:
    t = made()
    t.logs["reward/group_std"] = noise(1, 0.2)
    t.logs["reward/group_std"][3::17] = np.inf
    assert incidents(t) == []


def test_a_scalar_that_stays_infinite_swallows_no_later_failure_of_another() -> None:
    t = made()
    steps = np.arange(STEPS)
    t.logs["aux/z_loss"] = np.where(steps >= 60, np.inf, 1e-3 * noise(1, 0.2))
    t.logs[KL] = np.where(steps >= AT, 0.5, 0.002) * noise(2, 0.2)
    t.logs["actor/clip_frac"] = 0.02 * noise(2, 0.2) * np.where(steps >= AT, 8.0, 1.0)
    broken, mismatch = incidents(t)
    assert (broken.first.onset, broken.last_step, broken.named.scalar) == (60, STEPS - 1, "aux/z_loss")
    assert (mismatch.first.onset, mismatch.severity, mismatch.named.scalar) == (AT, "warning", KL)
    assert KL in explain(mismatch.named, t.facts).title


def test_scalars_that_leave_their_bands_together_are_one_failure() -> None:
    t = made()
    for i in range(6):
        t.logs[f"aux/{i}"] = noise(i, 0.05) * np.where(np.arange(STEPS) >= AT + 2 * i, 8.0, 1.0)
    [incident] = incidents(t)
    assert (incident.mode, incident.first.onset) == ("scalar-shift", AT)


def test_a_level_shift_of_any_scalar_is_information() -> None:
    t = made()
    t.logs["actor/clip_frac"] = 0.02 * noise(2, 0.2) * np.where(np.arange(STEPS) >= AT, 8.0, 1.0)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("scalar-shift", "info", AT)
    assert "actor/clip_frac shifted from 0.0" in said(t)
    assert f"at step {AT}" in said(t)


def test_a_scalar_that_grows_little_by_little_is_information() -> None:
    t = made(num=320)
    t.logs["aux/router_bias_norm"] = noise(2, 0.05, 320) * np.exp2(np.maximum(np.arange(320) - 100, 0) * 0.03)
    got = incidents(t)
    assert {(i.mode, i.severity) for i in got} == {("scalar-shift", "info")}
    assert got[0].first.extra["why"] == "growth"


@pytest.mark.parametrize(("name", "before", "after"), [(KL, 1.2e-4, 0.06), (DIFF, 0.0105, 0.271)])
def test_rollout_that_parts_from_training_warns_within_three_steps(name: str, before: float, after: float) -> None:
    t = made()
    t.logs[name] = noise(4, 0.2) * np.where(np.arange(STEPS) >= AT, after, before)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity) == ("scalar-shift", "warning")
    assert incident.first.step <= AT + 3
    assert name in said(t)
    assert any("BF16" in f["text"] for f in explain(incident.named, t.facts).fix)


def test_a_rollout_kl_that_triples_within_32_steps_warns() -> None:
    t = made(num=320)
    t.logs[KL] = 2e-3 * noise(5, 0.1, 320) * 3.0 ** np.clip((np.arange(320) - 160) / 32, 0, 2)
    got = [i for i in incidents(t) if i.severity == "warning"]
    assert [i.mode for i in got] == ["scalar-shift"]
    assert got[0].first.step < 160 + 64


@pytest.mark.parametrize(
    ("name", "healthy_level", "broken"),
    [("token_mult_prob_error", 1.01, 1.2), ("optim/update_rms", 0.4, 3.5), ("actor/entropy", 0.6, 0.004)],
)
def test_known_names_warn_outside_of_their_band(name: str, healthy_level: float, broken: float) -> None:
    t = made()
    t.logs[name] = np.where(np.arange(STEPS) >= AT, broken, healthy_level) * noise(6, 0.005)
    got = incidents(t)
    assert [(i.mode, i.severity) for i in got] == [("scalar-shift", "warning")]
    assert AT <= got[0].first.onset <= AT + 1


@pytest.mark.parametrize(
    "name",
    [
        "actor/entropy_loss",
        "rollout/kl_coef",
        "training/rollout_probs_diff_max",
        "kl_penalty",
        "sampling/sampling_logp_difference/max",
        "mismatch_kl/std",
        "rollout.kl.max",
        "max_rollout_logprob_diff",
        "train/entropy/min",
        "agent/approx_kl",
        "divergence_kl",
        "general/kl",
        "resampling/kl",
    ],
)
def test_what_only_looks_like_the_mismatch_is_not_taken_for_it(name: str) -> None:
    """Coefficients, extremes of one token, and what policies before and behind an update differ by."""
    assert known(name) is None


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("kl", ["rollout_corr/kl", "rollout_corr/k3_kl", "mismatch/mismatch_kl", "mismatch_kl/mean", "vllm_kl"]),
        ("kl", ["train/gen_kl_error", "policy_kl_error", "js_divergence_error", "rollout_correction/kl"]),
        ("logprob", ["sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean"]),
        ("logprob", ["train/train_rollout_logprob_abs_diff", "log_ppl_abs_diff", "generation_logprobs_diff"]),
        ("prob_error", ["train/token_mult_prob_error"]),
        ("entropy", ["actor/entropy", "train/approx_entropy", "entropy/mean"]),
    ],
)
def test_names_of_trainers_are_known(kind: str, names: list[str]) -> None:
    assert {name: about.kind if (about := known(name)) else None for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize("seed", range(3))
def test_healthy_rl_is_silent(seed: int) -> None:
    """Rewards rise, entropies fall, lengths and losses spike, counters count, a coefficient is set anew."""
    num, rng = 400, np.random.default_rng([seed, 31])
    t, at = made(seed, num), np.arange(400)
    t.logs["reward/mean"] = 0.9 / (1 + np.exp(-(at - 180) / 60)) + rng.normal(0, 0.04, num)
    t.logs["actor/entropy"] = 0.2 + 1.2 * np.exp(-at / 150) + rng.normal(0, 0.03, num)
    t.logs["actor/pg_loss"] = rng.standard_t(3, num) * 0.02
    t.logs["actor/ppo_kl"] = np.abs(rng.standard_t(3, num)) * 2e-3
    t.logs["response_length/mean"] = 300 + 2.5 * at + rng.normal(0, 30, num)
    t.logs["actor/pg_clipfrac"] = np.maximum(rng.normal(0.001, 0.003, num), 0)
    t.logs[KL] = 8e-4 * np.exp(rng.normal(0, 0.4, num))
    t.logs["optim/update_rms"] = 0.5 * np.exp(rng.normal(0, 0.2, num))
    t.logs["data/epoch"] = (at // 150).astype(float)
    t.logs["num_tokens"] = at * 4096.0
    t.logs["kl_coef"] = np.where(at < 200, 0.01, 0.02)
    assert [(i.mode, i.severity, i.first.step, i.first.extra.get("name")) for i in incidents(t)] == []


def test_a_shift_is_told_once_and_the_new_level_is_then_usual() -> None:
    t = made(num=320)
    t.logs["x"] = noise(9, 0.1, 320) * np.where(np.arange(320) >= AT, 30.0, 1.0)
    assert len([f for f in play(Case([t], AT)) if f.mode == "scalar-shift"]) == 1


# ---- gradients that vanish together


def vanish(t: Trace, factor: float, *, norm: bool = True, sites: bool = True, but: str | None = None) -> None:
    """Gradients times a factor; of modules whose names end in `but` they go on."""
    grads = t.mask(operand="grad_output")
    if but is not None:
        grads &= ~t.mask(module=but)
    if norm:
        t.steps["grad_norm"][AT:] *= factor
    if sites and factor > 0:
        t.grow(grads, np.where(np.arange(t.num_steps) >= AT, np.log2(factor), 0.0))
    elif sites:
        c = t.columns
        for name in ("amax_max", "num_nonzero", "num_underflow"):
            c[name][AT:, grads] = 0
        c["amax_min_nonzero"][AT:, grads] = np.inf
        c["num_zero_tiles"][AT:, grads] = c["num_tiles"][AT:, grads]


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("factor", [1e-9, 0.0])
def test_a_loss_that_is_scaled_away_is_said_whether_the_norm_is_logged_or_not(factor: float, logged: bool) -> None:
    t = made()
    vanish(t, factor, norm=logged)
    if not logged:
        t.steps["present"] &= 0xFF ^ int(StepPresent.GRAD_NORM)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("scalar-shift", "warning", AT)
    assert incident.first.step == AT + 2
    assert incident.first.verdict == "shared"
    assert ("norm fell from" if logged else "Gradients ") in said(t)
    assert "loss scale" in explain(incident.named, t.facts).fix[0]["text"]


@pytest.mark.parametrize(("recipe", "verdict"), [("blockwise", "fp8"), ("observe", "shared")])
def test_what_computes_as_before_loses_nothing_to_fp8(recipe: str, verdict: str) -> None:
    """Gradients that fall where a quantiser would lose most of them: where there is none, it is not what made them fall."""
    t = made()
    t.sites = [replace(s, recipe=recipe) for s in t.sites]
    vanish(t, 1e-9, norm=True)
    grads = t.mask(operand="grad_output")
    t.columns["num_underflow"][AT:, grads] = (0.6 * t.columns["num_nonzero"][AT:, grads]).astype(np.int64)
    falls = [i for i in incidents(t) if i.mode == "scalar-shift"]
    assert [i.first.verdict for i in falls] == [verdict]


def test_most_of_a_model_that_a_clamped_term_cuts_off_is_no_loss_that_is_scaled_away() -> None:
    """As free bits do to what is behind a divergence: the rest learns on."""
    t = made()
    part = t.sites[-1].module.rpartition(".")[2]
    left = np.count_nonzero(t.mask(module=part, operand="grad_output"))
    assert 0 < 2 * left < np.count_nonzero(t.mask(operand="grad_output"))
    vanish(t, 0.0, norm=False, but=part)
    t.steps["present"] &= 0xFF ^ int(StepPresent.GRAD_NORM)
    assert {i.mode for i in incidents(t)} <= {"dead-layer"}


@pytest.mark.parametrize(("factor", "plotted"), [(1e-3, True), (0.01, True), (0.01, False)])
def test_a_loss_divided_twice_is_a_fall_of_the_gradient_and_no_matter_of_data(factor: float, plotted: bool) -> None:
    """Where the loss that is plotted is divided too, it falls with the gradient and comes back with it."""
    t = made(num=200)
    while_it_lasts = (np.arange(200) >= AT) & (np.arange(200) < AT + 30)
    t.steps["grad_norm"][while_it_lasts] *= factor
    t.grow(t.mask(operand="grad_output"), np.where(while_it_lasts, np.log2(factor), 0.0))
    if plotted:
        t.steps["loss"][while_it_lasts] *= factor
    [incident] = incidents(t)
    assert (incident.mode, incident.first.onset, incident.first.step) == ("scalar-shift", AT, AT + 2)
    assert "Gradient norm fell from" in said(t)


def test_a_norm_that_scatters_by_seven_octaves_has_not_fallen() -> None:
    t, rng = made(num=300), np.random.default_rng(1)
    t.steps["grad_norm"] *= np.where(rng.random(300) < 0.35, 2.0 ** -rng.uniform(4, 7, 300), 1.0)
    assert incidents(t) == []


def test_a_batch_without_tokens_that_count_has_no_gradient_for_a_step_and_is_silent() -> None:
    t = made()
    grads = t.mask(operand="grad_output")
    t.steps["grad_norm"][AT : AT + 2] = 0
    t.grow(grads, np.where((np.arange(STEPS) >= AT) & (np.arange(STEPS) < AT + 2), -30.0, 0.0))
    assert incidents(t) == []


def test_gradients_that_shrink_over_a_training_are_silent() -> None:
    t = made(num=600)
    down = -12.0 * np.arange(600) / 600
    t.grow(t.mask(operand="grad_output"), down)
    t.steps["grad_norm"] *= np.exp2(down)
    assert incidents(t) == []


LEVEL_NAMES = 60


def level_hits(values: np.ndarray) -> list[tuple[int, int, float, float, int]]:
    """(step, name, level, usual, since) of everything that `Levels` says of these. [steps, names]"""
    levels = Levels()
    levels.grow(values.shape[1])
    names = [f"reward/{i}" for i in range(values.shape[1])]
    return [(step, *hit) for step, value in enumerate(values) for hit in levels.shifted(names, value, step)]


def wandering(phi: float, steps: int = 400) -> np.ndarray:
    """Values around 5 that remember the one before by `phi`, of spread 1. [steps, names]"""
    rng, x = np.random.default_rng(4), np.zeros((steps, LEVEL_NAMES))
    for i in range(1, steps):
        x[i] = phi * x[i - 1] + rng.normal(size=LEVEL_NAMES)
    return 5 + x * math.sqrt(1 - phi**2)


@pytest.mark.parametrize(("phi", "most", "least"), [(0.0, 0, 0.9), (0.5, 2, 0.85), (0.9, 20, 0.5)])
def test_a_level_that_scatters_as_far_as_it_shifts_is_told_and_its_scatter_is_not(
    phi: float, most: int, least: float
) -> None:
    x = wandering(phi)
    assert len(level_hits(x)) <= most, "24,000 healthy values"
    x[120:] += 6
    told = {name: (step, level, usual, since) for step, name, level, usual, since in level_hits(x) if 120 <= step < 160}
    right = [
        step <= 140 and 115 <= since <= 123
        for step, level, usual, since in told.values()
        if abs(level - 11) < 2.5 and abs(usual - 5) < 2.5
    ]
    assert sum(right) >= least * LEVEL_NAMES


def test_what_grows_steadily_and_what_measures_no_numerics_stands_on_no_new_level() -> None:
    x = wandering(0.0)[:200] + np.linspace(0, 40, 200)[:, None]
    assert len(level_hits(x)) <= 1
    steps = wandering(0.0)[:200]
    steps[120:] += 8
    levels = Levels()
    levels.grow(1)
    assert not [h for i, v in enumerate(steps) for h in levels.shifted(["tokens_per_second"], v[:1], i)]
    assert [h for i, v in enumerate(steps) for h in levels.shifted(["reward"], v[:1], 200 + i)]
