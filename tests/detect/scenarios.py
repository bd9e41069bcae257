"""Every failure mode as a fault on a healthy trace, in three severities: what is done to the columns, and what must be said.

A scenario is `(trace, onset, level, rng) -> None`; level 0 is mild, 1 medium, 2 severe. The twin without the fault is
the same trace untouched. `Expected` names mode, module, operand and verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from detect.trace import ALL, SQNR_BY_DEPTH, Trace, healthy

from fp8watch_agent.record import Measured, Site, StepPresent, site_id
from fp8watch_server.detect.sessions import SessionFacts

NAN, INF = float("nan"), float("inf")
DOWN = "layers.1.mlp.down_proj"
GATE = "layers.0.mlp.gate_proj"
Q = "layers.1.attention.q_proj"
K = "layers.1.attention.k_proj"
OUT = "layers.0.attention.o_proj"


@dataclass(frozen=True)
class Expected:
    """What must be said. None: any."""

    mode: str
    module: str | None
    operand: str | None
    verdict: str
    critical: bool | None = None


@dataclass
class Case:
    """Traces of all ranks with the fault in, and what the collector knows besides."""

    traces: list[Trace]
    onset: int
    sessions: list[list[SessionFacts]] = field(default_factory=list)  # before which trace they are registered
    sites_at: dict[int, list[Site]] = field(default_factory=dict)  # step -> facts that change
    per_batch: int = 8


@dataclass(frozen=True)
class Scenario:
    """One failure mode."""

    name: str
    expected: Expected
    make: Callable[[int, int], Case]  # (seed, level) -> Case
    slow: bool = False  # a mode that builds up: lead over the loss is what counts
    loss_sees: int = 0  # steps after the onset at which the loss goes wrong by itself; 0: never
    invariant: bool = False  # must be found in the step it happens in


STEPS, ONSET = 200, 120


def _case(fault: Callable[[Trace, int, int, np.random.Generator], None], **kw: Any) -> Callable[[int, int], Case]:
    def make(seed: int, level: int) -> Case:
        rng = np.random.default_rng([seed, 3])
        onset = ONSET + int(rng.integers(0, 24))
        trace = healthy(seed, STEPS, **kw)
        if level >= 0:
            fault(trace, onset, level, rng)
        return Case([trace], onset)

    return make


def twin(scenario: Scenario, seed: int) -> Case:
    """The healthy twin: the same seed without the fault."""
    return scenario.make(seed, -1)


# ---- helpers


def _order(t: Trace) -> np.ndarray:
    return np.array([s.order for s in t.sites])


def put_nan(t: Trace, step: int, mask: np.ndarray, count: int = 7) -> None:
    t.columns["num_nan"][step, mask] = count
    t.columns["first_nonfinite"][step, mask] = (5, 130, 0)


def put_inf(t: Trace, step: int, j: int, element: tuple[int, int] = (37, 200)) -> None:
    c = t.columns
    c["num_inf"][step, j], c["num_sentinel_tiles"][step, j], c["amax_max"][step, j] = 1, 1, INF
    c["first_nonfinite"][step, j] = (*element, 0)


def nan_after(t: Trace, step: int, order: int, *, loss: bool = True) -> None:
    """Everything behind `order` in this step, and everything from the next on: an update carried it into the weights."""
    behind = (_order(t) > order) & ~t.mask(operand="weight")
    put_nan(t, step, behind)
    for later in range(step + 1, t.num_steps):
        put_nan(t, later, np.ones(len(t.sites), dtype=bool))
    if loss:
        t.steps["loss"][step:] = NAN
        t.steps["grad_norm"][step:] = NAN


def ramp(t: Trace, onset: int, per_step: float, most: float = 60.0) -> np.ndarray:
    return np.minimum(np.maximum(np.arange(t.num_steps) - onset, 0) * per_step, most)


def loss_drifts(t: Trace, onset: int, per_step: float) -> None:
    t.steps["loss"] += np.maximum(np.arange(t.num_steps) - onset, 0) * per_step


# ---- the modes


def nan_in_loss(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    t.steps["loss"][at:] = INF if level == 0 else NAN
    put_nan(t, at, t.mask(operand="grad_output"))
    for later in range(at + 1, t.num_steps):
        put_nan(t, later, np.ones(len(t.sites), dtype=bool))


def zero_tile_eps(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    j = t.one(DOWN, "input")
    c = t.columns
    c["scale_inv_min"][at, j], c["num_off_scale_tiles"][at, j] = 0.0, 1 + 40 * level
    c["num_zero_tiles"][at, j], c["off_scale_tile"][at, j] = 1 + 40 * level, (0, 1)
    nan_after(t, at, t.sites[j].order)


def dying_tile(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    rate = (0.6, 1.2, 3.0)[level]
    group = t.mask(GATE, "input")  # a group of channels: tiles along them and across them
    t.columns["amax_min_nonzero"][:, group] *= np.exp2(-ramp(t, at, rate, 110))[:, None]


def dead_layer(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    for direction in ("rowwise", "columnwise"):
        for operand in ("input", "grad_output"):
            mask = t.mask(GATE, operand, direction)
            down = -(5.0, 8.0, 14.0)[level] * (2 if operand == "grad_output" and level == 0 else 1)
            if level < 2:
                t.grow(mask, np.where(np.arange(t.num_steps) >= at, down, 0.0))
            else:
                c = t.columns
                for name in ("amax_max", "num_nonzero", "num_underflow"):
                    c[name][at:, mask] = 0
                c["amax_min_nonzero"][at:, mask] = INF
                c["num_zero_tiles"][at:, mask] = c["num_tiles"][at:, mask]
                c["scale_ratio_max"][at:, mask], c["scale_ratio_min"][at:, mask] = 0, INF


def delayed_clip(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    j = t.one(DOWN, "input")
    outlier = (5.0, 12.0, 60.0)[level]
    spikes = np.zeros(t.num_steps)
    spikes[at::9] = np.log2(outlier)
    for k, step in enumerate(range(at, t.num_steps, 9)):  # each larger than the history has seen
        spikes[step] += 0.6 * k
    mask = np.zeros(len(t.sites), dtype=bool)
    mask[j] = True
    highest = t.columns["amax_max"][:at, j].max() / t.columns["amax_max"][:, j]
    spikes[at::9] += np.log2(np.maximum(highest[at::9], 1))
    t.grow(mask, np.where(spikes > 0, spikes, 0))
    t.set_kurtosis(mask, np.where(spikes > 0, 4.0, 1.0))
    t.delayed()


def frozen_scale(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    j = t.one(DOWN, "input")
    mask = np.zeros(len(t.sites), dtype=bool)
    mask[j] = True
    highest = np.log2(t.columns["amax_max"][:at, j].max() / np.median(t.columns["amax_max"][:at, j]))
    t.grow(mask, ramp(t, at - 10, (0.06, 0.15, 0.4)[level], 5.0) + np.where(np.arange(t.num_steps) >= at, highest, 0))
    t.delayed(frozen_from={j: at})


def stale_weight_scale(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    j = t.one(GATE, "weight")
    c = t.columns
    ratio = 1 + np.minimum(ramp(t, at - 1, (0.002, 0.02, 0.3)[level]), 3)
    c["scale_ratio_max"][at:, j] = ratio[at:]
    c["num_off_scale_tiles"][at:, j], c["off_scale_tile"][at:, j] = 1 + level, (1, 1)
    mask = np.zeros(len(t.sites), dtype=bool)
    mask[j] = True
    lost = np.interp(np.log2(ratio), *zip(*SQNR_BY_DEPTH, strict=True))
    t.set_sqnr(mask, t.sqnr(mask)[:, 0] - lost)


def gradient_underflow(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    """An eps that clamps: mild by the count, severe by the invariant too."""
    mask = t.mask("mlp.up_proj", "grad_output")
    c = t.columns
    add = (0.16, 0.3, 0.6)[level]
    share = c["num_underflow"][at:, mask] / c["num_nonzero"][at:, mask]
    c["num_underflow"][at:, mask] = (np.minimum(share + add, 0.95) * c["num_nonzero"][at:, mask]).astype(np.int64)
    if level == 2:
        c["scale_ratio_max"][at:, mask] = c["scale_ratio_min"][at:, mask] = 2.0**-7
        c["num_off_scale_tiles"][at:, mask] = 500
    else:
        c["num_eps_tiles"][at:, mask] = 60 * (level + 1)
        some = np.where(np.arange(t.num_steps)[:, None] >= at, t.sqnr(mask) - 1.5 * (level + 1), t.sqnr(mask))
        t.set_sqnr(mask, some)


def scale_rounding(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    ratio = (1.006, 1.1, 1.9)[level]
    for operand in ("input", "weight", "grad_output"):
        mask = t.mask(operand=operand) & (rng.random(len(t.sites)) < (0.4, 0.7, 1.0)[level])
        mask |= t.mask("layers.0.attention.q_proj", operand)
        t.columns["scale_ratio_max"][at:, mask] = ratio
        t.columns["num_off_scale_tiles"][at:, mask] = 30


def recipe_mismatch(seed: int, level: int) -> Case:
    trace = healthy(seed, STEPS)
    onset = ONSET + 8 * (seed % 3)
    case = Case([trace], onset)
    if level < 0:
        return case
    change: list[dict[str, Any]] = [{"eps": 1e-6}, {"power_2_scale": False}, {"format": "E5M2"}]
    changed = [replace(s, **change[level]) for s in trace.sites if s.operand == "input"]
    case.sites_at[onset] = changed
    if level == 1:
        for name in ("scale_ratio_max", "scale_ratio_min"):
            trace.columns[name][onset:, trace.mask(operand="input")] = 1.0
    if level == 2:
        mask = trace.mask(operand="input")
        trace.set_sqnr(mask, trace.sqnr(mask) - 6.0 * (np.arange(STEPS)[:, None] >= onset))
    return case


def outlier_growth(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    rate = (0.05, 0.12, 0.4)[level]
    weight = t.mask(DOWN, "weight")
    t.grow(weight, ramp(t, at, rate / 2))
    inputs = t.mask(DOWN, "input")
    t.grow(inputs, ramp(t, at, rate, 12))
    t.set_kurtosis(inputs, np.exp2(np.minimum(ramp(t, at, rate * 1.5), 6)))
    if level == 2:
        t.set_sqnr(inputs, np.minimum(t.sqnr(inputs), 31.5) - np.minimum(ramp(t, at, 0.3), 8)[:, None])
    loss_drifts(t, at + 40, 0.01)


def attention_logit_growth(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    usual = 9 * np.exp2(rng.normal(0, 0.1, t.num_steps))
    t.logs["max_attention_logit"] = usual * np.exp2(ramp(t, at, (0.08, 0.2, 0.6)[level], 14))
    loss_drifts(t, at + 45, 0.02)


def attention_bound(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    """Fused attention: only the weights of q and k show it."""
    for module in (Q, K):
        t.grow(t.mask(module, "weight"), ramp(t, at, (0.04, 0.08, 0.2)[level], 6))
    loss_drifts(t, at + 45, 0.02)


def optimizer_divergence(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    """Growth of log2 amax after LR ×8, ×30 and ×100, shaped as measured after ×30."""
    measured = [0.301, 0.37, 0.331, 0.297, 0.246, 0.213, 0.181, 0.141, 0.129, 0.105, 0.088, 0.073, 0.063, 0.057, 0.05]
    per_step = np.zeros(t.num_steps)
    per_step[at + 1 : at + 16] = np.array(measured[: len(per_step[at + 1 : at + 16])]) * (0.45, 1.0, 1.6)[level]
    for j in np.flatnonzero(t.mask(operand="weight")):
        mask = np.zeros(len(t.sites), dtype=bool)
        mask[j] = True
        t.grow(mask, np.cumsum(per_step) * rng.uniform(0.8, 1.2))
    t.steps["lr"][at:] = 2e-3 * (8, 30, 100)[level]
    t.steps["loss"][at + 3 :] += (0.6, 1.5, 3.0)[level]


def bad_batch(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    for k, share in enumerate((1.0, 0.4, 0.1)):
        t.steps["loss"][at + k] += (2.2, 3.5, 6.0)[level] * share
        t.steps["grad_norm"][at + k] = max(t.steps["grad_norm"][at + k], (5.0, 9.0, 30.0)[level] * share)
    t.batch_ids = [f"shard-{s}" for s in range(t.num_steps)]


def silent_data_corruption(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    jump = np.where(np.arange(t.num_steps) >= at, (0.5, 2.0, 30.0)[level], 0.0)
    t.grow(t.mask(OUT, "weight"), jump)
    loss_drifts(t, at, (0.0, 0.01, 0.5)[level])


def corruption_by_hash(seed: int, level: int) -> Case:
    ranks = _replicas(seed, 4)
    onset = ONSET + seed % 24
    rng = np.random.default_rng([seed, 5])
    n = len(ranks[0].sites)
    every = (50, 10, 1)[max(level, 0)]
    hashes = rng.integers(-(1 << 62), 1 << 62, (STEPS, n), dtype=np.int64)
    for trace in ranks:
        c, weights = trace.columns, trace.mask(operand="weight")
        c["weight_hash"] = np.where(weights[None, :], hashes, 0)
        at = np.arange(STEPS) % every == 0
        c["measured"][np.ix_(at, weights)] |= int(Measured.HASH)
    first = onset
    if level >= 0:
        bad = ranks[2]
        bad.columns["weight_hash"][onset:, bad.one(OUT, "weight")] ^= 1 << 17
        first = int(np.flatnonzero((np.arange(STEPS) % every == 0) & (np.arange(STEPS) >= onset))[0])
    sessions = [
        SessionFacts(session=t.session, rank=t.rank, world_size=4, mesh={"dp": t.rank}, host=f"node{t.rank // 2}")
        for t in ranks
    ]
    return Case(ranks, first, [sessions])


def _replicas(seed: int, num: int, **kw: Any) -> list[Trace]:
    first = healthy(seed, STEPS, 1, **kw)
    first = replace(first, session=f"{seed:030x}00")
    out = [first]
    for rank in range(1, num):
        other = healthy(seed + 1000 * rank, STEPS, 1, **kw)
        for name, values in first.columns.items():
            weights = first.mask(operand="weight")
            other.columns[name][:, weights] = values[:, weights]
        out.append(replace(other, rank=rank, session=f"{seed:030x}{rank:02x}"))
    return out


def accumulator_precision(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    _shadow(t, rng)
    for operand, direction in (("input", "rowwise"), ("grad_output", "rowwise")):
        mask = t.mask(operand=operand, direction=direction)
        t.columns["gemm_error"][at:, mask] = (0.0025, 0.0035, 0.02)[level]


def _shadow(t: Trace, rng: np.random.Generator) -> None:
    """Healthy evidence of GEMM outputs, each eighth step."""
    shape = (t.num_steps, len(t.sites))
    t.columns["gemm_error"] = np.full(shape, 3e-7)
    t.columns["gemm_gain_max"], t.columns["gemm_gain_min"] = np.full(shape, 1.0), np.full(shape, 1.0)
    t.columns["output_num_nonfinite"] = np.zeros(shape, dtype=np.int64)
    t.columns["measured"] |= int(Measured.GEMM)


def inf_laundering(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    j = t.one(DOWN, "input")
    for step in (range(at, at + 1), range(at, at + 4), range(at, t.num_steps, 2))[level]:
        put_inf(t, step, j)


def sensitive_layer(seed: int, level: int) -> Case:
    trace = healthy(seed, 60)
    if level >= 0:
        module = ("lm_head", "tok_embeddings", "layers.0.router.gate")[level]
        site = replace(trace.sites[0], module=module, id=site_id(module, "input", "rowwise"), order=500)
        j = trace.add_sites([site], measured=int(ALL))
        for name in trace.columns:
            trace.columns[name][:, j[0]] = trace.columns[name][:, trace.one("layers.2.mlp.up_proj", "input")]
    return Case([trace], 0)


def kernel_output_fault(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    """Uninitialised rows of an expert without tokens; the others get it as NaN."""
    _shadow(t, rng)
    j = t.one(GATE, "input")
    c = t.columns
    c["output_num_nonfinite"][at, j] = (1, 64, 4096)[level]
    if level == 1:
        for operand in ("input",):
            mask = t.mask(GATE, operand)
            c["num_elements"][at, mask] = c["num_nonzero"][at, mask] = 0
    nan_after(t, at, t.sites[j].order + 2)


def _looks(t: Trace, at: int, first: str) -> None:
    """Healthy looks at quantisers: each step one module's turn, in step `at` that of `first`."""
    shape = (t.num_steps, len(t.sites))
    modules = list(dict.fromkeys(s.module for s in t.sites))
    of = np.array([modules.index(s.module) for s in t.sites])
    now = np.arange(t.num_steps) - at + next(i for i, module in enumerate(modules) if module.endswith(first))
    turn = now[:, None] % len(modules) == of[None, :]
    for name in ("num_nan_codes", "num_off_grid", "num_zeroed_tiles", "num_wrong_scales"):
        t.columns[name] = np.zeros(shape, dtype=np.int64)
    t.columns["num_checked_tiles"] = np.where(turn, 33, 0)
    t.columns["fault_tile"] = np.full((*shape, 2), -1)
    t.columns["measured"] = np.where(turn, t.columns["measured"] | int(Measured.QUANTISER), t.columns["measured"])


