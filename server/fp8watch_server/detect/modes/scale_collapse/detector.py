"""Delayed scales that fall and do not come back: mode 22, scale-collapse.

Shapes:     scale_inv [S] of delayed sites -> at most one finding
Thread:     detect worker

A delayed scale falls when amax rises: three octaves within a hundred steps, less what all gradients did together, is a
run away. What becomes of a GradScaler's is in `overflows`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.step_view import Mask

EACH = 4
MIN_PUSHES = 8
MONOTONE = 0.6
SIGMA = 6.0
FLOOR_LOG2_SCALE = -126
"""The smallest normal scale: where a falling one ends."""


class Collapse(Detector):
    """Delayed scales."""

    modes = ("scale-collapse",)
    between_samples = True

    @classmethod
    def make(cls, num_sites: int, limit: Limits) -> Collapse:
        """One that has seen nothing, with the window of the run."""
        return cls(num_sites, limit.collapse_window_steps)

    def __init__(self, num_sites: int, window_steps: float = 100) -> None:
        self._scale = Baseline(num_sites, max(2, int(window_steps) // EACH))
        self._num = 0
        self._fallen = np.full(num_sites, np.nan)
        self._steps: list[int] = []  # of the scales that are kept
        self._latch = Latch(num_sites, 3, 4)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._scale.grow(num_sites)
        self._latch.grow(num_sites)
        more = num_sites - len(self._fallen)
        if more > 0:
            self._fallen = np.concatenate([self._fallen, np.full(more, np.nan)])

    def resume(self) -> None:
        """A new session: scales begin where their history does."""
        super().resume()
        self._scale.forget()
        self._num, self._fallen[:], self._steps = 0, np.nan, []

    def frozen(self) -> Mask:
        """Sites in alarm. [S]"""
        return self._latch.open

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now = ctx.now
        scale = np.where(~now.table.current_scaling, now.log2_scale_inv, np.nan)
        if np.all(np.isnan(scale)):
            return []
        if not ctx.warm:
            self._scale.forget()
            self._num, self._steps = 0, []
            return []
        if self._num % EACH == 0:
            self._scale.push(scale)
            self._steps = [*self._steps, now.step][-self._scale.window :]
            self._fallen = self._fall(ctx)
        self._num += 1
        fallen = np.where(np.isnan(scale), np.nan, self._fallen)
        with np.errstate(invalid="ignore"):
            need = np.maximum(ctx.limit.collapse_octaves, SIGMA * np.nan_to_num(ctx.base.amax.spread(ctx.floor)))
            hit = fallen >= np.where(ctx.gradients(), np.maximum(need, 2 * ctx.limit.collapse_octaves), need)
        hit = self._latch.update(hit, ~np.isnan(fallen), now.step)
        return [self._finding(ctx, hit, fallen)] if hit.any() else []

    def _fall(self, ctx: Context) -> npt.NDArray[np.float64]:
        """Octaves that each scale fell over the window, less what all gradients did; NaN where it did not fall for good.

        Its ends are medians of three, and most steps must go down: one outlier that takes the scale along is a clip.
        """
        history = self._scale.ordered().astype(np.float64)
        begin = np.argmax(~np.isnan(history), axis=1)
        enough = (self._scale.count >= MIN_PUSHES) & ~np.isnan(history[:, -3:]).any(axis=1)
        rows = np.arange(len(history))[:, None]
        first = np.sort(history[rows, np.minimum(begin[:, None] + np.arange(3), history.shape[1] - 1)], axis=1)[:, 1]
        fallen = np.sort(history[:, -3:], axis=1)[:, 1] - first
        gradients = ctx.gradients() & enough
        if np.count_nonzero(gradients) >= 3:
            fallen[gradients] -= max(0.0, float(np.median(fallen[gradients])))
        move = np.diff(history, axis=1)
        with np.errstate(invalid="ignore"):
            moving = np.maximum(np.count_nonzero(np.abs(move) > 1e-6, axis=1), 1)
            steady = np.count_nonzero(move > 1e-6, axis=1) >= MONOTONE * moving
            leap = np.nan_to_num(np.abs(move)).max(axis=1, initial=0) > 0.5 * np.nan_to_num(fallen)
        return np.where(enough & steady & ~leap, fallen, np.nan)

    def _finding(self, ctx: Context, hit: Mask, fallen: npt.NDArray[np.float64]) -> Finding:
        rows = ctx.now.in_flow(hit)
        row = int(rows[0])
        since = int(self._latch.since[row])
        octaves = float(fallen[row])
        log2_scale = -float(ctx.now.log2_scale_inv[row])
        over = max(self._steps[-1] - self._steps[0], 1) if self._steps else ctx.limit.collapse_window_steps
        rate = octaves / over
        to_floor = int((log2_scale - FLOOR_LOG2_SCALE) / rate)
        evidence = [
            Evidence("scale_fall", round(octaves, 2), 0, f"octaves in {over:g} steps", since),
            Evidence("scale_inv_max", float(ctx.now.column("scale_inv_max")[row]), None, "1", None),
            Evidence("steps_to_floor", to_floor, None, "steps", None),
        ]
        return ctx.now.finding(
            "scale-collapse",
            "warning",
            rows,
            evidence,
            ctx.verdict(rows[:1]),
            tile="worst_tile",
            grad_scaler=False,
            began=since,
        )
