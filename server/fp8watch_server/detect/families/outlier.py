"""Outliers that grow, or leap, in one layer: mode 11, outlier-growth; and as a bound, mode 12 in q and k.

Shapes:     log2 amax and kurtosis [S] -> at most one finding a mode
Thread:     detect worker

amax is risk: this is a warning that comes before the damage. Weights: growth over the last 16 observations and over a
longer horizon, less what the median weight grew (that part is the optimizer's), monotone and in few layers; information
where full samples say that its tail is no heavier. Inputs: above their own baseline, with a kurtosis that says outliers
and not a change of level; where a step has no moments, far above it. A leap of six octaves in one step needs no kurtosis, and is told at once: moments are taken against the
amax of each tile, so a channel that owns its tile leaves the kurtosis of the site where it was. What a site came to before and went back
from is neither (`Context.returning`). Growth of the q and the k
projection of one attention together is reported as attention-logit growth: the logits grow with their product, and
fused attention lets nobody see them.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.context import Context, damage
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.families.weight_tail import WeightTail
from fp8watch_server.detect.finding import Evidence, Finding, Verdict
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.step_view import INPUT, OUTPUT, WEIGHT, Mask

Floats = npt.NDArray[np.float64]

LONG_EACH = 4
"""Every fourth observation goes into the long horizon: 32 of them see 128."""
MONOTONE = 0.7
"""Share of the steps that must go up: a jump is not growth."""
SIGMA_INPUT = 6.0
SIGMA_LAYERS = 6.0
WITHOUT_MOMENTS = 2.0
"""Times the limit of inputs, in a step whose moments were not measured."""
BEYOND_RMS = 1.25
"""Times the limit of weights, over what the root mean square grew: so much is a tail whatever the kurtosis says, which one
element does not move."""
TOGETHER_OCTAVES = 3.0
"""A weight that grows by more than that over the median is a warning though its elements grow together."""
MIN_WEIGHTS = 5
"""Weights from which on their median says what is usual in the model."""
_QK = re.compile(r"(?:^|[._])(?:q|k|query|key)(?:_?proj|_?lin|_?b_proj)?$|(?:^|[._])(?:to_q|to_k|wq|wk)$")
_IS_Q = re.compile(r"(?:^|[._])(?:q|query|to_q|wq)")


class WeightGrowth(NamedTuple):
    """Growth of each weight over that horizon in which it left the others furthest behind, in octaves, [S]."""

    over: Floats  # of amax, less what the median weight grew
    usual: Floats  # what that grew
    rms: Floats  # of the root mean square; NaN where it is not known

    @classmethod
    def none(cls, num_sites: int) -> WeightGrowth:
        """Before anything was measured."""
        return cls(np.zeros(num_sites), np.zeros(num_sites), np.full(num_sites, np.nan))


class Outliers(Detector):
    """Growth of single layers."""

    modes = ("outlier-growth", "attention-logit-growth")
    parts = (WeightTail,)

    def __init__(self, num_sites: int) -> None:
        self._long = Baseline(num_sites)
        self._long_steps: list[int] = []
        self._long_growth: tuple[Floats, int, Floats] | None = None
        self._num = 0
        self._tail = WeightTail(num_sites)
        self._weights = Latch(num_sites, 3, 5)
        self._heavier = Latch(num_sites, 3, 5)  # of these, those with a tail that grew
        self._inputs = Latch(num_sites, 3, 5)
        self._between = Latch(num_sites, 3, 5)  # inputs, in steps without moments: a window of their own
        self._leaps = Latch(num_sites, 3, 5)
        self._ordinary = np.full(num_sites, -1, dtype=np.int64)  # last step in which an input was below every limit
        self._before = np.full(num_sites, -1, dtype=np.int64)  # the same, when its alarm began
        self._bore = np.zeros(num_sites, dtype=np.bool_)  # its quantiser was healthy when it was measured last

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        for part in (
            self._long, self._tail, self._weights, self._heavier, self._inputs, self._between, self._leaps
        ):  # fmt: skip
            part.grow(num_sites)
        more = np.full(max(0, num_sites - len(self._ordinary)), -1, dtype=np.int64)
        self._ordinary, self._before = (np.concatenate([a, more]) for a in (self._ordinary, self._before))
        self._bore = np.concatenate([self._bore, np.zeros(len(more), dtype=np.bool_)])

    def resume(self) -> None:
        """A new session: growth across the restart is none."""
        super().resume()
        self._forget_growth()

    def _forget_growth(self) -> None:
        self._long.forget()
        self._tail.forget()
        self._long_steps, self._long_growth, self._num = [], None, 0

    def frozen(self) -> Mask:
        """Sites in alarm. [S]"""
        return self._weights.open | self._inputs.open | self._between.open | self._leaps.open

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        self._remember(ctx)
        self._bore = np.where(ctx.health_known, ~ctx.unhealthy, self._bore & ~ctx.unhealthy)
        weights, heavier, growth = self._growing_weights(ctx)
        leaps = self._leaping(ctx)
        inputs = self._growing_inputs(ctx) & ~leaps
        found = []
        if leaps.any():
            found.append(self._leap(ctx, leaps))
        if weights.any():
            attention = self._q_and_k(ctx, weights)
            if attention.any():
                found.append(self._attention(ctx, attention, growth))
                weights = weights & ~attention
        tails = weights & heavier
        if (tails | inputs).any():
            found.append(self._finding(ctx, tails, inputs, growth))
        if weights.any() and not tails.any():
            found.append(self._together(ctx, weights, growth))
        return found

    def _remember(self, ctx: Context) -> None:
        self._tail.measure(ctx.now)
        if not ctx.warm:  # growth from scratch is no growth to be measured against
            self._forget_growth()
            return
        self._num += 1
        if self._num % LONG_EACH == 1:
            self._long.push(ctx.now.log2_amax)
            self._tail.push(~np.isnan(ctx.now.log2_amax))
            self._long_steps = [*self._long_steps, ctx.now.step][-self._long.window :]
            self._long_growth = _growth(self._long, self._long_steps, ctx.weights())

    def _growing_weights(self, ctx: Context) -> tuple[Mask, Mask, WeightGrowth]:
        """(sites in alarm, those of them whose tail got heavier as far as is known, what they grew)."""
        limit, is_weight, growth = ctx.limit, ctx.weights(), WeightGrowth.none(len(ctx.now))
        hit, heavier = np.zeros((2, len(ctx.now)), dtype=np.bool_)
        if not ctx.warm or not ctx.clean:
            return hit, heavier, growth
        short = _growth(ctx.base.recent_amax, ctx.base.steps, is_weight), ctx.base.steps
        long = (self._long_growth, self._long_steps) if self._long_growth else short
        for (total, num_steps, monotone), steps in (short, long):
            if num_steps <= 0 or len(total) != len(ctx.now):
                continue
            known = is_weight & ~np.isnan(total)
            if np.count_nonzero(known) < 2:
                continue
            usual = float(np.median(total[known]))
            over = total - usual
            spread = 1.4826 * float(np.median(np.abs(over[known])))
            need = max(limit.outlier_weight_octaves, SIGMA_LAYERS * spread)
            grown = known & (over > need) & (monotone >= MONOTONE)
            rms = np.full(len(total), np.nan)
            if np.any(known & (over > need)):
                rms = self._tail.rms_growth(self._long_steps, steps[0])
                heavier |= grown & (np.isnan(rms) | (total - np.fmax(rms, usual) > BEYOND_RMS * need))
            hit |= grown
            most = known & ~(growth.over >= over)
            growth = WeightGrowth(
                np.where(most, over, growth.over), np.where(most, usual, growth.usual), np.where(most, rms, growth.rms)
            )
        if hit.any():
            with np.errstate(invalid="ignore"):
                fatter = self._tail.log2_kurtosis - self._tail.kurtosis_before()
                heavier |= hit & (fatter >= limit.outlier_kurtosis_octaves)
        num = max(int(np.count_nonzero(is_weight & ctx.now.seen)), 1)
        few = np.count_nonzero(hit) <= max(1, limit.outlier_layers * num)
        seen = is_weight & ~np.isnan(ctx.now.log2_amax)
        self._heavier.update(heavier & few, seen, ctx.now.step)
        return self._weights.update(hit & few, seen, ctx.now.step), self._heavier.open, growth

    def _growing_inputs(self, ctx: Context) -> Mask:
        limit, inputs = ctx.limit, ctx.inputs()
        up = ctx.above_usual
        if not ctx.warm or not ctx.clean:
            return np.zeros(len(ctx.now), dtype=np.bool_)
        known = inputs & ~np.isnan(up)
        common = float(np.median(up[known])) if np.any(known) else 0.0
        need = np.maximum(limit.outlier_input_octaves, SIGMA_INPUT * ctx.base.amax.spread(ctx.floor))
        over = up - max(common, 0.0)
        kurtosis = ctx.now.log2_kurtosis - ctx.base.kurtosis.median()
        with np.errstate(invalid="ignore"):
            heavy = ~ctx.known(ctx.base.kurtosis) | (kurtosis > limit.outlier_kurtosis_octaves)
            # Between full samples of a run that has moments, amax must say it alone.
            far = over > np.maximum(WITHOUT_MOMENTS * limit.outlier_input_octaves, need)
            between = (ctx.base.kurtosis.count > 0) & np.isnan(ctx.now.log2_kurtosis)
            hit = known & (over > need) & heavy & ~ctx.returning
        hit = self._inputs.update(hit, known & ~between, ctx.now.step)
        return hit | self._between.update(far & ~ctx.returning, known & between, ctx.now.step)

    def _leaping(self, ctx: Context) -> Mask:
        """Inputs and probed outputs that stand six octaves and more above their own band, whatever their kurtosis says. [S]"""
        now, known = ctx.now, (ctx.inputs() | (ctx.now.table.role == OUTPUT)) & ~np.isnan(ctx.above_usual)
        if not ctx.warm or not ctx.clean or ctx.lr_leaped:
            return np.zeros(len(now), dtype=np.bool_)
        far = ctx.leaping
        with np.errstate(invalid="ignore"):
            calm = known & (ctx.above_usual <= ctx.limit.outlier_input_octaves)
        fresh = far & ~self._leaps.open
        self._before[fresh] = self._ordinary[fresh]
        self._ordinary[calm] = now.step
        # One that climbed there is growth, which the other test tells with its slope.
        climbed = (self._inputs.open | self._between.open) & ~self._leaps.open
        return self._leaps.update(far & ~climbed, known, now.step, certain=far & ~climbed)

    def _leap(self, ctx: Context, hit: Mask) -> Finding:
        now, rows = ctx.now, ctx.now.in_flow(hit)
        row = int(rows[0])
        since, before = int(self._leaps.since[row]), int(self._before[row])
        leap = float(np.nan_to_num(ctx.above_usual[row]))
        evidence = _growth_evidence(ctx, rows, leap, 0, ctx.base.amax.median(), since)
        loss, usual = now.scalar("loss"), float(ctx.base.loss.median()[0])
        if loss is not None and math.isfinite(usual):
            evidence.append(Evidence("loss", round(loss, 4), round(usual, 4), "", now.step))
        depth = float(now.clip_depth[row])
        if not now.table.current_scaling[row] and depth > ctx.limit.clip_depth:
            evidence.append(Evidence("clip_depth", round(depth, 3), "1 or less", "ratio", now.step))
        evidence += damage(ctx, row)
        probed = now.table.role[row] == OUTPUT
        return now.finding(
            "outlier-growth",
            "warning",
            rows,
            evidence,
            self._verdict_before(ctx, row) if probed else ctx.verdict(rows[:1]),
            tile=None if probed else "worst_tile",
            growth=float(ctx.above_usual[row]),
            leap=True,
            probe=probed,
            began=since,
            not_before=before + 1 if 0 <= before < since else since,
        )

    @staticmethod
    def _verdict_before(ctx: Context, row: int) -> Verdict:
        """Of an output without a quantiser: what the forward quantisers before it say; shared where there is none."""
        table = ctx.now.table
        before = np.flatnonzero((table.order < table.order[row]) & np.isin(table.role, (INPUT, WEIGHT)))
        return ctx.verdict(before) if len(before) else "shared"

    @staticmethod
    def _q_and_k(ctx: Context, hit: Mask) -> Mask:
        """Weights of a q and a k projection under one parent, both in alarm. [S]"""
        parents: dict[str, set[bool]] = {}
        named: list[tuple[int, str]] = []
        for row in np.flatnonzero(hit):
            module = ctx.now.table.facts[row].module
            parent, _, name = module.rpartition(".")
            if _QK.search(name):
                parents.setdefault(parent, set()).add(bool(_IS_Q.search(name)))
                named.append((int(row), parent))
        out = np.zeros(len(hit), dtype=np.bool_)
        out[[row for row, parent in named if len(parents[parent]) == 2]] = True
        return out

    def _attention(self, ctx: Context, hit: Mask, growth: WeightGrowth) -> Finding:
        rows = ctx.now.in_flow(hit)
        bound = float(np.sum(growth.over[rows[:2]]))
        return ctx.now.finding(
            "attention-logit-growth",
            "warning",
            rows,
            [
                Evidence("logit_bound_growth", round(bound, 2), 0, "octaves", int(self._weights.since[rows[0]])),
                *self._weight_evidence(ctx, rows, growth),
            ],
            "shared",
            tile="worst_tile",
            bound=True,
            growth=bound,
            began=int(self._weights.since[rows[0]]),
        )

    def _together(self, ctx: Context, hit: Mask, growth: WeightGrowth) -> Finding:
        """Weights that left the others behind without a tail."""
        rows = ctx.now.in_flow(hit)
        row = int(rows[0])
        return ctx.now.finding(
            "outlier-growth",
            "warning" if np.any(growth.over[rows] > TOGETHER_OCTAVES) else "info",
            rows,
            [*self._weight_evidence(ctx, rows, growth), *damage(ctx, row)],
            ctx.verdict(rows[:1]),
            tile="worst_tile",
            growth=float(growth.over[row]),
            together=True,
            began=int(self._weights.since[row]),
        )

    def _weight_evidence(self, ctx: Context, rows: npt.NDArray[np.int64], growth: WeightGrowth) -> list[Evidence]:
        """amax at both ends of the growth that is told, what the other weights grew, and what is known of the tail."""
        row, since = int(rows[0]), int(self._weights.since[rows[0]])
        octaves = float(growth.over[row] + growth.usual[row])
        before = ctx.now.log2_amax - octaves
        told = _growth_evidence(ctx, rows, octaves, round(float(growth.usual[row]), 2) + 0.0, before, since)
        if np.isfinite(growth.rms[row]):
            told.append(Evidence("rms_growth", round(float(growth.rms[row]), 2), None, "octaves", since))
        return told + _kurtosis_evidence(self._tail.log2_kurtosis[row], self._tail.kurtosis_before()[row], since)

    def _finding(self, ctx: Context, weights: Mask, inputs: Mask, growth: WeightGrowth) -> Finding:
        rows = ctx.now.in_flow(inputs) if inputs.any() and not weights.any() else ctx.now.in_flow(weights)
        others = ctx.now.in_flow((weights | inputs) & ~np.isin(np.arange(len(ctx.now)), rows))
        inputs_latch = self._inputs if self._inputs.open[rows[0]] else self._between
        latch = inputs_latch if inputs[rows[0]] else self._weights
        row = int(rows[0])
        since = int(latch.since[row])
        if latch is self._weights:
            grown = float(growth.over[row])
            evidence = self._weight_evidence(ctx, rows, growth)
        else:
            grown = float(np.nan_to_num(ctx.above_usual[row]))
            evidence = _growth_evidence(ctx, rows, grown, 0, ctx.base.amax.median(), since)
            evidence += _kurtosis_evidence(ctx.now.log2_kurtosis[row], ctx.base.kurtosis.median()[row], since)
        if np.isfinite(ctx.now.sqnr_db[row]):
            usual_db = ctx.base.sqnr.median()[row]
            baseline = round(float(usual_db), 2) if np.isfinite(usual_db) else None
            evidence.append(Evidence("tile_sqnr_db", round(float(ctx.now.sqnr_db[row]), 2), baseline, "dB", None))
        # amax is risk, SQNR is damage: an input whose quantiser was seen to bear it is a notice. What a scale of the past
        # cannot carry is told as delayed-clip, in the step that it happens in.
        late = ~ctx.now.table.current_scaling[rows]
        borne = latch is not self._weights and bool(np.all((ctx.health_known[rows] & ~ctx.unhealthy[rows]) | late))
        borne |= latch is self._weights and bool(np.all(self._catches_up(ctx)[rows]))
        rows = np.concatenate([rows, others])
        return ctx.now.finding(
            "outlier-growth",
            "info" if borne else "warning",
            rows,
            evidence,
            ctx.verdict(rows[:1]),
            tile="worst_tile",
            growth=grown,
            began=since,
        )

    def _catches_up(self, ctx: Context) -> Mask:
        """Weights that grew and are still no larger than most weights of the model, with a quantiser that bore it when it was
        measured last: what was initialised at zero, as the gates of adaLN and of LoRA, grows like that in health. [S]"""
        amax, weights = ctx.now.log2_amax, ctx.weights()
        known = weights & ~np.isnan(amax)
        if np.count_nonzero(known) < MIN_WEIGHTS:
            return np.zeros(len(ctx.now), dtype=np.bool_)
        with np.errstate(invalid="ignore"):
            return np.asarray(known & (amax <= np.median(amax[known])) & self._bore)


def _growth(ring: Baseline, steps: list[int], which: Mask) -> tuple[Floats, int, Floats]:
    """(octaves gained over the ring [S], steps that took, share of its steps that went up [S])."""
    total, monotone = np.full(ring.num_series, np.nan), np.zeros(ring.num_series)
    if len(steps) < ring.window // 2:
        return total, 0, monotone
    history = ring.ordered(which).astype(np.float64)[:, -len(steps) :]
    # ends are medians of three: one odd step at either end is no growth
    total[which] = np.sort(history[:, -3:], axis=1)[:, 1] - np.sort(history[:, :3], axis=1)[:, 1]
    up = np.nan_to_num(np.diff(history, axis=1))
    moving = np.maximum(np.count_nonzero(np.abs(up) > 1e-6, axis=1), 1)
    share = np.count_nonzero(up > 1e-6, axis=1) / moving
    leap = np.abs(up).max(axis=1) >= 0.5 * np.abs(np.nan_to_num(total[which]))
    monotone[which] = np.where(leap, 0.0, share)
    return total, steps[-1] - steps[0], monotone


def _growth_evidence(
    ctx: Context, rows: npt.NDArray[np.int64], octaves: float, usual: float, before: Floats, since: int
) -> list[Evidence]:
    """Growth of the first site: amax now is so many octaves above `before`, log2 amax [S]; `usual` is what others grew."""
    row, value = int(rows[0]), ctx.now.log2_amax[rows[0]]
    evidence = [Evidence("amax_growth", round(octaves, 2), usual, "octaves", since)]
    if np.isfinite(value):
        baseline = float(f"{2.0 ** before[row]:.4g}") if np.isfinite(before[row]) else None
        evidence.append(Evidence("amax_max", float(f"{2.0**value:.4g}"), baseline, "x", since))
    if len(rows) > 1:
        evidence.append(Evidence("growing_sites", len(rows), 0, "sites", None))
    return evidence


def _kurtosis_evidence(log2: float, usual: float, since: int) -> list[Evidence]:
    if not (np.isfinite(log2) and np.isfinite(usual)):
        return []
    return [Evidence("kurtosis", round(2.0 ** float(log2), 1), round(2.0 ** float(usual), 1), "1", since)]