def quantiser_fault(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    """The transposed copy of one operand is of something else, for good: found when the module has its turn."""
    _looks(t, at, DOWN)
    j = t.one(DOWN, "input", "columnwise")
    turns = np.flatnonzero(t.columns["num_checked_tiles"][:, j] > 0)
    broken = turns[turns >= at]
    name = ("num_wrong_scales", "num_off_grid", "num_zeroed_tiles")[level]
    t.columns[name][broken, j] = (1, 2000, 33)[level]
    t.columns["fault_tile"][broken, j] = (3, 1)


def cross_rank(seed: int, level: int) -> Case:
    """Delayed scales that are reduced over dp and tp, and then over dp only."""
    ranks = _replicas(seed, 4, recipe="delayed")
    onset = ONSET + seed % 24
    amax = np.max([t.columns["amax_max"] for t in ranks], axis=0)
    meshes = [{"dp": r // 2, "tp": r % 2} for r in range(4)]
    for trace, mesh in zip(ranks, meshes, strict=True):
        own = amax.copy()
        if level >= 0:
            which = (
                trace.mask(DOWN.replace("1", "0"), "input"),
                trace.mask(operand="input"),
                np.ones(len(trace.sites), bool),
            )[level]
            mine = np.max(
                [t.columns["amax_max"] for t, m in zip(ranks, meshes, strict=True) if m["tp"] == mesh["tp"]], axis=0
            )
            own[onset:, which] = mine[onset:, which] * (1 + 0.02 * mesh["tp"])
        kept = trace.columns["amax_max"]
        trace.columns["amax_max"] = own
        ratios = [trace.columns[name].copy() for name in ("scale_ratio_max", "tile_noise_ratio_sum")]
        trace.delayed(history=1)
        trace.columns["amax_max"] = kept
        trace.columns["scale_ratio_max"], trace.columns["tile_noise_ratio_sum"] = ratios
    sessions = [
        SessionFacts(session=t.session, rank=t.rank, world_size=4, mesh=m, facts={"amax_reduction": "dp,tp"})
        for t, m in zip(ranks, meshes, strict=True)
    ]
    return Case(ranks, onset, [sessions])


def chronic_noise(seed: int, level: int) -> Case:
    trace = healthy(seed, 120)
    if level >= 0:
        mask = trace.mask(DOWN, "input")
        trace.set_sqnr(mask, trace.sqnr(mask) - (4.5, 9.0, 16.0)[level])
        if level == 2:
            trace.columns["num_underflow"][:, mask] = (0.3 * trace.columns["num_nonzero"][:, mask]).astype(np.int64)
    return Case([trace], 0)


def scale_collapse(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    j = t.mask(DOWN, "input")
    t.grow(j, ramp(t, at - 50, (0.06, 0.09, 0.16)[level], 14))
    t.delayed(history=24)
    loss_drifts(t, at + 40, 0.01)


def loss_scale_collapse(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    scale = np.full(t.num_steps, 65536.0)
    for k in range((3, 5, 9)[level]):
        scale[at + k * (12, 6, 2)[level] :] /= 2
    t.steps["present"] |= int(StepPresent.LOSS_SCALE)
    t.steps["loss_scale"] = scale


def nan_in_activation(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    j = t.one("layers.1.mlp.up_proj", "input")
    put_nan(t, at, np.arange(len(t.sites)) == j, (1, 100, 30000)[level])
    nan_after(t, at, t.sites[j].order)


def scalar_shift(t: Trace, at: int, level: int, rng: np.random.Generator) -> None:
    """Rollout parts from training: KL ×5, ×50 and ×500 over what two engines differ by in BF16."""
    usual = 1.2e-3 * np.exp(rng.normal(0, 0.2, t.num_steps))
    t.logs["rollout_corr/kl"] = usual * np.where(np.arange(t.num_steps) >= at, (5.0, 50.0, 500.0)[level], 1.0)


def expert_outlier(t: Trace, onset: int, level: int, rng: np.random.Generator) -> None:
    """One of eight experts grows in an update, and stays under the largest of them: the record of all does not show it."""
    vectors = t.give_experts(t.one(DOWN, "weight"), 8)
    vectors["amax"][:, 1:] /= 2**12
    if level >= 0:
        vectors["amax"][onset:, int(rng.integers(1, 8))] *= 2.0 ** (7, 9, 11)[level]


def of_experts(seed: int, level: int) -> Case:
    rng = np.random.default_rng([seed, 3])
    onset = ONSET + int(rng.integers(0, 24))
    trace = healthy(seed, STEPS)
    expert_outlier(trace, onset, level, rng)
    return Case([trace], onset)


def limit_ahead(seed: int, level: int) -> Case:
    """Underflow of one operand doubles each 120, 100 or 80 steps, and stays under its limit to the end."""
    trace = healthy(seed, 400, num_layers=1)
    if level >= 0:
        mask = trace.mask(GATE, "input")
        rng = np.random.default_rng([seed, 3])
        share = 0.004 * np.exp2(np.arange(400) / (120, 100, 90)[level])[:, None] * np.exp2(rng.normal(0, 0.1, (400, 1)))
        trace.columns["num_underflow"][:, mask] = (share * trace.columns["num_nonzero"][:, mask]).astype(np.int64)
    return Case([trace], 0)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("nan-in-loss", Expected("nan-in-loss", None, None, "shared", True), _case(nan_in_loss), invariant=True, loss_sees=0),
    Scenario("zero-tile-eps", Expected("zero-tile-eps", DOWN, "input", "fp8", True), _case(zero_tile_eps), invariant=True),
    Scenario("dying-tile", Expected("dying-tile", GATE, "input", "fp8"), _case(dying_tile), slow=True, loss_sees=60),
    Scenario("dead-layer", Expected("dead-layer", GATE, None, "shared"), _case(dead_layer)),
    Scenario("delayed-clip", Expected("delayed-clip", DOWN, "input", "fp8"), _case(delayed_clip, recipe="delayed", hybrid=True)),
    Scenario("frozen-scale", Expected("frozen-scale", DOWN, "input", "fp8"), _case(frozen_scale, recipe="delayed", hybrid=True)),
    Scenario("stale-weight-scale", Expected("stale-weight-scale", GATE, "weight", "fp8", True), _case(stale_weight_scale), invariant=True),
    Scenario("gradient-underflow", Expected("gradient-underflow", "mlp.up_proj", "grad_output", "fp8"), _case(gradient_underflow)),
    Scenario("scale-rounding", Expected("scale-rounding", None, None, "fp8"), _case(scale_rounding), invariant=True),
    Scenario("recipe-mismatch", Expected("recipe-mismatch", None, "input", "fp8"), recipe_mismatch, invariant=True),
    Scenario("outlier-growth", Expected("outlier-growth", DOWN, None, "any"), _case(outlier_growth), slow=True, loss_sees=60),
    Scenario("attention-logit-growth", Expected("attention-logit-growth", None, None, "shared"), _case(attention_logit_growth), slow=True, loss_sees=60),
    Scenario("attention-logit-bound", Expected("attention-logit-growth", "layers.1.attention", "weight", "shared"), _case(attention_bound), slow=True, loss_sees=60),
    Scenario("optimizer-divergence", Expected("optimizer-divergence", None, "weight", "shared", True), _case(optimizer_divergence)),
    Scenario("bad-batch", Expected("bad-batch", None, None, "shared"), _case(bad_batch)),
    Scenario("silent-data-corruption", Expected("silent-data-corruption", OUT, "weight", "shared", True), _case(silent_data_corruption), invariant=True),
    Scenario("corruption-by-hash", Expected("silent-data-corruption", OUT, "weight", "shared", True), corruption_by_hash, invariant=True),
    Scenario("accumulator-precision", Expected("accumulator-precision", None, None, "fp8"), _case(accumulator_precision), invariant=True),
    Scenario("inf-laundering", Expected("inf-laundering", DOWN, "input", "fp8", True), _case(inf_laundering), invariant=True),
    Scenario("sensitive-layer-quantized", Expected("sensitive-layer-quantized", None, None, "fp8"), sensitive_layer, invariant=True),
    Scenario("kernel-output-fault", Expected("kernel-output-fault", GATE, None, "shared", True), _case(kernel_output_fault), invariant=True),
    Scenario("cross-rank-disagreement", Expected("cross-rank-disagreement", None, None, "fp8", True), cross_rank, invariant=True),
    Scenario("chronic-quantization-noise", Expected("chronic-quantization-noise", DOWN, "input", "fp8"), chronic_noise),
    Scenario("scale-collapse", Expected("scale-collapse", DOWN, "input", "any"), _case(scale_collapse, recipe="delayed", hybrid=True), slow=True, loss_sees=40),
    Scenario("loss-scale-collapse", Expected("scale-collapse", None, None, "shared"), _case(loss_scale_collapse)),
    Scenario("nan-in-activation", Expected("nan-in-activation", "layers.1.mlp.up_proj", "input", "shared", True), _case(nan_in_activation), invariant=True),
    Scenario("quantiser-fault", Expected("quantiser-fault", DOWN, "input", "fp8"), _case(quantiser_fault), invariant=True),
    Scenario("expert-outlier", Expected("expert-outlier", DOWN, "weight", "any"), of_experts),
    Scenario("scalar-shift", Expected("scalar-shift", None, None, "unknown"), _case(scalar_shift)),
    Scenario("limit-ahead", Expected("limit-ahead", GATE, "input", "fp8"), limit_ahead),
)  # fmt: skip
BY_NAME = {s.name: s for s in SCENARIOS}
