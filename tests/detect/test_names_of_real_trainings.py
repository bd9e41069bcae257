"""What real trainings with a fault in them were told under a neighbour's name, and healthy ones that were told something."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.light import lightly
from detect.play import play
from detect.scenarios import DOWN, GATE, OUT, Case, Q, _shadow, nan_after, put_nan
from detect.trace import ALL, Trace, healthy

from fp8watch_agent.record import Measured, Site, site_id
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.incidents.explain import explain

AT, STEPS = 120, 170


def incidents(t: Trace, every: int = 1) -> list[Folded]:
    if every == 1:
        return fold(play(Case([t], AT)), t.facts)
    engine = DetectionEngine(t.facts)
    return fold([f for b in lightly(t.batches(), every) for f in engine.observe(b)], t.facts)


def since(t: Trace, step: int = AT) -> np.ndarray:
    return np.clip(np.arange(t.num_steps) - step + 1, 0, None)


# ---- scales of a history


def test_a_scale_that_moves_in_the_step_that_is_judged_is_not_frozen() -> None:
    """Three new highs go unanswered within ten steps, and then the scale moves: it is late, and no history is frozen."""
    t = healthy(3, 150, 1, recipe="delayed", hybrid=True)
    one, at = t.mask("layers.0.mlp.down_proj", "input"), np.arange(150)
    scale, depth, up = np.where(at > 60, 0.02, 0.018), np.where(at == 60, 0.8, 0.5), np.zeros(150)
    for k, step in enumerate((AT, AT + 2, AT + 4)):
        depth[step], up[step] = 0.9, 4.0 + k
    scale[AT + 6] = 0.021
    scale[AT + 7 :] = 0.022
    t.grow(one, up)
    for name, values in (("scale_inv_max", scale), ("scale_inv_min", scale), ("scale_ratio_max", depth)):
        t.columns[name][:, one] = values[:, None]
    told = [f for f in play(Case([t], AT)) if f.mode == "frozen-scale"]
    assert all(f.step < AT + 6 for f in told)
    assert all(e.since_step is None or e.since_step >= 0 for f in told for e in f.evidence)


@pytest.mark.parametrize(("octaves", "mode"), [(11.0, "outlier-growth"), (7.0, "delayed-clip")])
def test_an_outlier_beyond_what_any_one_scale_carries_is_no_matter_of_the_history(octaves: float, mode: str) -> None:
    t = healthy(3, STEPS, recipe="delayed", hybrid=True)
    t.grow(t.mask(DOWN, "input"), np.where(since(t) > 0, octaves, 0.0))
    t.delayed()
    first = incidents(t)[0]
    words = explain(first.first, t.facts)
    assert (first.mode, first.first.onset, words.place["module"]) == (mode, AT, DOWN)
    assert words.verdict == "fp8"
    assert "clip_depth" in {e["field"] for e in words.evidence}


def test_an_input_that_leaps_makes_the_logits_leap_and_not_the_other_way_round() -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(Q, "input"), np.where(since(t) > 0, 11.0, 0.0))
    t.logs["max_attention_logit"] = np.where(since(t) > 0, 4e4, 9.0) * np.exp2(
        np.random.default_rng(0).normal(0, 0.1, STEPS)
    )
    assert [(i.mode, i.first.onset) for i in incidents(t)] == [("outlier-growth", AT)]


# ---- weights


@pytest.mark.parametrize("rate", [0.43, 1.1])
def test_a_weight_that_grows_step_by_step_is_no_flipped_bit(rate: float) -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(OUT, "weight"), rate * np.minimum(since(t), 20))
    [incident] = incidents(t)
    assert (incident.mode, incident.first.onset) == ("outlier-growth", AT)
    assert incident.first.step <= AT + 3
    words = explain(incident.first, t.facts)
    assert words.place["module"] == OUT
    assert f"grows in each step since step {AT}" in words.cause


@pytest.mark.parametrize(("octaves", "waits"), [(0.5, 1), (2.0, 0)])
def test_a_weight_that_leaps_once_is_corrupted_from_the_step_of_its_leap(octaves: float, waits: int) -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(OUT, "weight"), np.where(since(t) > 0, octaves, 0.0))
    [incident] = incidents(t)
    assert (incident.mode, incident.first.onset, incident.first.step) == ("silent-data-corruption", AT, AT + waits)


def two_ranks(apart: float) -> list[Trace]:
    """Of one run; under each name the second holds a weight that is so many octaves smaller."""
    ranks = [healthy(3, STEPS), healthy(3, STEPS)]
    ranks[1].rank, ranks[1].session = 1, "1" * 32
    ranks[1].grow(ranks[1].mask(operand="weight"), np.full(STEPS, -apart))
    return ranks


@pytest.mark.parametrize("without", [0, 1])
def test_a_weight_that_another_rank_holds_otherwise_does_not_leap_when_the_one_sends_nothing(without: int) -> None:
    """Stages of a pipeline whose layers have the same names: of the one that is larger, some steps do not come."""
    for octaves in (0.6, 2.0):
        ranks = two_ranks(octaves)
        ranks[without].columns["measured"][AT : AT + 3, ranks[without].mask(OUT, "weight")] = 0
        assert play(Case(ranks, AT), every=1) == []


def test_nor_was_it_there_first_when_values_break_in_that_step() -> None:
    ranks = two_ranks(2.0)
    ranks[0].columns["measured"][AT:, ranks[0].mask(OUT, "weight")] = 0
    nan_after(ranks[1], AT, -1)
    assert "silent-data-corruption" not in {f.mode for f in play(Case(ranks, AT))}


@pytest.mark.parametrize("apart", [0.0, 0.6])
def test_a_weight_that_leaps_is_corrupted_on_whatever_rank_it_is_the_largest(apart: float) -> None:
    ranks = two_ranks(apart)
    for t in ranks[: 2 if apart else 1]:
        t.grow(t.mask(OUT, "weight"), np.where(since(t) > 0, 2.0, 0.0))
    assert {f.mode for f in play(Case(ranks, AT))} == {"silent-data-corruption"}


def test_replicas_of_which_one_is_silent_are_judged_by_the_other() -> None:
    ranks = two_ranks(0.0)
    ranks[0].columns["measured"][AT:, ranks[0].mask(OUT, "weight")] = 0
    ranks[1].grow(ranks[1].mask(OUT, "weight"), np.where(since(ranks[1]) > 0, 2.0, 0.0))
    assert "silent-data-corruption" in {f.mode for f in play(Case(ranks, AT))}


def test_a_leap_that_waits_is_told_when_values_break_behind_it() -> None:
    t = healthy(3, STEPS)
    t.grow(t.mask(OUT, "weight"), np.where(since(t) > 0, 1.0, 0.0))
    nan_after(t, AT + 1, -1)
    assert ("silent-data-corruption", AT) in {(f.mode, f.onset) for f in play(Case([t], AT))}


def test_a_weight_that_began_at_zero_catches_up_between_samples_too() -> None:
    """The gate of an adaLN: smaller than all others, it grows beside them; its quantiser was looked at now and then."""
    t = healthy(3, 260)
    gate = t.mask(GATE, "weight")
    t.grow(gate, -6 + 0.04 * np.minimum(since(t), 100))
    for every in (1, 16):
        got = [i for i in incidents(t, every) if i.mode == "outlier-growth"]
        assert {i.severity for i in got} == {"info"}


# ---- one gradient, two GEMMs


@pytest.mark.parametrize("which", ["wgrad", "dgrad", None])
def test_of_a_gradient_that_two_gemms_read_the_one_is_named_that_broke(which: str | None) -> None:
    t = healthy(3, 40, recipe="delayed")
    _shadow(t, np.random.default_rng(0))
    j = t.one(GATE, "grad_output")
    t.columns["output_num_nonfinite"][30, j] = 1
    if which == "wgrad":
        t.logs[f"nonfinite_gradient/{t.sites[j].module}.weight"] = np.where(np.arange(40) == 30, 1.0, np.nan)
    if which == "dgrad":
        behind = np.array([s.operand == "grad_output" and s.order > t.sites[j].order for s in t.sites])
        put_nan(t, 30, behind)
    [incident] = [i for i in incidents(t) if i.mode == "kernel-output-fault"]
    words = explain(incident.first, t.facts)
    assert (incident.mode, words.place["gemm"]) == ("kernel-output-fault", which)
    assert words.title.startswith(f"{which or 'dgrad or wgrad'} of {t.sites[j].module} returned NaN")
    assert "BF16 would do the same" not in words.cause


def test_outputs_that_are_finite_and_wrong_own_the_nan_behind_them() -> None:
    """Rows that nobody wrote hold 1e19: attention makes a NaN of them, and is not to blame."""
    t = healthy(3, 40)
    _shadow(t, np.random.default_rng(0))
    t.columns["gemm_error"][30, t.one(Q, "input")] = 0.9
    nan_after(t, 30, t.sites[t.one(Q, "input")].order + 9)
    [incident] = incidents(t)
    words = explain(incident.named, t.facts)
    assert (incident.mode, words.place["module"], words.verdict) == ("kernel-output-fault", Q, "fp8")


# ---- an eps in another unit


@pytest.mark.parametrize(("octaves", "severity"), [(11.0, "info"), (6.0, None)])
def test_an_eps_above_every_amax_is_told_before_its_noise_is_seen(octaves: float, severity: str | None) -> None:
    t = healthy(3, 40)
    one = t.mask(operand="weight")
    eps = float(t.columns["amax_max"][:, one].max() * 2.0**octaves)
    t.sites = [replace(s, eps=eps) if s.operand == "weight" else s for s in t.sites]
    t.columns["num_eps_tiles"][:, one] = t.columns["num_tiles"][:, one]
    got = incidents(t)
    assert [(i.mode, i.severity) for i in got] == ([("chronic-quantization-noise", severity)] if severity else [])
    if got:
        words = explain(got[0].first, t.facts)
        assert (words.verdict, words.place["operand"], got[0].first.onset) == ("fp8", "weight", 0)
        assert "is above every amax" in words.title
        assert "AMAX_EPS" in words.fix[0]["text"]


# ---- what stands before the first GEMM


def with_embedding(t: Trace) -> int:
    """A probe on what the table of tokens returns."""
    like = t.sites[0]
    name = "tok_embeddings"
    probe: Site = replace(
        like, id=site_id(name, "output", "rowwise"), module=name, operand="output", gemm="probe", order=-1, format="",
        recipe="probe", backend="torch",
    )  # fmt: skip
    [j] = t.add_sites([probe], measured=int(Measured.COUNTS | Measured.AMAX))
    t.columns["amax_max"][:, j] = 2.0 * np.exp2(np.random.default_rng(1).normal(0, 0.05, t.num_steps))
    t.columns["num_elements"][:, j] = t.columns["num_nonzero"][:, j] = 256 * 256
    return int(j)


@pytest.mark.parametrize(("octaves", "told"), [(15.0, True), (4.0, True), (2.0, False)])
def test_an_embedding_that_leaps_is_named_and_fp8_is_not(octaves: float, told: bool) -> None:
    t = healthy(3, STEPS)
    j = with_embedding(t)
    t.columns["amax_max"][AT:, j] *= 2.0**octaves
    t.grow(t.mask(DOWN, "input"), np.where(since(t) > 0, -5.0, 0.0))  # a branch behind a norm fades beside it
    got = incidents(t)
    assert ("outlier-growth" in {i.mode for i in got}) == told
    if told:
        words = explain(got[0].first, t.facts)
        assert (got[0].mode, got[0].first.onset, words.place["module"]) == ("outlier-growth", AT, "tok_embeddings")
        assert (words.verdict, [i.mode for i in got]) == ("shared", ["outlier-growth"])
        assert "the output of tok_embeddings" in words.title


def test_a_probe_that_was_not_measured_leaps_nowhere() -> None:
    assert int(ALL) & int(Measured.AMAX)
    t = healthy(3, STEPS)
    j = with_embedding(t)
    t.columns["measured"][:, j] = 0
    t.columns["amax_max"][AT:, j] *= 2.0**15
    assert incidents(t) == []
