"""Failures that people reported from real trainings: what must be said of each."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from detect.play import causes, play
from detect.scenarios import DOWN, GATE, OUT, STEPS, Case, K, Q, _replicas, _shadow, nan_after, put_inf, put_nan
from detect.trace import Trace, healthy

from fp8watch_agent.record import Measured, Site, site_id
from fp8watch_server.detect.families.unobserved import _items
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.modes import SLUGS
from fp8watch_server.detect.precedence import explains
from fp8watch_server.detect.sessions import SessionFacts, left_out
from fp8watch_server.incidents.explain import Explanation, explain

NAN = float("nan")


def said(case: Case) -> tuple[Finding, Explanation]:
    sites = {**case.traces[0].facts}
    found = causes(play(case))
    assert found
    return found[0], explain(found[0], sites)


def modes(case: Case) -> set[str]:
    return {f.mode for f in play(case)}


def session(trace: Trace, **kw: object) -> SessionFacts:
    return SessionFacts(**{"session": trace.session, "rank": trace.rank, **kw})  # type: ignore[arg-type]


def test_nan_gradients_at_once_with_eps_0() -> None:
    """Operand, module, GEMM and tile of the first degenerate scale, and which eps to set."""
    t = healthy(1, 20)
    j = t.one(OUT, "grad_output")
    t.columns["scale_inv_min"][0, j], t.columns["num_off_scale_tiles"][0, j] = 0.0, 1
    t.columns["off_scale_tile"][0, j] = (7, 1)
    behind = np.array([s.order > t.sites[j].order for s in t.sites])
    put_nan(t, 0, behind)
    finding, words = said(Case([t], 0))
    assert (finding.mode, finding.step) == ("zero-tile-eps", 0)
    assert words.place["module"] == OUT
    assert (words.place["operand"], words.place["gemm"], words.place["tile"]) == ("grad_output", "dgrad", [7, 1])
    assert "FP8_QUANT_BWD_GRAD_AMAX_EPS=1e-12" in words.fix[0]["text"]


def test_the_inf_rule_of_blockwise_scaling_launders_with_the_tile_named() -> None:
    t = healthy(2, 20)
    put_inf(t, 11, t.one(DOWN, "input"))
    finding, words = said(Case([t], 11))
    assert (finding.mode, words.place["tile"], words.verdict) == ("inf-laundering", [37, 1], "fp8")


def test_e5m2_bytes_read_as_e4m3_make_gradients_too_small_by_two_to_the_seven() -> None:
    """One module's dgrad and wgrad against their shadow; the forward is right."""
    t = healthy(3, 20)
    _shadow(t, np.random.default_rng(0))
    for direction in ("rowwise", "columnwise"):
        j = t.one(GATE, "grad_output", direction)
        for name in ("gemm_gain_min", "gemm_gain_max"):
            t.columns[name][8:, j] = 2.0**-7
        t.columns["gemm_error"][8:, j] = 1 - 2.0**-7
    finding, words = said(Case([t], 8))
    assert (finding.mode, finding.step, words.place["module"]) == ("kernel-output-fault", 8, GATE)
    assert "2^-7" in words.title
    assert "dgrad/wgrad" in words.title
    assert "fprop is right" in words.cause


def test_a_regex_left_three_of_477_modules_in_bf16() -> None:
    """Coverage 474/477, the three names, against the fingerprint of the session before."""
    before, after = healthy(4, 20), healthy(5, 20, first_step=20)
    names = ["layers.7.mlp.gate_proj", "layers.7.mlp.up_proj", "layers.9.attention.q_proj"]
    facts = {"left_out": "lm_head (output head)", "num_linears": 477, "device": "NVIDIA H100"}
    fewer = {
        "left_out": "lm_head (output head); " + "; ".join(f"{n} (filter_fn)" for n in names),
        "num_linears": 474,
        "device": "NVIDIA H200",
    }
    old = session(before, attempt=1, fingerprint="aaaa", facts=facts)
    new = session(after, attempt=2, fingerprint="bbbb", facts=fewer)
    finding, words = said(Case([after], 20, [[old], [new]]))
    assert finding.mode == "recipe-mismatch"
    assert "474/477" in words.title
    assert all(n in words.cause for n in names)
    told = {e["field"] for e in words.evidence}
    assert {"fingerprint", "coverage", "left_out"} <= told
    assert "device" not in told


