"""Gradients that vanish in the cast, seen by their count: mode 8, gradient-underflow.

Shapes:     share of underflow [S] of gradients -> at most one finding
Thread:     detect worker

The invariant finds a scale that belongs to something larger (`invariant`); this one finds the rest: an eps that clamps,
a format too narrow, gradients with a few giants. Eight points above the site's own baseline, six of its σ, and twice
the baseline, for several steps: in healthy training the count of some gradients leaps by twenty points for a single
step. Twenty points more than that for two steps are told at once.
"""

from __future__ import annotations

import numpy as np

from fp8watch_server.detect.context import UNDERFLOW_FLOOR, Context, damage
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.step_view import Mask

SIGMA = 6.0
SURE_POINTS = 0.2


class Underflow(Detector):
    """Underflow of gradients over their baseline."""

    modes = ("gradient-underflow",)

    def __init__(self, num_sites: int) -> None:
        self._latch = Latch(num_sites, 4, 6)
        self._sure = Latch(num_sites, 2, 2)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._latch.grow(num_sites)
        self._sure.grow(num_sites)

    def frozen(self) -> Mask:
        """Sites in alarm. [S]"""
        return self._latch.open | self._sure.open

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        if not ctx.warm or not ctx.clean:
            return []
        rise = ctx.underflow_rise
        need = np.maximum(ctx.limit.underflow_alarm_points, SIGMA * ctx.base.underflow.spread(UNDERFLOW_FLOOR))
        need = np.maximum(need, np.nan_to_num(ctx.base.underflow.median()))
        seen = ctx.gradients() & ~np.isnan(rise)
        # Whether the scale harms them, of a scale from history, only a full sample tells.
        seen &= ctx.now.table.current_scaling | ~np.isnan(ctx.sqnr_drop) | (ctx.now.column("num_eps_tiles") > 0)
        # What a fitting scale rounds to 0 is small beside its own tile: gradients of a model that learns to attend grow
        # sparse, and that is no fault. So where the scale comes from the tile itself, an alarm needs tiles that eps clamps.
        with np.errstate(invalid="ignore"):
            dropped = (ctx.sqnr_drop > ctx.limit.sqnr_drop_db) & ~ctx.now.table.current_scaling
            harmed = dropped | (ctx.now.column("num_eps_tiles") > 0)
            rise = np.where(harmed, rise, 0.0)
            hit = self._latch.update(rise > need, seen, ctx.now.step)
            hit |= self._sure.update(rise > need + SURE_POINTS, seen, ctx.now.step)
        if not hit.any():
            return []
        rows = ctx.now.in_flow(hit)
        row = int(rows[0])
        since = max(int(self._latch.since[row]), int(self._sure.since[row]))
        usual = float(ctx.base.underflow.median()[row])
        evidence = [
            Evidence("underflow_ratio", round(float(ctx.now.underflow[row]), 4), round(usual, 4), "share", since)
        ]
        clamped = ctx.now.column("num_eps_tiles")[row]
        if clamped > 0:
            evidence.append(Evidence("num_eps_tiles", int(clamped), 0, "tiles", since))
        evidence += [e for e in damage(ctx, row) if e.field != "underflow_ratio"]
        if len(rows) > 1:
            evidence.append(Evidence("underflow_sites", len(rows), 0, "sites", since))
        return [
            ctx.now.finding(
                "gradient-underflow",
                "warning",
                rows,
                evidence,
                "fp8",
                tile="noise_tile",
                field="num_underflow",
                statistical=True,
                began=since,
                sampled=clamped <= 0 or np.isnan(clamped),
                eps_tiles=int(clamped) if clamped > 0 else 0,
            )
        ]
