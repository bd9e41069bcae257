"""Scales that come from history: modes 5 (delayed-clip) and 6 (frozen-scale).

Shapes:     clip depth and scale_inv [S] -> at most one finding a mode
Thread:     detect worker

Under delayed scaling saturation is real: what the scale can carry is FP8_MAX·scale_inv, and the clip depth says how far
the operand stands above it. The share of saturated elements says nothing (5e-5 of them cost 17 dB). One clip is the
history being late, unless its depth, or depth and damage together, leave no doubt. Gradients leap by octaves in sound
runs: clipped less deeply than their own limit they get a warning and wake nobody. The same scale under continued
clipping, or a scale that does not answer to a new highest amax, is a history that no longer moves: frozen by a NaN or an
Inf, or fed by the wrong group. An input that leaps beyond what any one scale could carry is told as the outlier that it is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context, damage
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding, Severity
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.step_view import GRAD_OUTPUT, Mask

FIRST_OBSERVATIONS = 3
"""A history begins empty: the scale of the first calls fits nothing."""
CERTAIN_DEPTH = 4.0
"""Times the limit: two octaves above what clips are no accident, and are told at once."""
CERTAIN_DAMAGE_DB = 8.0
"""What a scale that is 2x too small costs. A clip whose SQNR is as far under the floor is told at once."""
E5M2_DB = 6.0
"""One mantissa bit less: what E5M2 gives under E4M3."""
NOTICED_DEPTH = 2.0
"""A single clip as deep as that costs 8 dB where it clips: a notice."""
BEYOND_ANY_SCALE_OCTAVES = 9.0
"""Over the usual amax. 448 lies 14.8 octaves above the smallest normal number of E4M3: under any one scale, of this tensor
or of the last, what was within six octaves of the usual amax is then below it. Its outlier is the cause, not the history."""
SAME_WINDOW = 10
NEW_HIGH = 0.01
"""Octaves above everything seen before that make a new highest amax."""
UNANSWERED_HIGHS = 3
_STATE = (
    "_num",
    "_scale",
    "_highest",
    "_was_high",
    "_depth",
    "_answered",
    "_same",
    "_clipped",
    "_unanswered",
    "_same_since",
)


class Delayed(Detector):
    """Clipping and frozen scales of sites with the delayed recipe."""

    modes = ("delayed-clip", "frozen-scale")

    def __init__(self, num_sites: int) -> None:
        self._num = np.zeros(num_sites, dtype=np.int64)
        self._scale = np.full(num_sites, np.nan)
        self._highest = np.full(num_sites, -np.inf)
        self._was_high = np.zeros(num_sites, dtype=np.bool_)
        self._depth = np.full(num_sites, np.nan)
        self._answered = np.full(num_sites, np.inf)  # smallest depth that a scale was seen to give way to
        self._same = np.zeros((num_sites, SAME_WINDOW), dtype=np.bool_)
        self._clipped = np.zeros((num_sites, SAME_WINDOW), dtype=np.bool_)
        self._unanswered = np.zeros((num_sites, SAME_WINDOW), dtype=np.bool_)
        self._same_since = np.full(num_sites, -1, dtype=np.int64)
        self._clip = Latch(num_sites, 2, 3)
        self._hurt = Latch(num_sites, 3, 4)  # gradients spike: one that was clipped is no news
        self._frozen = Latch(num_sites, 2, 3)
        self._harmed = Latch(num_sites, 2, 3)  # by the SQNR, which full samples have: a window of their own

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = num_sites - len(self._num)
        if more <= 0:
            return
        fresh = Delayed(more)
        for name in _STATE:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(fresh, name)]))
        for latch in (self._clip, self._hurt, self._frozen, self._harmed):
            latch.grow(num_sites)

    def resume(self) -> None:
        """A new session: histories were loaded, or begin empty."""
        super().resume()
        fresh = Delayed(len(self._num))
        for name in _STATE:
            setattr(self, name, getattr(fresh, name))

    def frozen(self) -> Mask:
        """Sites in alarm. [S]"""
        return self._clip.open | self._hurt.open | self._frozen.open | self._harmed.open

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, limit = ctx.now, ctx.limit
        delayed = ~now.table.current_scaling & ~np.isnan(now.clip_depth)
        if not delayed.any():
            return []
        self._num[delayed] += 1
        settled = delayed & (self._num > FIRST_OBSERVATIONS)
        depth = now.clip_depth
        frozen = self._judge_frozen(ctx, delayed, settled)
        with np.errstate(invalid="ignore"):
            outlier = ctx.leaping & (ctx.above_usual >= BEYOND_ANY_SCALE_OCTAVES) & ~self._clip.open
        if "outlier-growth" not in limit.disabled:
            settled &= ~outlier
        forward = now.table.role != GRAD_OUTPUT
        clip_limit = np.where(now.table.role == GRAD_OUTPUT, limit.clip_depth_grad_output, limit.clip_depth)
        with np.errstate(invalid="ignore"):
            floor_db = np.where(now.table.e5m2, limit.clip_sqnr_db - E5M2_DB, limit.clip_sqnr_db)
            damaged = (now.sqnr_db < floor_db) & (depth > limit.frozen_clip_depth)
            # While a model is young its activations grow out of any history: only what is certain is said then.
            hit = settled & ctx.warm & ((depth > clip_limit) | (damaged & forward))
            harmed = settled & ctx.warm & damaged & forward
            hurt = settled & ctx.warm & damaged & ~forward & (depth > limit.clip_depth)
            sure = settled & forward & (depth > CERTAIN_DEPTH * clip_limit)
            both = (depth > clip_limit) & (now.sqnr_db < floor_db - CERTAIN_DAMAGE_DB)
            sure |= settled & ctx.warm & forward & both
        clip = self._clip.update(hit, delayed, now.step, certain=sure)
        measured = delayed & ~np.isnan(now.sqnr_db)
        clip |= self._harmed.update(harmed, measured, now.step)
        clip |= self._hurt.update(hurt, measured, now.step)
        with np.errstate(invalid="ignore"):
            mild = settled & ctx.warm & forward & (depth > NOTICED_DEPTH) & ~self.frozen()
        found = []
        if frozen.any():
            found.append(self._frozen_finding(ctx, frozen))
        if (clip & ~frozen).any():
            found.append(self._clip_finding(ctx, clip & ~frozen))
        elif (mild & ~frozen).any():
            found.append(self._clip_finding(ctx, mild & ~frozen, notice=True))
        return found

    def _judge_frozen(self, ctx: Context, delayed: Mask, settled: Mask) -> Mask:
        now, limit = ctx.now, ctx.limit
        scale, amax = now.column("scale_inv_max"), now.log2_amax
        seen = delayed & ~np.isnan(scale)
        one = now.column("scale_inv_min") == scale  # of several micro-batches the first may move it for those behind it
        same = seen & (scale == self._scale) & one
        with np.errstate(invalid="ignore"):
            clipped = same & (now.clip_depth > limit.frozen_clip_depth)
            gave_way = seen & (scale > self._scale)
            high = seen & (amax > self._highest + NEW_HIGH) & (now.clip_depth > self._answered * 1.01)
        unanswered = same & self._was_high
        for ring, value in ((self._same, same), (self._clipped, clipped), (self._unanswered, unanswered)):
            ring[seen] = np.concatenate([ring[seen, 1:], value[seen, None]], axis=1)
        self._unanswered[seen & ~same] = False  # what moves has answered
        self._same_since = np.where(same, np.where(self._same_since < 0, now.step, self._same_since), -1)
        self._was_high = np.where(seen, high, self._was_high)
        self._answered = np.where(gave_way, np.fmin(self._answered, self._depth), self._answered)
        self._depth = np.where(seen, now.clip_depth, self._depth)
        self._highest = np.fmax(self._highest, np.where(seen, amax, np.nan))
        self._scale = np.where(np.isnan(scale), self._scale, scale)
        num_same = np.count_nonzero(self._same, axis=1)
        under_clip = (np.count_nonzero(self._clipped[:, -4:], axis=1) >= 3) & clipped
        deaf = np.count_nonzero(self._unanswered, axis=1) >= UNANSWERED_HIGHS
        # One that moves in this very step answers, however late: that is delayed-clip's matter.
        hit = settled & same & (num_same >= limit.frozen_steps) & (under_clip | deaf)
        return self._frozen.update(hit, seen, now.step)

    def _frozen_finding(self, ctx: Context, mask: Mask) -> Finding:
        now = ctx.now
        grave = mask & ((now.clip_depth > ctx.limit.clip_depth) | ctx.unhealthy)
        rows = _gravest_first(now.in_flow(mask), grave)
        row = int(rows[0])
        depth, since = float(now.clip_depth[row]), int(self._same_since[row])
        evidence = [
            Evidence("scale_inv_max", float(now.column("scale_inv_max")[row]), "follows amax", "1", since),
            Evidence("unchanged_steps", int(np.count_nonzero(self._same[row])), 0, f"of {SAME_WINDOW} steps", since),
            Evidence("clip_depth", round(depth, 3), "1 or less", "ratio", int(self._frozen.since[row])),
        ]
        deaf = int(np.count_nonzero(self._unanswered[row]))
        if deaf:
            evidence.append(Evidence("new_highs_without_answer", deaf, 0, "steps", since))
        evidence += damage(ctx, row)
        severity: Severity = "critical" if grave.any() else "warning"
        return now.finding(
            "frozen-scale",
            severity,
            rows,
            evidence,
            "fp8",
            tile="worst_tile",
            field="scale_ratio_max",
            depth=depth,
            began=int(self._frozen.since[row]),
            not_before=min(since, int(self._frozen.since[row])) if since >= 0 else None,
        )

    def _clip_finding(self, ctx: Context, mask: Mask, *, notice: bool = False) -> Finding:
        now = ctx.now
        with np.errstate(invalid="ignore"):
            bad = now.sqnr_db < np.where(now.table.e5m2, ctx.limit.clip_sqnr_db - E5M2_DB, ctx.limit.clip_sqnr_db)
            forward = bad | (now.clip_depth > CERTAIN_DEPTH)
            backward = now.clip_depth > ctx.limit.clip_depth_grad_output
        grave = mask & np.where(now.table.role == GRAD_OUTPUT, backward, forward)
        rows = _gravest_first(now.in_flow(mask), grave)
        row = int(rows[0])
        depth = float(now.clip_depth[row])
        since = max(int(latch.since[row]) for latch in (self._clip, self._hurt, self._harmed))
        since = now.step if notice else since
        evidence = [
            Evidence("clip_depth", round(depth, 3), "1 or less", "ratio", since),
            Evidence("amax_max", float(f"{now.column('amax_max')[row]:.4g}"), _usual_amax(ctx, row), "x", since),
            *damage(ctx, row),
        ]
        if len(rows) > 1:
            evidence.append(Evidence("clipped_sites", len(rows), 0, "sites", since))
        facts = now.table.facts[row]
        return now.finding(
            "delayed-clip",
            "info" if notice else "critical" if grave.any() else "warning",
            rows,
            evidence,
            "fp8",
            tile="noise_tile",
            field="scale_ratio_max",
            depth=depth,
            began=since,
            swiglu=facts.operand == "input" and any(w in facts.module for w in ("down_proj", "fc2", "w2", "c_proj")),
        )


def _gravest_first(rows: npt.NDArray[np.int64], grave: Mask) -> npt.NDArray[np.int64]:
    """Rows in flow, the first that is grave before all others: what is named is what the severity is of."""
    first = rows[grave[rows]][:1]
    return np.concatenate([first, rows[~np.isin(rows, first)]])


def _usual_amax(ctx: Context, row: int) -> float | None:
    usual = ctx.base.amax.median()[row]
    return float(f"{2.0**usual:.4g}") if np.isfinite(usual) else None