def test_a_filter_that_leaves_out_too_much_is_told_against_the_checkpoint() -> None:
    t = healthy(4, 20)
    facts = {"left_out": "lm_head (output head); a.b (filter_fn)", "num_linears": 476, "checkpoint.num_linears": 477}
    finding, words = said(Case([t], 0, [[session(t, facts=facts)]]))
    assert finding.mode == "recipe-mismatch"
    assert "476/477" in words.title
    assert "a.b" in words.title


@pytest.mark.parametrize(
    ("groups", "verdict"),
    [
        (["moments"], "shared"),
        (["weights", "codes", "scales"], "shared"),
        (["codes", "scales"], "fp8"),
        (["delayed"], "fp8"),
    ],
)
def test_what_was_loaded_otherwise_than_saved_is_fp8s_where_weights_and_moments_are_the_same(
    groups: list[str], verdict: str
) -> None:
    t, later = healthy(4, 20), healthy(5, 20, first_step=20)
    names = {f"loaded_{group}": "layers.0.mlp.up_proj.weight of 42" for group in groups}
    facts = names | {f"checkpoint.{name}": "as saved" for name in names}
    old, new = session(t, attempt=1, facts={}), session(later, attempt=2, facts=facts)
    finding, words = said(Case([later], 20, [[old], [new]]))
    assert (finding.mode, finding.verdict) == ("recipe-mismatch", verdict)
    assert words.title.startswith(
        f"What was loaded is not what was saved: {groups[0]} of layers.0.mlp.up_proj.weight of 42"
    )
    assert {e["field"] for e in words.evidence} == set(names)


def test_power_of_two_scales_that_were_forced_are_an_event_at_that_step_and_show_in_the_sqnr() -> None:
    t = healthy(6, STEPS, power_2_scale=False)
    mask = t.mask(operand="input")
    t.set_sqnr(mask, t.sqnr(mask) - 3.5 * (np.arange(STEPS)[:, None] >= 120))
    t.columns["scale_ratio_min"][120:, mask] = 0.6
    case = Case([t], 120, sites_at={120: [replace(s, power_2_scale=True) for s in t.sites if s.operand == "input"]})
    found = causes(play(case))
    assert [(f.mode, f.step) for f in found][:1] == [("recipe-mismatch", 120)]
    words = explain(found[0], t.facts)
    assert words.evidence[0]["field"] == "NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2"
    assert (words.evidence[0]["value"], words.evidence[0]["baseline"]) == (True, False)


def test_tensor_parallel_ranks_that_take_amax_of_their_shard_disagree_before_the_nan() -> None:
    ranks = _replicas(7, 2, recipe="current")
    for trace in ranks:
        trace.rescale(np.ones(len(trace.sites), dtype=bool))
        for name in ("scale_ratio_max", "scale_ratio_min"):
            trace.columns[name][:] = 1.0
        weights = trace.mask(operand="weight")
        for name in ("scale_inv_max", "scale_inv_min"):
            trace.columns[name][:, ~weights] = 1.0  # inputs are not reduced here, and equal
        trace.columns["amax_max"][:, weights] *= 1.0 + 0.1 * trace.rank
        trace.rescale(weights)
        for step in range(50, STEPS):
            trace.steps["loss"][step] = NAN
    sessions = [session(t, mesh={"tp": t.rank}, facts={"amax_reduction": "tp"}) for t in ranks]
    found = causes(play(Case(ranks, 0, [sessions])))
    assert found[0].mode == "cross-rank-disagreement"
    assert found[0].step <= 1
    words = explain(found[0], ranks[0].facts)
    assert "tp" in words.fix[0]["text"]


def test_recomputation_in_another_precision_is_told_by_its_fingerprint() -> None:
    t = healthy(8, 20)
    facts = {"recompute_fingerprint": "cccc"}
    finding, words = said(Case([t], 0, [[session(t, fingerprint="aaaa", facts=facts)]]))
    assert (finding.mode, finding.step) == ("recipe-mismatch", 0)
    assert "recomputation" in words.title
    assert {e["value"] for e in words.evidence} == {"aaaa"}
    assert {e["baseline"] for e in words.evidence} == {"cccc"}


