"""Tiles on their way to zero: mode 3, dying-tile.

Shapes:     smallest non-zero tile amax [S] -> at most one finding
Thread:     detect worker

The step before zero-tile-eps, thirty steps and more ahead of it: one group of channels fades, its scale runs towards
Inf. Below 2^-90 there is nothing to wait for; above, a fall that lasts, while the largest tile of the site stands. What
dies does not come back: a smallest tile that jumps up by ten octaves from one sample to the next is another in each, by chance,
as where features of distances decay without end.

A tile of one token is another matter. Where attention grows sharp, what reaches a single token's value, query or key
fades to the last denormal in healthy training, in another token each step, and nobody needs it. So a tile along the
channels of one token counts only where the tiles across tokens fade as well: that is what a group of channels does.
"""

from __future__ import annotations

import numpy as np

from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.modes.dying_tile.words import GUARD
from fp8watch_server.detect.step_view import Mask

WINDOW = 17
MONOTONE = 0.85
"""Share of the steps that go down: the smallest tile of a gradient jumps by ten octaves either way, and comes back."""
RISE_OCTAVES = 10.0
"""From one sample to the next, within the window."""
SLOW_RISE_OCTAVES = 5.0
"""The same of a fall that is slow: of activations that are squared behind a ReLU the smallest tile is another in each step."""
GOES_ON = 0.25
"""Share of a slow fall that its second half must be: behind a change of the data gradients settle, fast and then no more."""
KNOWN = 9
"""Samples from which on that can be told."""
DEATH_LOG2 = -120.0
"""448/amax overflows float32 a little below: 2^-119.2."""


class Dying(Detector):
    """The smallest tile of each site."""

    modes = ("dying-tile",)

    def __init__(self, num_sites: int) -> None:
        self._recent = Baseline(num_sites, WINDOW)
        self._steps: list[int] = []
        self._latch = Latch(num_sites, 2, 3)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._recent.grow(num_sites)
        self._latch.grow(num_sites)

    def resume(self) -> None:
        """A new session: a fall across the restart is none."""
        super().resume()
        self._recent.forget()
        self._steps = []

    def frozen(self) -> Mask:
        """Sites in alarm. [S]"""
        return self._latch.open

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, limit = ctx.now, ctx.limit
        amin = now.log2_amin
        self._recent.push(amin)
        self._steps = [*self._steps, now.step][-WINDOW:]
        if not ctx.clean:
            return []
        oldest = self._recent.oldest()
        with np.errstate(invalid="ignore"):
            fallen = oldest - amin
            rate = -fallen / max(self._steps[-1] - self._steps[0], 1)
            slow = ctx.warm & (fallen > limit.dying_fall_octaves)
            if slow.any():
                of_window = self._recent.ordered(slow).astype(np.float64)
                change = np.diff(of_window, axis=1)
                falls = np.count_nonzero(change < 0, axis=1) >= MONOTONE * (WINDOW - 1)
                goes_on = of_window[:, WINDOW // 2] - of_window[:, -1] >= GOES_ON * (of_window[:, 0] - of_window[:, -1])
                slow[slow] = falls & goes_on & ~(change >= SLOW_RISE_OCTAVES).any(axis=1)
                slow &= ~(np.nan_to_num(ctx.above_usual) < -limit.dead_octaves)  # the largest tile stands
            deep = (amin < limit.dying_log2_amax) & (self._recent.count >= KNOWN)
            if deep.any():
                change = np.diff(self._recent.ordered(deep).astype(np.float64), axis=1)
                deep[deep] = ~(change >= RISE_OCTAVES).any(axis=1)
            hit = now.table.of_channels(deep | slow)
        hit = self._latch.update(hit, ~np.isnan(amin), now.step)
        if not hit.any():
            return []
        rows = now.in_flow(hit)
        row = int(rows[0])
        since = int(self._latch.since[row])
        evidence = [
            Evidence("amax_min_nonzero", float(now.column("amax_min_nonzero")[row]), _amax(oldest[row]), "x", since),
            Evidence("eps", now.table.facts[row].eps, "1e-12", "x"),
        ]
        if np.isfinite(fallen[row]):
            evidence.insert(
                1, Evidence("fallen", round(float(fallen[row]), 1), 0, f"octaves in {WINDOW - 1} samples", since)
            )
        if np.isfinite(rate[row]) and rate[row] < 0:
            left = (float(amin[row]) - DEATH_LOG2) / -float(rate[row])
            evidence.append(Evidence("steps_to_zero", max(0, int(left)), None, "steps"))
        return [
            now.finding(
                "dying-tile",
                "warning" if any(now.table.facts[int(r)].eps < GUARD for r in rows) else "info",
                rows,
                evidence,
                "fp8",
                tile="noise_tile",
                field="amax_min_nonzero",
                began=since,
                stands=bool(np.isfinite(ctx.above_usual[row])),
            )
        ]


def _amax(log2: float) -> float | None:
    return float(f"{2.0**log2:.4g}") if np.isfinite(log2) else None
