"""A weight that changes without a reason: mode 15, silent-data-corruption.

Shapes:     log2 amax of weights [S], from one observation to the next -> at most one finding
Thread:     detect worker

An optimizer moves a weight by about its learning rate, and all layers alike. One tensor whose amax leaps alone, after a
gradient of ordinary size, was written by something else: a flipped bit in the weight or in the optimizer's state. Flips
that leave amax where it is are found by comparing hashes between replicas (`agreement`). Where values break in the step in which it
is seen, they read it: it was there first.

Where ranks hold different weights under one name (stages of a pipeline that name their layers alike, parts of a sharded one), what is
followed is the largest of them: a step in which others of them sent it says nothing of how it moved.

Where weights that are looked at between two steps of the optimizer were not as it had left them, something wrote them: a reset, a
merge, a load of one part. The few elements that are looked at in each weight are others where all of it is written, and seldom where one bit flips:
the leap is a warning then, unless values break behind it. Where most of the weights were others, a model was loaded: that is information.

A flip leaps once. A leap of less than `CERTAIN_OCTAVES` waits for the next step: where the weight goes on by as much, it grows,
and is told as outlier-growth after the third step of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fp8watch_agent.training_names import CHANGED, WEIGHTS_CHANGED, WEIGHTS_LOOKED, WRITTEN
from fp8watch_server.detect.baseline import MAD_TO_SIGMA, Baseline
from fp8watch_server.detect.context import Context, damage
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding, Severity
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.step_view import WEIGHT, Mask

Floats = npt.NDArray[np.float64]

SIGMA = 15.0
MIN_KNOWN = 8
LONG_KNOWN = 32
"""Moves from which on a weight's own scatter holds updates that come once in some steps, as Shampoo's new preconditioners."""
MIN_OTHERS = 5
"""Weights from which on their own scatter in a step says what is ordinary in it."""
FEW = 0.1
"""Share of the weights that may leap in one step; more is the optimizer, or a checkpoint that was loaded."""
ORDINARY_GRADIENT = 3.0
"""Octaves over its baseline up to which a layer's gradient is of ordinary size: 3 σ of gradients."""
MAX_APART = 8
CERTAIN_OCTAVES = 1.5
"""Times 2.8 in one step: no growth is so steep."""
GOES_ON = 0.5
"""Share of a leap by which the weight must move on, the same way, for it to be growth."""
CLIMB_STEPS = 3
"""Leaps in a row that are growth."""
WRITTEN_BEFORE = 8
"""Observed steps in which no weight was written before: what writes them every few steps explains no leap."""


def loads_most(changed: int, looked: int) -> bool:
    """Whether so many of the weights that were looked at are others as only a load, or a model that is drawn anew, leaves."""
    return 2 * changed > looked > 1


@dataclass(frozen=True)
class _Writes:
    """Weights that something wrote between the optimizer's last step and this one."""

    step: int
    changed: int
    looked: int
    first: str  # of the parameter, or of its moment; "" where it is not known