def test_uninitialised_rows_of_an_expert_without_tokens() -> None:
    """The kernel, the expert and its token count."""
    t = healthy(9, 20)
    expert = "layers.1.experts.17.down_proj"
    base: Site = t.sites[t.one(DOWN, "input")]
    sites = [
        replace(base, id=site_id(expert, o, "rowwise"), module=expert, operand=o, gemm=g, order=base.order + k)
        for k, (o, g) in enumerate([("input", "fprop"), ("weight", "fprop"), ("output", "fprop")])
    ]
    j = t.add_sites(sites, measured=int(Measured.COUNTS))
    for k, i in enumerate(j):
        t.columns["order"][:, i] = base.order + k
    t.columns["num_nan"][12, j[2]] = 512
    nan_after(t, 12, base.order + 3)
    case = Case([t], 12)
    finding, words = said(case)
    assert finding.mode == "kernel-output-fault"
    assert words.place["module"] == expert
    assert "got no tokens" in words.cause
    assert {e["field"]: e["value"] for e in words.evidence}["tokens"] == 0


def test_one_nan_of_a_wgrad_poisons_a_checkpoint_that_is_flagged() -> None:
    t = healthy(10, 20)
    _shadow(t, np.random.default_rng(0))
    j = t.one(GATE, "grad_output", "columnwise")
    t.columns["output_num_nonfinite"][2, j] = 1
    for step in range(3, 20):  # the update wrote it into the weight
        put_nan(t, step, np.ones(len(t.sites), dtype=bool))
    t.logs["checkpoint_saved"] = np.where(np.arange(20) == 4, 1.0, np.nan)
    found = play(Case([t], 2))
    first = found[0]
    words = explain(first, t.facts)
    assert (first.mode, first.step) == ("kernel-output-fault", 2)
    assert (words.place["module"], words.place["gemm"]) == (GATE, "wgrad")
    assert {f.mode for f in found} == {"kernel-output-fault"}
    news = [e for f in found for e in f.extra.get("news", ())]
    assert [(e.field, e.value) for e in news] == [("checkpoint_saved", 4)]


def test_a_resume_whose_scales_do_not_continue() -> None:
    before = healthy(11, 60, recipe="delayed")
    after = healthy(11, 60, recipe="delayed", first_step=40)
    after.session = "f" * 32
    after.columns["scale_inv_max"][:2], after.columns["scale_inv_min"][:2] = 1.0, 1.0  # the history was not saved
    case = Case([before], 60)
    from fp8watch_server.detect.engine import DetectionEngine

    engine = DetectionEngine(before.facts)
    assert [f.mode for f in play(case, engine=engine)] == []
    found = causes(play(Case([after], 40), engine=engine))
    words = explain(found[0], after.facts)
    assert (found[0].mode, found[0].step) == ("recipe-mismatch", 40)
    assert "do not continue" in words.title
    assert [n.kind for n in engine.take_notices()] == ["restart"]


def test_a_resume_whose_scales_continue_says_nothing() -> None:
    from fp8watch_server.detect.engine import DetectionEngine

    before = healthy(11, 60, recipe="delayed")
    after = healthy(11, 60, recipe="delayed", first_step=40)
    after.session = "f" * 32
    engine = DetectionEngine(before.facts)
    assert play(Case([before], 60), engine=engine) == []
    assert play(Case([after], 60), engine=engine) == []


def test_amax_reduced_over_the_wrong_group_is_named_with_the_group() -> None:
    from detect.scenarios import cross_rank

    case = cross_rank(3, 1)
    found = [f for f in causes(play(case)) if f.mode == "cross-rank-disagreement"]
    words = explain(found[0], case.traces[0].facts)
    assert found[0].step <= case.onset + 1
    assert {e["field"]: e["value"] for e in words.evidence}["differs_along"] == "tp"
    assert "over tp" in words.fix[0]["text"]


