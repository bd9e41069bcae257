"""What trainings were seen to do without a word, or with a wrong one: each is told now, under its name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.light import lightly
from detect.play import play
from detect.scenarios import DOWN, GATE, OUT, Case, _replicas
from detect.trace import Trace, healthy

from fp8watch_agent.record import Measured
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.families.sides import sides_of
from fp8watch_server.detect.modes.recipe_mismatch.detector import mismatch
from fp8watch_server.detect.sessions import SessionFacts, differences
from fp8watch_server.incidents.explain import Explanation, explain

AT, STEPS = 120, 200


def incidents(t: Trace, every: int = 1) -> list[Folded]:
    if every == 1:
        return fold(play(Case([t], AT)), t.facts)
    engine = DetectionEngine(t.facts)
    return fold([f for b in lightly(t.batches(), every) for f in engine.observe(b)], t.facts)


def only(t: Trace, every: int = 1) -> tuple[Folded, Explanation]:
    [incident] = incidents(t, every)
    return incident, explain(incident.named, t.facts)


# ---- a loss that stays a little higher


def quieter(t: Trace, factor: float) -> None:
    """The same losses with less noise."""
    smooth = 2.2 + 1.2 * np.exp(-np.arange(t.num_steps) / 120) + 2.5 * np.exp(-np.arange(t.num_steps) / 15)
    t.steps["loss"] = smooth + factor * (t.steps["loss"] - smooth)


@pytest.mark.parametrize(("share", "noise", "within"), [(0.10, 0.3, 16), (0.18, 0.5, 16), (0.18, 1.0, 40)])
def test_a_loss_that_stays_some_percent_higher_is_information_and_not_fp8(
    share: float, noise: float, within: int
) -> None:
    t = healthy(3, STEPS)
    quieter(t, noise)
    t.steps["loss"][AT:] *= 1 + share
    incident, words = only(t)
    assert (incident.mode, incident.severity, words.verdict) == ("bad-batch", "info", "shared")
    assert abs(incident.first.onset - AT) <= 3
    assert incident.first.step <= AT + within
    assert "The loss rose by 1" in words.title
    assert "FP8 is not the cause" in words.cause


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_falls_or_climbs_little_by_little_has_no_new_level(seed: int) -> None:
    t = healthy(seed, 400, 1)
    t.steps["loss"] += np.maximum(np.arange(400) - 200, 0) * 0.002
    assert [i.mode for i in incidents(t)] == []


# ---- a mild clip of one step


@pytest.mark.parametrize("light", [1, 64])
def test_a_mild_clip_of_one_step_is_on_the_timeline(light: int) -> None:
    t = healthy(3, 160, recipe="delayed", hybrid=True)
    one = t.mask(DOWN, "input")
    for name in ("scale_ratio_max", "scale_ratio_min"):
        t.columns[name][AT, one] = 4.0
    incident, words = only(t, light)
    assert (incident.mode, incident.severity) == ("delayed-clip", "info")
    assert (incident.first.onset, incident.last_step) == (AT, AT)
    assert "clip depth 4" in words.title


def test_a_scale_that_moves_between_micro_batches_answers_its_history() -> None:
    """Each new high of the first micro-batch is answered in the same step: the next one has no more to answer."""
    t = healthy(3, 150, 1, recipe="delayed", hybrid=True)
    one, at = t.mask("layers.0.mlp.down_proj", "input"), np.arange(150)
    scale, depth, up = np.where(at > 60, 0.02, 0.018), np.where(at == 60, 0.8, 0.5), np.zeros(150)
    for k, step in enumerate((AT, AT + 3, AT + 6)):
        depth[step], up[step] = 0.9, 4.0 + k
    t.grow(one, up)
    first = np.where(up > 0, 0.9 * scale, scale)
    for name, values in (("scale_inv_max", scale), ("scale_inv_min", first), ("scale_ratio_max", depth)):
        t.columns[name][:, one] = values[:, None]
    assert [i.mode for i in incidents(t) if i.mode == "frozen-scale"] == []


def test_harm_that_only_full_samples_hold_is_counted_by_them() -> None:
    """A clip of 1.3 times the limit in each step costs 12 dB here; the steps between samples cannot say so."""
    t = healthy(3, 400, recipe="delayed", hybrid=True)
    one, after = t.mask(DOWN, "input"), np.arange(400) >= AT
    for name in ("scale_ratio_max", "scale_ratio_min"):
        t.columns[name][after[:, None] & one] = 1.3
    t.set_sqnr(one, np.where(after, 19.0, 31.5))
    t.columns["scale_inv_max"][:, one] *= np.exp2(np.random.default_rng(0).normal(0, 0.02, (400, 1)))  # it moves
    t.columns["scale_inv_min"][:, one] = t.columns["scale_inv_max"][:, one]
    got = [i for i in incidents(t, 16) if i.mode == "delayed-clip"]
    assert [i.severity for i in got] == ["critical"]
    assert got[0].first.step <= AT + 32


# ---- the number that made it fire is the number in the title


def test_underflow_that_fired_is_in_the_title_and_the_healthy_sqnr_is_not() -> None:
    t = healthy(3, STEPS)
    one = t.mask(DOWN, "input")
    t.columns["num_underflow"][:, one] = (0.13 * t.columns["num_nonzero"][:, one]).astype(np.int64)
    incident, words = only(t)
    assert incident.mode == "chronic-quantization-noise"
    assert "0.13 of the elements become 0" in words.title
    assert "dB" not in words.title
    assert words.evidence[0]["field"] == "underflow_ratio"


@pytest.mark.parametrize("every", [1, 16])
def test_an_operand_that_is_noise_is_critical_and_no_matter_of_granularity(every: int) -> None:
    t = healthy(3, STEPS)
    one = t.mask(DOWN, "input", "rowwise")
    t.set_sqnr(one, np.where(np.arange(STEPS) >= AT, 0.4, 31.5))
    incident, words = only(t, every)
    assert incident.severity == "critical"
    assert incident.first.step <= AT + 2 * every
    assert "0.4 dB" in words.title
    assert "finer tiles do not heal it" in words.cause
    assert not any("granularity" in f["text"].lower() for f in words.fix)


# ---- a layer that is dead in one direction


def zero(t: Trace, mask: np.ndarray, *, tokens: bool = True) -> None:
    c = t.columns
    for name in ("amax_max", "num_nonzero", "num_underflow", "tile_noise_ratio_sum"):
        c[name][AT:, mask] = 0
    c["amax_min_nonzero"][AT:, mask], c["scale_ratio_min"][AT:, mask], c["scale_ratio_max"][AT:, mask] = (
        np.inf,
        np.inf,
        0,
    )
    if tokens:
        c["num_zero_tiles"][AT:, mask] = c["num_tiles"][AT:, mask]
    else:
        c["num_zero_tiles"][AT:, mask] = c["num_tiles"][AT:, mask] = c["num_elements"][AT:, mask] = 0


def test_an_input_that_became_zero_behind_a_residual_is_told() -> None:
    t = healthy(3, STEPS)
    zero(t, t.mask(GATE, "input"))
    incident, words = only(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("dead-layer", "info", AT)
    assert words.title == f"The input of {GATE} is all zero"
    assert "gradient did not" in words.cause


@pytest.mark.parametrize("how", ["zero", "collapsed"])
def test_an_output_that_is_frozen_has_no_gradient_and_is_told(how: str) -> None:
    t = healthy(3, STEPS)
    grads = t.mask(GATE, "grad_output")
    if how == "zero":
        zero(t, grads)
    else:
        t.grow(grads, np.where(np.arange(STEPS) >= AT, -12.0, 0.0))
    incident, words = only(t)
    assert (incident.mode, incident.severity) == ("dead-layer", "info")
    assert words.title.startswith(f"The gradient of {GATE}")
    assert AT <= incident.first.onset <= AT + 1


def test_an_expert_without_tokens_is_told() -> None:
    t = healthy(3, STEPS)
    zero(t, t.mask(GATE, "input") | t.mask(GATE, "grad_output"), tokens=False)
    incident, words = only(t)
    assert (incident.mode, incident.severity) == ("dead-layer", "info")
    assert "It got no tokens" in words.cause


SILENCE = {
    "module": "is no longer called",
    "gradient": "no longer gets a gradient",
    "wgrad": "no longer computes the gradient of its weight",
}


@pytest.mark.parametrize("what", SILENCE)
def test_a_module_that_is_no_longer_called_and_one_that_no_gradient_reaches_are_told(what: str) -> None:
    t = healthy(3, 260)
    of_gate = {
        "module": t.mask(GATE),
        "gradient": t.mask(GATE, "grad_output"),
        "wgrad": t.mask(GATE, direction="columnwise"),
    }
    silent = of_gate[what]
    t.columns["measured"][AT:, silent] = 0
    incident, words = only(t)
    assert (incident.mode, incident.severity, incident.first.onset) == ("dead-layer", "info", AT)
    assert incident.first.step < AT + 70
    assert incident.last_step > 240
    assert words.title == f"{GATE} {SILENCE[what]} since step {AT}"


def test_an_expert_that_rests_now_and_then_is_silent() -> None:
    t = healthy(3, 400)
    rests = (np.arange(400) % 40) > 12
    t.columns["measured"][np.ix_(rests, t.mask(GATE))] = 0
    assert incidents(t) == []


def test_an_expert_that_decays_while_it_rests_is_not_corrupted() -> None:
    """By a twentieth of an octave in each step, as weight decay of many micro-steps does: when it is called again it has moved at once."""
    t = healthy(3, 400)
    at = np.arange(400)
    rests = (at >= 100) & (at < 340)
    t.grow(t.mask(GATE, "weight"), -0.05 * np.clip(at - 100, 0, 240))
    t.columns["measured"][np.ix_(rests, t.mask(GATE))] = 0
    assert [i for i in incidents(t) if i.mode == "silent-data-corruption"] == []


# ---- a run that is resumed in a new process


def resumed(t: Trace, *, back: int = 0, lr: float = 1.0, lr_steps: int = 0) -> list[Folded]:
    """The trace up to AT, then a new session that begins `back` steps earlier; with the LR and what it does to the weights."""
    at = np.arange(t.num_steps)
    first, second = replace(t), replace(t, session="f" * 32)
    engine = DetectionEngine(t.facts)
    found = [f for b in list(first.batches(8))[: AT // 8] for f in engine.observe(b)]
    assert [f for f in found if f.severity != "info"] == []
    if lr_steps:
        fault = (at >= AT - back) & (at < AT - back + lr_steps)
        second.steps = t.steps.copy()
        second.steps["lr"][fault] *= lr
        grown = np.cumsum(np.where(np.roll(fault, 1), 0.35, 0.0))
        second.columns = {name: v.copy() for name, v in t.columns.items()}
        second.grow(t.mask(operand="weight"), grown)
        second.steps["loss"] += np.where(at > AT - back, 2.0 * np.clip(at - AT + back, 0, 3) / 3, 0.0)
        second.steps["grad_norm"][at > AT - back] *= 8
    for b in list(second.batches(8))[(AT - back) // 8 :]:
        found += engine.observe(b)
    return fold(found, t.facts)


@pytest.mark.parametrize("back", [0, 40])
def test_a_learning_rate_times_thirty_right_after_a_resume_is_told(back: int) -> None:
    got = [i for i in resumed(healthy(3, STEPS), back=back, lr=30.0, lr_steps=3) if i.severity != "info"]
    assert [i.mode for i in got] == ["optimizer-divergence"]
    assert AT - back <= got[0].first.onset <= AT - back + 2
    assert got[0].first.step <= AT - back + 5
    lr = next(e for e in got[0].first.evidence if e.field == "lr")
    assert (lr.value, lr.baseline) == (pytest.approx(0.06), pytest.approx(0.002))


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
@pytest.mark.parametrize("back", [0, 8, 40])
def test_a_healthy_resume_is_silent(recipe: str, back: int) -> None:
    assert [i.mode for i in resumed(healthy(4, 240, recipe=recipe, hybrid=recipe == "delayed"), back=back)] == []


def test_a_run_that_begins_again_from_scratch_is_not_held_against_its_past() -> None:
    """Nor is it blind until it has come as far as the attempt before."""
    old, new = healthy(5, 120, first_step=1000), healthy(6, 160, growth=0.02)
    new.session = "f" * 32
    new.grow(new.mask(operand="input"), np.full(160, 5.0))
    new.grow(new.mask(DOWN, "input"), np.where(np.arange(160) >= AT, 10.0, 0.0))
    engine = DetectionEngine(old.facts)
    found = [f for t in (old, new) for b in t.batches(8) for f in engine.observe(b)]
    assert [(i.mode, i.first.step) for i in fold(found, old.facts)] == [("outlier-growth", AT)]


# ---- flags that changed at a resume


def test_a_session_that_registers_before_the_last_batches_of_the_one_before_changed_at_its_own_first_step() -> None:
    def of(attempt: int, **facts: object) -> SessionFacts:
        return SessionFacts(f"{attempt:032x}", 0, attempt, backend="cpu", fingerprint=f"{attempt:012x}", facts=facts)

    first, second = healthy(3, 32, 1), healthy(3, 16, 1, first_step=32)
    first.session, second.session = f"{1:032x}", f"{2:032x}"
    engine = DetectionEngine(first.facts)
    engine.add_sessions([of(1, margin=0)])
    batches = list(first.batches())
    found = [f for b in batches[:2] for f in engine.observe(b)]
    engine.add_sessions([of(2, margin=2)])
    again = DetectionEngine.load(engine.dump(), first.facts)
    found += [f for b in (*batches[2:], *second.batches()) for f in again.observe(b)]
    assert [(f.mode, f.step) for f in found] == [("recipe-mismatch", 32)]


def changed(backend: str, **flags: str) -> tuple[Folded, Explanation]:
    def session(attempt: int, **facts: object) -> SessionFacts:
        made = {"input.eps": 0.0, "margin": 0, "grad_output.power_2_scale": True, "recipe": "delayed", **facts}
        fingerprint = f"{attempt:012x}"
        return SessionFacts(f"{attempt:032x}", 0, attempt, backend=backend, fingerprint=fingerprint, facts=made)

    first, second = healthy(3, 16, 1), healthy(3, 32, 1, first_step=16)
    first.session, second.session = f"{1:032x}", f"{2:032x}"
    engine = DetectionEngine(first.facts)
    engine.add_sessions([session(1, **{f"flag.{k}": "tensorwise" for k in flags})])
    found = [f for b in first.batches() for f in engine.observe(b)]
    news: dict[str, object] = {
        "input.eps": 1e-6,
        "margin": 2,
        "grad_output.power_2_scale": False,
        "recipe": "blockwise",
    }
    engine.add_sessions([session(2, **news, **{f"flag.{k}": v for k, v in flags.items()})])
    found += [f for b in second.batches() for f in engine.observe(b)]
    [incident] = fold(found, first.facts)
    return incident, explain(incident.named, first.facts)


@pytest.mark.parametrize(
    ("backend", "flags", "names"),
    [
        ("cpu", {}, ["FP8_QUANT_FWD_INP_AMAX_EPS", "margin", "NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2", "recipe"]),
        (
            "transformer_engine",
            {"fp8_recipe": "blockwise"},
            [
                "recipe.fp8_quant_fwd_inp.amax_epsilon",
                "--fp8-margin",
                "recipe.fp8_quant_bwd_grad.power_2_scale",
                "--fp8-recipe",
                "recipe",
            ],
        ),
    ],
)
def test_all_flags_that_changed_at_a_resume_are_named_as_the_framework_names_them(
    backend: str, flags: dict[str, str], names: list[str]
) -> None:
    incident, words = changed(backend, **flags)
    assert incident.mode == "recipe-mismatch"
    assert {e["field"] for e in words.evidence} == {*names, "fingerprint"}
    told = next(e for e in words.evidence if e["field"] == names[1])
    assert (told["baseline"], told["value"]) == (0, 2)
    assert "fingerprint" not in words.title
    assert f"and {len(names) - 3} more" in words.title
    assert all(any(name in f["text"] for f in words.fix) for name in names)
    assert all(name in words.cause for name in names)


@pytest.mark.parametrize(
    ("before", "now", "told", "fix"),
    [
        ({}, {"fp8_param_gather": "1"}, ("not given", "1"), "Leave --fp8-param-gather out, as before."),
        ({"fp8_param_gather": "1"}, {}, ("1", "not given"), "Give --fp8-param-gather the value it had: 1."),
    ],
)
def test_a_flag_that_came_or_went_at_a_resume_is_a_change(
    before: dict[str, str], now: dict[str, str], told: tuple[str, str], fix: str
) -> None:
    """With it the fingerprint alone would have said that something changed."""

    def session(number: int, flags: dict[str, str]) -> SessionFacts:
        facts = {"recipe": "delayed", **{f"flag.{k}": v for k, v in flags.items()}}
        return SessionFacts(f"{number:032x}", 0, number, fingerprint=f"{number:012x}", facts=facts)

    changes = differences(session(2, now), session(1, before), "the session before")
    assert [(c.fact, c.baseline, c.value) for c in changes[1:]] == [("flag.fp8_param_gather", *told)]
    t = healthy(3, 16, 1)
    words = explain(mismatch(changes, 16, 0, resumed=True), t.facts)
    assert words.title == f"FP8 configuration changed: --fp8-param-gather {told[0]} → {told[1]}"
    assert fix in {f["text"] for f in words.fix}


@pytest.mark.parametrize("fact", ["restart_count", "logits_unseen", "gradients_unseen", "replaced"])
def test_what_a_restart_is_and_what_is_not_seen_are_no_flags(fact: str) -> None:
    """A job that its launcher starts again says so by a number."""
    sessions = [SessionFacts(f"{n:032x}", 0, n, facts={"recipe": "blockwise", fact: n}) for n in (1, 2)]
    assert differences(sessions[1], sessions[0], "the session before") == []


# ---- hashes that go round: each weight once in 32 steps


def hashed(num: int = 4, *, mesh: bool = True, bad: int | None = AT + 3, sharded: bool = False, hit: int = 2) -> Case:
    """Replicas whose weights are hashed in turn, each once in 32 steps, all in the first; one weight of a rank is hit."""
    ranks = _replicas(5, num)
    weights = np.flatnonzero(ranks[0].mask(operand="weight"))
    rng = np.random.default_rng(5)
    for t in ranks:
        c = t.columns
        c["weight_hash"] = np.zeros((t.num_steps, len(t.sites)), dtype=np.int64)
        for k, j in enumerate(weights):
            at = (np.arange(t.num_steps) % 32 == k * 32 // len(weights)) | (np.arange(t.num_steps) == 0)
            own = np.arange(t.num_steps) * 977 + k if not sharded else rng.integers(1, 1 << 60, t.num_steps)
            c["weight_hash"][:, j] = np.where(np.arange(t.num_steps) > 0, own, 0 if k < 3 else own)
            c["measured"][at, j] |= int(Measured.HASH)
    if bad is not None:
        ranks[hit].columns["weight_hash"][bad:, ranks[hit].one(OUT, "weight")] ^= 1 << 17
    sessions = [
        SessionFacts(session=t.session, rank=t.rank, world_size=num, mesh={"dp": t.rank} if mesh else {}) for t in ranks
    ]
    return Case(ranks, bad or 0, [sessions])


@pytest.mark.parametrize("mesh", [True, False])
def test_a_weight_that_differs_is_told_with_the_steps_between_which_it_happened(mesh: bool) -> None:
    case = hashed(mesh=mesh)
    sites = case.traces[0].facts
    [incident] = fold(play(case), sites)
    assert (incident.mode, incident.severity) == ("silent-data-corruption", "critical")
    found = incident.first
    last, first = found.extra["last_agreed"], found.extra["first_differed"]
    assert last < AT + 3 <= first == found.step
    assert first - last == 32
    assert found.onset == last + 1
    words = explain(found, sites)
    assert f"since a step from {last + 1} to {first}" in words.title
    assert f"after step {last}" in words.cause
    assert len(play(hashed(mesh=mesh))) >= 2  # it is found again, and is the same incident


@pytest.mark.parametrize(("num_ranks", "tied"), [(2, True), (3, False), (4, False)])
def test_of_two_replicas_that_differ_neither_is_called_wrong(num_ranks: int, tied: bool) -> None:
    """Of three and four the odd one is rank 1; of two nobody can tell."""
    case = hashed(num_ranks, hit=1)
    sites = case.traces[0].facts
    [incident] = fold(play(case), sites)
    words = explain(incident.first, sites)
    if tied:
        assert words.place["ranks"] == [0, 1]
        assert "differ between ranks 0 and 1" in words.title
        assert "hashes do not tell which is right" in words.cause
        assert "alone" not in words.cause
        assert "do not tell which of them is wrong" in words.fix[0]["text"]
        assert not [e for e in incident.first.evidence if e.field == "minority_ranks"]
    else:
        assert words.place["ranks"] == [1]
        assert "differ on rank 1" in words.title
        assert "rank 1" in words.cause
        assert "alone has other bits" in words.cause


def test_what_is_shown_of_several_odd_ranks_is_that_of_the_rank_that_is_named() -> None:
    sides = sides_of([3, 0, 1, 2, 4], np.array([7, 5, 5, 9, 5]))
    assert (sides.odd, sides.value, sides.other, sides.tied) == ([2, 3], 9, 5, False)
    assert sides_of([1, 0], np.array([7, 5])) == ([0, 1], 5, 7, True)
    assert sides_of([3, 2, 1, 0], np.array([5, 7, 7, 5])) == ([0, 1, 2, 3], 5, 7, True)


def test_shards_that_begin_as_equal_zeros_are_not_taken_for_replicas() -> None:
    assert play(hashed(mesh=False, bad=None, sharded=True)) == []
    assert play(hashed(mesh=False, bad=None)) == []


# ---- the channel of an outlier


@pytest.mark.parametrize("every", [1, 64])
def test_an_outlier_that_owns_its_tile_is_told_with_its_channel(every: int) -> None:
    """Its tile of 128 channels by the rowwise site, the channel itself by the columnwise one, whose tiles are one wide."""
    t = healthy(3, 160)
    t.grow(t.mask(DOWN, "input"), np.where(np.arange(160) >= AT, 11.5, 0.0))
    t.columns["worst_tile"][AT:, t.one(DOWN, "input", "columnwise")] = (0, 137)
    incident, words = only(t, every)
    assert (incident.mode, incident.first.step) == ("outlier-growth", AT)
    assert incident.first.tile == (3, 1)
    assert "in channel 137." in words.cause
    t.columns["worst_tile"][AT:, t.one(DOWN, "input", "columnwise")] = (0, 5)  # of another tile: not the same outlier
    assert "channels 128 to 255" in only(t, every)[1].cause


# ---- what folding keeps apart


@pytest.mark.parametrize("later", [3, 6])
def test_random_batches_and_an_inf_after_them_are_two_incidents_each_with_its_onset(later: int) -> None:
    t = healthy(3, 160)
    t.steps["loss"][AT : AT + 3] += 2.5
    t.steps["grad_norm"][AT : AT + 3] = 12.0
    i = t.one(DOWN, "input")
    c = t.columns
    c["num_inf"][AT + later, i], c["num_sentinel_tiles"][AT + later, i], c["amax_max"][AT + later, i] = 1, 1, np.inf
    got = {(i.mode, i.first.onset) for i in incidents(t)}
    assert got == {("bad-batch", AT), ("inf-laundering", AT + later)}


# ---- weights that were initialised at zero


@pytest.mark.parametrize(("below", "severity"), [(5.0, "info"), (0.0, "warning")])
def test_a_weight_that_catches_up_with_the_others_warns_nobody(below: float, severity: str) -> None:
    t = healthy(3, 180)
    one = t.mask(DOWN, "weight")
    middle = np.median(np.log2(t.columns["amax_max"][AT][t.mask(operand="weight")]))
    t.grow(one, np.full(180, middle - float(np.log2(t.columns["amax_max"][AT, one][0])) - below))
    t.grow(one, 0.12 * np.clip(np.arange(180) - AT, 0, 40))
    incident, words = only(t)
    assert (incident.mode, incident.severity) == ("outlier-growth", severity)
    assert DOWN in words.title


# ---- a loss that falls to another level at once


def test_a_loss_that_falls_at_once_and_stays_is_information() -> None:
    """As where one batch is repeated, or labels stand in the inputs; a loss that falls as ever is not told."""
    t = healthy(3, STEPS)
    quieter(t, 0.5)
    t.steps["loss"][AT:] *= 0.7
    incident, words = only(t)
    assert (incident.mode, incident.severity, words.verdict) == ("bad-batch", "info", "shared")
    assert abs(incident.first.onset - AT) <= 3
    assert "The loss fell by" in words.title
    assert "a batch that is repeated" in words.cause


@pytest.mark.parametrize(
    ("first", "is_told"), [(1.0, False), (1.5, True), (-1.0, True)], ids=["where it began", "learnt", "negative"]
)
def test_a_loss_that_leaves_where_the_run_began_learns(first: float, is_told: bool) -> None:
    """As plain SGD leaves a plateau."""
    t = healthy(3, STEPS)
    level = np.where(np.arange(STEPS) < AT, 2.3, 1.4) * np.sign(first)
    t.steps["loss"] = (
        level
        + np.random.default_rng(0).normal(0, 0.01, STEPS)
        - (0 if first > 0 else np.where(np.arange(STEPS) < AT, 0, 2.0))
    )
    t.steps["loss"][0] *= abs(first)
    assert (
        "The loss fell" in " ".join(explain(i.named, t.facts).title for i in fold(play(Case([t], AT)), t.facts))
    ) == is_told


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_falls_with_the_learning_rate_or_slowly_is_silent(seed: int) -> None:
    t = healthy(seed, 400, 1)
    at = np.arange(400)
    t.steps["loss"] *= np.interp(at, [0, 150, 250, 400], [1, 1, 0.75, 0.7])
    t.steps["lr"] = 2e-3 * np.interp(at, [0, 150, 400], [1, 1, 0.01])
    assert [i.mode for i in incidents(t)] == []


def test_a_level_is_held_against_losses_from_before_the_warm_up_was_over() -> None:
    t = healthy(3, 120, 1)
    quieter(t, 0.3)
    t.steps["loss"][70:] *= 1.25
    incident, _ = only(t)
    assert (incident.mode, incident.first.step < 70 + 12) == ("bad-batch", True)