class Corruption(Detector):
    """Leaps of single weights."""

    modes = ("silent-data-corruption", "outlier-growth")
    parts = (_Writes,)
    _turn: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    """Steps between the last two looks at each. [S]"""
    _num_steps = 0
    """Observed; a state that was saved before has none of this and the next."""
    _last_written: int | None = None
    """Which of them is the last before which weights were written."""
    _writes: _Writes | None = None

    def __init__(self, num_sites: int) -> None:
        self._last = np.full(num_sites, np.nan)
        self._last_step: int | None = None
        self._last_at = np.full(num_sites, -1, dtype=np.int64)  # step of `_last`
        self._of = np.zeros(num_sites, dtype=np.uint64)  # the ranks of `_last`
        self._apart = np.zeros(num_sites, dtype=np.bool_)  # ranks have held different ones of it
        self._moves = Baseline(num_sites)
        self._reason = np.zeros(num_sites, dtype=np.bool_)  # of the step before: its gradient wrote what is seen now
        self._looked_at: tuple[int, Mask] | None = None  # step, sites whose gradient was measured in it
        self._climbs = np.zeros(num_sites, dtype=np.int64)  # leaps in a row, the same way
        self._leaped = np.zeros(num_sites)  # octaves of the last of them
        self._began = np.full((num_sites, 2), np.nan)  # step of the first of them, and log2 amax before it
        self._held: Finding | None = None  # a leap that the next step must tell apart from growth
        self._blind = True  # the step before was not judged

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = num_sites - len(self._last)
        if more > 0:
            self._last = np.concatenate([self._last, np.full(more, np.nan)])
            self._last_at = np.concatenate([self._last_at, np.full(more, -1, dtype=np.int64)])
            self._of = np.concatenate([self._of, np.zeros(more, dtype=np.uint64)])
            self._apart = np.concatenate([self._apart, np.zeros(more, dtype=np.bool_)])
            self._reason = np.concatenate([self._reason, np.zeros(more, dtype=np.bool_)])
            self._climbs = np.concatenate([self._climbs, np.zeros(more, dtype=np.int64)])
            self._leaped = np.concatenate([self._leaped, np.zeros(more)])
            self._began = np.concatenate([self._began, np.full((more, 2), np.nan)])
        self._moves.grow(num_sites)

    def frozen(self) -> None:
        """A leap is over when it is seen."""

    def resume(self) -> None:
        """Weights were loaded: they are those of the checkpoint, and not of the step before."""
        self._last[:], self._last_at[:], self._last_step = np.nan, -1, None
        self._reason[:], self._looked_at = False, None
        self._climbs[:], self._leaped[:], self._began[:], self._held = 0, 0.0, np.nan, None
        self._blind, self._writes = True, None

    def cut_off(self, now: CrossRankStep, limit: Limits) -> list[Finding]:
        """Values broke: a leap that waited for this step is told as it was, and one that was there before they broke."""
        held, self._held = self._held, None
        self._notice_written(now)
        first = self._was_there_first(now, limit)
        self._blind = True
        return [f for f in (held, first) if f is not None]

    def _was_there_first(self, now: CrossRankStep, limit: Limits) -> Finding | None:
        """A weight that leaped alone into the step in which values broke: the step before it left it so, and they read it.

        Only leaps that no growth makes are told, after a step that was judged: what is written between two broken steps may
        be of their gradients.
        """
        table = now.table
        weights = (table.role == WEIGHT) & table.rowwise
        if self._blind or self._last_step is None or len(self._last) != len(weights):
            return None
        move = np.where(weights & (self._last_at == self._last_step), now.log2_amax - self._last, np.nan)
        known = np.isfinite(move)
        usual, spread = np.nan_to_num(self._moves.median()), self._moves.spread(limit.weight_floor_octaves)
        known &= ~(self._apart & (now.holders("amax_max")[0] != self._of))
        need, apart_from_all = _apart_from_all(move, usual, known, np.maximum(CERTAIN_OCTAVES, SIGMA * spread))
        with np.errstate(invalid="ignore"):
            leap = known & (np.abs(move - usual) > need) & (apart_from_all > need) & ~self._reason
        leap &= self._moves.count >= MIN_KNOWN
        if not leap.any() or np.count_nonzero(leap) > max(1, FEW * np.count_nonzero(known)):
            return None
        self._last, last_at = np.where(leap, now.log2_amax, self._last), self._last_at
        looked_at = self._looked_at
        measured = looked_at is not None and looked_at[0] == self._last_step and len(looked_at[1]) == len(leap)
        ordinary = bool(measured and looked_at and looked_at[1][leap].all())
        return self._leap(now, leap, move, usual, known, ordinary, last_at, first=True)

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, weights, self._blind = ctx.now, ctx.weights(), False
        self._notice_written(now)
        reason, self._reason = self._reason, self._had_a_reason(ctx)
        looked_at, self._looked_at = self._looked_at, (now.step, self._gradients_known(ctx))
        amax = np.where(weights, now.log2_amax, np.nan)
        if np.all(np.isnan(amax)):
            return []
        move = amax - self._last
        apart = now.step - self._last_step if self._last_step is not None else 1
        # An expert that rests moves by all of its steps at once when it is called again; a Linear that has turns comes in its turn.
        since = np.where(self._last_at >= 0, now.step - self._last_at, 0)
        self._turn = np.pad(self._turn, (0, len(since) - len(self._turn)))
        rested = since > 2 * np.maximum(apart, self._turn)
        self._turn = np.where(np.isnan(amax) | (since == 0), self._turn, since)
        of, differ = now.holders("amax_max")
        rested |= self._apart & (of != self._of)
        move[rested], apart = np.nan, min(MAX_APART, apart)
        self._of, self._apart = np.where(np.isnan(amax), self._of, of), self._apart | (differ & weights)
        self._last, last_at = np.where(np.isnan(amax), self._last, amax), self._last_at
        self._last_at = np.where(np.isnan(amax), self._last_at, now.step)
        self._last_step = now.step
        known = ~np.isnan(move)
        spread = self._moves.spread(ctx.limit.weight_floor_octaves)
        steps = np.clip(np.where(np.isnan(amax), apart, since), 1, MAX_APART)
        need = np.maximum(ctx.limit.corruption_jump_octaves * steps, SIGMA * spread)
        usual = np.nan_to_num(self._moves.median())
        need, apart_from_all = _apart_from_all(move, usual, known, need)
        with np.errstate(invalid="ignore"):
            leap = known & (np.abs(move - usual) > need) & (apart_from_all > need) & (self._moves.count >= MIN_KNOWN)
        goes_on = self._follow(move, leap, amax, now.step)
        self._moves.push(move, ~(leap | goes_on))
        found = self._settled(now, goes_on)
        moves = leap | goes_on
        few = np.count_nonzero(moves) <= max(1, FEW * np.count_nonzero(known))
        if not moves.any() or not few or not ctx.clean or ctx.schedule.jump_step == now.step:
            return found
        with np.errstate(invalid="ignore"):
            grown = goes_on & ~reason & (self._climbs >= CLIMB_STEPS) & (move > 0)
        if grown.any():
            found.append(self._growth(ctx, grown, amax))
        leap &= ~reason & ~goes_on
        if not leap.any():
            return found
        # A weight is written by the gradient of the step before: only one that was measured can be called ordinary.
        measured = looked_at is not None and looked_at[0] == now.step - 1 and len(looked_at[1]) == len(leap)
        first = int(now.in_flow(leap)[0])
        ordinary = bool(measured and looked_at is not None and looked_at[1][first] and since[first] == 1)
        norms = now.scalar("grad_norm"), float(ctx.base.grad_norm.median()[0])
        mild = bool(np.all(np.abs(move[leap]) < CERTAIN_OCTAVES))
        new = mild and not ordinary and int(self._moves.count[leap].max()) < LONG_KNOWN
        corrupted = self._leap(now, leap, move, usual, known, ordinary, last_at, norms, seen=apart == 1, new=new)
        if mild:
            self._held = corrupted
            return found
        return [*found, corrupted]

    def _notice_written(self, now: CrossRankStep) -> None:
        self._num_steps += 1
        views = sorted((v for step in [now, *reversed(now.earlier)] for v in step.views), key=lambda view: view.rank)
        told = next(((view.step, logs) for view in views if (logs := view.logs()).get(WEIGHTS_CHANGED)), None)
        if told is None:
            return
        step, logs = told
        last, self._last_written = self._last_written, self._num_steps
        self._writes = None
        if last is None or self._num_steps - last > WRITTEN_BEFORE:
            name = next((n.removeprefix(p) for n in logs for p in (WRITTEN, CHANGED) if n.startswith(p)), "")
            looked = int(logs.get(WEIGHTS_LOOKED, 0))
            self._writes = _Writes(step, int(logs[WEIGHTS_CHANGED]), looked, name.rpartition(" of ")[2])

    def _written(self, now: CrossRankStep, leap: Mask, last_at: npt.NDArray[np.int64]) -> tuple[int, int, bool] | None:
        """(weights that something wrote since the looks before, of those looked at, whether the one that leaped is known to be one of
        them); None where that explains no leap."""
        by, rows = self._writes, now.in_flow(leap)
        if by is None or by.step < last_at[rows].max():
            return None
        modules = {now.table.facts[row].module for row in rows}
        known = any(by.first == module or by.first.startswith(f"{module}.") for module in modules)
        if by.changed < len(modules) or (by.changed == 1 and by.first and not known):
            return None
        return by.changed, by.looked, known and len(modules) == 1

    def _leap(
        self, now: CrossRankStep, leap: Mask, move: Floats, usual: Floats, known: Mask, ordinary: bool, last_at: npt.NDArray[np.int64],
        norms: tuple[float | None, float] = (None, math.nan), *, seen: bool = True, first: bool = False, new: bool = False,
    ) -> Finding:  # fmt: skip
        """Weights that leaped alone, after a gradient that was ordinary or is not known.

        Args:
            last_at: step in which each was looked at before. [S]
            first: values broke in this step, behind them.
            new: they leaped by little, and how this optimizer moves weights has hardly been seen.
        """
        rows = now.in_flow(leap)
        row, written = int(rows[0]), self._written(now, leap, last_at)
        after, before = 2.0 ** now.log2_amax[row], 2.0 ** (now.log2_amax[row] - move[row])
        evidence = [
            Evidence("amax_move", round(float(move[row]), 3), round(float(usual[row]), 4), "octaves", now.step),
            Evidence("amax_max", float(f"{after:.4g}"), float(f"{before:.4g}"), "x", now.step),
            Evidence("leaping_weights", len(rows), 0, f"of {int(np.count_nonzero(known))} weights", now.step),
        ]
        norm, usual_norm = norms
        if norm is not None and math.isfinite(usual_norm):
            evidence.append(Evidence("grad_norm", float(f"{norm:.4g}"), float(f"{usual_norm:.4g}"), "", None))
        if written is not None and self._writes is not None:
            evidence.append(Evidence("weights_changed", written[0], 0, f"of {written[1]} looked at", self._writes.step))
        severity: Severity = "warning" if new or (written is not None and not first) else "critical"
        if written is not None and not first and loads_most(*written[:2]):
            severity = "info"
        return now.finding(
            "silent-data-corruption",
            severity,
            rows,
            evidence,
            "shared" if ordinary else "unknown",
            tile="worst_tile",
            between=(int(last_at[row]), now.step),
            octaves=float(move[row]),
            by_hash=False,
            gradient_seen=ordinary,
            written=written,
            seen=seen,
            first=first,
            not_before=now.step if first else None,
        )

    def _follow(self, move: Floats, leap: Mask, amax: Floats, step: int) -> Mask:
        """Count leaps in a row; weights that go on as they leaped in the step before. [S]"""
        known = ~np.isnan(move)
        with np.errstate(invalid="ignore"):
            on = known & (self._climbs > 0) & (move * np.sign(self._leaped) >= GOES_ON * np.abs(self._leaped))
        begins = leap & ~on
        self._climbs = np.where(on, self._climbs + 1, np.where(begins, 1, np.where(known, 0, self._climbs)))
        self._leaped = np.where(known, np.where(on | begins, move, 0.0), self._leaped)
        self._began[begins] = np.stack((np.full(len(move), float(step)), amax - move), axis=1)[begins]
        return np.asarray(on)

    def _settled(self, now: CrossRankStep, goes_on: Mask) -> list[Finding]:
        """The leap of the step before, unless its weight has gone on in this one."""
        held, self._held = self._held, None
        if held is None or held.site is None:
            return []
        row = now.table.rows(np.array([held.site], dtype=np.uint64))
        if goes_on[row].any():
            return []
        return [replace(held, step=now.step, extra={**held.extra, "began": held.step, "not_before": held.step})]

    def _growth(self, ctx: Context, grown: Mask, amax: Floats) -> Finding:
        """A weight that leaped in each of the last steps."""
        now, rows = ctx.now, ctx.now.in_flow(grown)
        row = int(rows[0])
        began, usual = int(self._began[row, 0]), float(self._began[row, 1])
        evidence = [
            Evidence("amax_growth", round(float(amax[row] - usual), 2), 0, "octaves", began),
            Evidence("amax_max", float(f"{2.0 ** amax[row]:.4g}"), float(f"{2.0**usual:.4g}"), "x", began),
        ]
        return now.finding(
            "outlier-growth",
            "warning",
            rows,
            [*evidence, *damage(ctx, row)],
            ctx.verdict(rows[:1]),
            tile="worst_tile",
            growth=float(amax[row] - usual),
            climbed=int(self._climbs[row]),
            began=began,
            not_before=began,
        )

    @staticmethod
    def _had_a_reason(ctx: Context) -> Mask:
        """Sites of modules whose gradient was out of the ordinary, or all, where the norm of all gradients was. [S]"""
        norm, usual = ctx.now.scalar("grad_norm"), float(ctx.base.grad_norm.median()[0])
        table = ctx.now.table
        if norm is not None and math.isfinite(usual) and (not math.isfinite(norm) or norm > 8 * usual):
            return np.ones(len(table), dtype=np.bool_)
        with np.errstate(invalid="ignore"):
            large = ctx.gradients() & (ctx.above_usual > ORDINARY_GRADIENT)
        return np.isin(table.module, table.module[large])

    @staticmethod
    def _gradients_known(ctx: Context) -> Mask:
        """Sites of modules whose gradient was measured and has a baseline, or all, where the norm of all was. [S]"""
        norm, usual = ctx.now.scalar("grad_norm"), float(ctx.base.grad_norm.median()[0])
        table = ctx.now.table
        if norm is not None and math.isfinite(usual):
            return np.ones(len(table), dtype=np.bool_)
        return np.isin(table.module, table.module[ctx.gradients() & np.isfinite(ctx.above_usual)])


def _apart_from_all(move: Floats, usual: Floats, known: Mask, need: Floats) -> tuple[Floats, Floats]:
    """(what a leap must be more than, how far each moved beside what all did): after a jump of the LR, or in a divergence, all of them
    scatter more, and one the most. [S], octaves"""
    common = float(np.median(move[known])) if known.any() else 0.0
    apart = np.abs(move - usual - common)
    if np.count_nonzero(known) >= MIN_OTHERS:
        need = np.maximum(need, SIGMA * MAD_TO_SIGMA * float(np.median(apart[known])))
    return need, apart