def test_delayed_scaling_and_swiglu_outliers_name_the_channel() -> None:
    from detect.scenarios import BY_NAME

    case = BY_NAME["delayed-clip"].make(4, 2)
    finding = next(f for f in causes(play(case)) if f.mode == "delayed-clip")
    words = explain(finding, case.traces[0].facts)
    assert words.place["module"] == DOWN
    assert "SwiGLU" in words.cause
    case = BY_NAME["outlier-growth"].make(4, 2)
    finding = next(f for f in causes(play(case)) if f.mode == "outlier-growth")
    assert "channels 128 to 255" in explain(finding, case.traces[0].facts).cause


def test_what_the_recipe_sets_already_is_not_advised() -> None:
    from detect.scenarios import BY_NAME

    case = BY_NAME["delayed-clip"].make(4, 2)
    set_so = {"recipe": "delayed", "margin": 1, "amax_history_len": 24, "amax_compute_algo": "max"}
    for facts in (set_so, {k: v for k, v in set_so.items() if k != "margin"} | {"flag.fp8_margin": "1"}):
        case.sessions = [[session(case.traces[0], facts=facts)]]
        finding = next(f for f in causes(play(case)) if f.mode == "delayed-clip")
        advice = " ".join(f["text"] for f in explain(finding, case.traces[0].facts).fix)
        assert "margin=2" in advice
        assert "the 24 passes" in advice


def test_controls_hardware_compiler_and_initialisation_leave_fp8_innocent() -> None:
    """Operands finite, loss not: FP8 is not accused."""
    t = healthy(12, 40)
    t.steps["loss"][30:] = NAN
    finding, words = said(Case([t], 30))
    assert (finding.mode, words.verdict) == ("nan-in-loss", "shared")
    assert "every measured FP8 operand of the forward is finite" in words.title
    t = healthy(13, 40)
    _shadow(t, np.random.default_rng(0))
    t.columns["output_num_nonfinite"][30, t.one(GATE, "input")] = 1
    finding, words = said(Case([t], 30))
    assert (finding.mode, words.verdict) == ("kernel-output-fault", "shared")
    assert "FP8 is innocent" in words.cause


def test_a_probe_names_the_module_that_is_no_linear() -> None:
    t = healthy(14, 20)
    before = t.sites[t.one("layers.1.mlp.gate_proj", "input")]
    norm = "layers.1.mlp_norm"
    probe = replace(before, id=site_id(norm, "output", "rowwise"), module=norm, operand="output", gemm="probe",
                    order=before.order, format="", recipe="")  # fmt: skip
    [j] = t.add_sites([probe], measured=int(Measured.COUNTS))
    t.columns["order"][:] = -1  # as the model is written
    t.sites[j] = replace(probe, order=before.order - 1)
    put_nan(t, 9, np.arange(len(t.sites)) == j)
    nan_after(t, 9, before.order - 1)
    finding, words = said(Case([t], 9))
    assert finding.mode == "nan-in-activation"
    assert words.place["module"] == norm


@pytest.mark.parametrize(
    ("entered", "mode", "title"),
    [
        (32.0, "nan-in-activation", "NaN entered lm_head"),
        (None, "kernel-output-fault", "lm_head"),
        (NAN, "kernel-output-fault", "lm_head"),  # what a client sends is no number of elements
    ],
    ids=["came-in", "not-told", "no-number"],
)
def test_what_entered_a_head_was_not_made_by_its_gemm(entered: float | None, mode: str, title: str) -> None:
    t = healthy(14, 20)
    like = t.sites[t.one("layers.1.mlp.gate_proj", "input")]
    head = replace(like, id=site_id("lm_head", "output", "rowwise"), module="lm_head", operand="output", gemm="fprop",
                   order=10_000, format="", recipe="probe")  # fmt: skip
    [j] = t.add_sites([head], measured=int(Measured.COUNTS))
    put_nan(t, 9, np.arange(len(t.sites)) == j)
    if entered is not None:
        t.logs["nonfinite_input/lm_head"] = np.where(np.arange(20) == 9, entered, NAN)
    finding, words = said(Case([t], 9))
    assert (finding.mode, words.place["module"]) == (mode, "lm_head")
    assert title in words.title
    assert ("32 elements of its input were not finite already" in words.cause) is (mode == "nan-in-activation")


@pytest.mark.parametrize("fault", ["nan", "leap"])
def test_what_a_head_is_given_is_judged_as_what_no_quantiser_reads(fault: str) -> None:
    t = healthy(14, 60)
    like = t.sites[t.one("layers.1.mlp.gate_proj", "input")]
    given = replace(like, id=site_id("lm_head", "input", "rowwise"), module="lm_head", gemm="probe", tile=like.shape, order=10_000,
                    format="", recipe="probe")  # fmt: skip
    put_out = replace(given, id=site_id("lm_head", "output", "rowwise"), operand="output", gemm="fprop", order=10_001)
    j, k = t.add_sites([given, put_out], measured=int(Measured.COUNTS | Measured.AMAX))
    for at in (j, k):
        t.columns["amax_max"][:, at] = 3.0
    if fault == "nan":
        put_nan(t, 50, np.isin(np.arange(len(t.sites)), (j, k)))
        t.logs["nonfinite_input/lm_head"] = np.where(np.arange(60) == 50, 32.0, NAN)
    else:
        t.columns["amax_max"][50:, j] = 3000.0
    finding, words = said(Case([t], 50))
    assert words.place["module"] == "lm_head"
    assert words.place["operand"] == "input"
    if fault == "nan":
        assert (finding.mode, words.title.split(",")[0]) == ("nan-in-activation", "NaN entered lm_head")
        assert "What lm_head was given is the first measured value" in words.cause
    else:
        assert finding.mode == "outlier-growth"
        assert "the input of lm_head: amax leaped" in words.title
        assert "lm_head stays in high precision: what runs before it made it like that" in words.cause
        assert "runs right before lm_head" in words.fix[0]["text"]


@pytest.mark.parametrize("given_nan", [False, True], ids=["finite", "not finite"])
def test_what_a_router_made_of_what_was_finite_is_its_own(given_nan: bool) -> None:
    """Its weight is in high precision, and not looked at."""
    t = healthy(14, 20)
    like = t.sites[t.one("layers.1.mlp.gate_proj", "input")]
    given = replace(like, id=site_id("router", "input", "rowwise"), module="router", gemm="probe", tile=like.shape, order=10_000,
                    format="", recipe="probe")  # fmt: skip
    put_out = replace(given, id=site_id("router", "output", "rowwise"), operand="output", order=10_001)
    j, k = t.add_sites([given, put_out], measured=int(Measured.COUNTS | Measured.AMAX))
    put_nan(t, 9, np.isin(np.arange(len(t.sites)), (j, k) if given_nan else (k,)))
    finding, words = said(Case([t], 9))
    assert (finding.mode, words.place["module"]) == ("nan-in-activation", "router")
    if given_nan:
        assert words.title.startswith("NaN entered router")
        return
    assert words.title.startswith("NaN came out of router, and none went in")
    assert "its weight made it, which is in high precision and not looked at, or what it computes" in words.cause
    assert "torch.isfinite(model.get_submodule('router').weight).all()" in words.fix[0]["text"]


def test_fused_attention_is_a_bound_and_is_said_to_be_one() -> None:
    from detect.scenarios import BY_NAME

    case = BY_NAME["attention-logit-bound"].make(5, 1)
    finding = next(f for f in causes(play(case)) if f.mode == "attention-logit-growth")
    words = explain(finding, case.traces[0].facts)
    assert "bound, not a measurement" in words.cause
    assert words.place["module"] in (Q, K)


EXPERTS = {"not_taken": "layers.*.experts.down_proj (3-D parameter [8, 192, 96], 41 %); conv (Conv1d [64, 64, 3], 3 %)"}


def _nan_in_the_input_of(module: str, facts: dict[str, str]) -> Explanation:
    t = healthy(4, 20)
    j = t.one(module, "input")
    put_nan(t, 9, np.arange(len(t.sites)) == j)
    nan_after(t, 9, t.sites[j].order)
    finding, words = said(Case([t], 9, [[session(t, facts=facts)]]))
    assert (finding.mode, words.place["module"]) == ("nan-in-activation", module)
    return words


def test_a_nan_behind_experts_that_nobody_observes_may_be_theirs() -> None:
    words = _nan_in_the_input_of("layers.1.attention.q_proj", EXPERTS)
    assert "outside the GEMMs" not in words.title + words.cause
    assert "perhaps out of a GEMM that is not observed" in words.title
    assert "GEMMs that are not observed: layers.*.experts.down_proj." in words.cause


def test_a_nan_between_two_sites_of_one_mlp_is_not_of_experts_elsewhere() -> None:
    words = _nan_in_the_input_of("layers.1.mlp.down_proj", EXPERTS)
    assert "from outside the GEMMs" in words.title
    assert "not observed" not in words.cause


def test_without_unobserved_gemms_a_nan_came_from_outside_of_them() -> None:
    assert "from outside the GEMMs" in _nan_in_the_input_of("layers.1.attention.q_proj", {"not_taken": ""}).title


def test_what_is_left_out_of_fp8_and_observed_is_no_suspect() -> None:
    facts = {"left_out": "layers.1.mlp.down_proj (own forward (Lora)); layers.0.mlp.down_proj (own forward (Lora))"}
    assert "from outside the GEMMs" in _nan_in_the_input_of("layers.1.attention.q_proj", facts).title


def test_a_gemm_that_was_announced_and_is_silent_is_a_suspect() -> None:
    facts = {"silent": "layers.*.experts.down_proj (read by einsum, whose product is not recognised)"}
    assert "not observed: layers.*.experts.down_proj" in _nan_in_the_input_of("layers.1.attention.q_proj", facts).cause


@pytest.mark.parametrize(("expert", "said_of_it"), [(17.0, True), (-1.0, False), (float("nan"), False), (1e30, False)])
def test_an_inf_in_an_expert_is_told_with_the_expert_and_its_own_row(expert: float, said_of_it: bool) -> None:
    t = healthy(4, 20)
    j = t.one("layers.1.mlp.down_proj", "weight")
    put_nan(t, 9, np.arange(len(t.sites)) == j)
    site = f"{t.sites[j].module}.weight.{t.sites[j].direction}"
    t.logs |= {
        f"nonfinite_expert/{site}": np.where(np.arange(20) == 9, expert, np.nan),
        f"nonfinite_expert_row/{site}": np.where(np.arange(20) == 9, 5.0, np.nan),
    }
    _, words = said(Case([t], 9, [[session(t)]]))
    assert (", expert 17, tile (" in words.title) == said_of_it
    assert (") of expert 17" in words.cause) == said_of_it


@pytest.mark.parametrize(
    ("experts", "expert"),
    [("layers.*.mlp.down_proj (2)", 1), ("layers.*.mlp.down_proj (4)", None), ("other (2)", None), ("x (1", None)],
)
def test_a_tile_of_a_weight_is_told_with_the_expert_whose_rows_it_has(experts: str, expert: int | None) -> None:
    t = healthy(4, 20)
    j = t.one("layers.1.mlp.down_proj", "weight")  # 256 rows in two tiles: of two experts, or of more than two
    put_nan(t, 9, np.arange(len(t.sites)) == j)
    t.columns["first_nonfinite"][9, j, 0] = 133
    finding, words = said(Case([t], 9, [[session(t, facts={"experts": experts})]]))
    assert finding.tile is not None
    assert finding.tile[0] == 1
    assert finding.extra.get("expert") == expert
    assert (", expert 1, tile (1, " in words.title) == (expert is not None)


@pytest.mark.parametrize("text", ["a" * 32_000, "a (b" * 8_000, "a " * 16_000, "a ((((" * 5_000, "a (" + "()" * 16_000])
def test_a_text_that_lists_nothing_is_read_in_no_time(text: str) -> None:
    began = time.thread_time()
    named = list(_items(text))
    left_out({"left_out": text})
    assert time.thread_time() - began < 1.0  # of the processor: a search from each character takes many seconds
    assert named == []


def test_what_was_left_out_is_read_up_to_where_the_text_was_cut() -> None:
    text = "lm_head (the output head); blocks.*.gate (a router; by its name); blocks.7.w (sha"
    assert left_out({"left_out": text}) == {"lm_head": "the output head", "blocks.*.gate": "a router; by its name"}
    assert list(_items("experts.*.w (3-D (12 of them), 40 %); head (left out)")) == ["experts.*.w", "head"]


def _sensitive(module: str, facts: dict[str, str]) -> list[str]:
    t = healthy(4, 20)
    site = replace(t.sites[0], module=module, id=site_id(module, "input", "rowwise"), order=500)
    [j] = t.add_sites([site], measured=int(Measured.COUNTS))
    for name in t.columns:
        t.columns[name][:, j] = t.columns[name][:, t.one(DOWN, "input")]
    found = causes(play(Case([t], 0, [[session(t, facts=facts)]])))
    return [m for f in found if f.mode == "sensitive-layer-quantized" for m in f.extra["modules"]]


def test_the_gate_of_an_mlp_is_no_router_where_the_session_says_so() -> None:
    gate = "layers.7.mlp.gate"
    assert _sensitive(gate, {}) == [gate]
    assert _sensitive(gate, {"roles": "layers.*.mlp.gate (linear)"}) == []


def test_a_head_of_another_name_is_one_where_the_session_says_so() -> None:
    assert _sensitive("decoder", {}) == []
    assert _sensitive("decoder", {"roles": "decoder (output head)"}) == ["decoder"]


def test_what_a_loop_or_a_model_says_of_itself_is_no_other_recipe() -> None:
    before, after = healthy(5, 20), healthy(5, 20, first_step=20)
    old = session(
        before, attempt=1, facts={"no_step_ended": "", "not_taken": "", "gemm_flops_observed": 0.5, "roles": ""}
    )
    new = {
        "no_step_ended": "x",
        "silent_share": "y",
        "not_taken": "a (b, 1 %)",
        "gemm_flops_observed": 0.4,
        "roles": "a (linear)",
    }
    found = causes(play(Case([after], 20, [[old], [session(after, attempt=2, facts=new)]])))
    assert [f.mode for f in found] == []


@pytest.mark.parametrize("when", ["before the session is known", "after"])
def test_a_load_that_differs_is_told_whenever_the_session_says_it(when: str) -> None:
    t = healthy(3, 40)
    loads = {"loaded_weights": "a.weight of 21", "checkpoint.loaded_weights": "as saved"}
    registered, said = (session(t, facts=facts) for facts in ({}, loads))
    parts = [[said], [], []] if when != "after" else [[registered], [said], [said]]
    (found,) = play(Case([t], 0, parts))
    assert found.mode == "recipe-mismatch"
    assert [e.field for e in found.evidence] == ["loaded_weights"]


def test_a_session_of_an_older_attempt_that_comes_late_says_nothing_of_the_newer_one() -> None:
    t = healthy(3, 40)

    def of(name: str, attempt: int, said: str) -> SessionFacts:
        loads = {"loaded_weights": said, "checkpoint.loaded_weights": "as saved"} if said else {}
        return session(t, session=name, attempt=attempt, facts=loads)

    parts = [[of(t.session, 2, "")], [of("0" * 32, 1, "a.weight of 21")], [of(t.session, 2, "b.weight of 21")]]
    (found,) = play(Case([t], 0, parts))
    assert [e.value for e in found.evidence] == ["b.weight of 21"]


def test_much_that_is_announced_and_silent_is_told_once_of_a_session_that_is_known() -> None:
    """Only running shows it, so the session says it after its first steps. It explains nothing else."""
    t = healthy(5, 20)
    said_of = "67 % of the GEMM FLOPs were announced as observed and send nothing: experts.w (read by einsum), not called: spare"
    before, blind, still = (session(t, facts={"blind": text}) for text in ("", said_of, said_of.replace("67", "66")))
    (found,) = play(Case([t], 0, [[before], [blind], [still]]))
    words = explain(found, t.facts)
    assert (found.mode, found.severity, found.verdict) == ("recipe-mismatch", "warning", "unknown")
    assert words.title == "67 % of the GEMM FLOPs were announced as observed and send nothing"
    assert "experts.w (read by einsum), not called: spare" in words.cause
    assert "filter_fn" in words.fix[-1]["text"]
    assert not any(explains(found.kind, mode) for mode in SLUGS)


def test_what_is_silent_is_told_apart_from_what_changed_with_it() -> None:
    t = healthy(5, 20)
    before = session(t, session="1" * 32, attempt=1, facts={"margin": 0})
    after = session(t, attempt=2, facts={"margin": 1, "blind": "67 % send nothing: spare"})
    found = play(Case([t], 0, [[before, after], []]))
    assert [(f.topic, [e.field for e in f.evidence]) for f in found] == [("", ["margin"]), ("blind", ["blind"])]
