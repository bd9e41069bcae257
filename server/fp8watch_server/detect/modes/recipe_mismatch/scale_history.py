"""Whether scales continue where a run resumes: mode 10, recipe-mismatch.

Shapes:     scales [S] of each step -> at most one finding an attempt
Thread:     detect worker
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.finding import Evidence, Finding

KEEP_NEWEST = 16
KEEP_EACH = 50
MAX_KEPT = 64


class ScaleHistory:
    """Scales of the attempts before, to say at a resume whether they continue. Only of scales with a memory."""

    def __init__(self) -> None:
        self._kept: dict[int, npt.NDArray[np.float32]] = {}
        self._first = True

    def restart(self) -> None:
        """A new attempt begins: its first step is compared."""
        self._first = True

    def observe(self, now: CrossRankStep, limit_octaves: float) -> Finding | None:
        """Compare the first step of an attempt, keep the others."""
        scale = np.where(~now.table.current_scaling, -now.log2_scale_inv, np.nan)
        if np.all(np.isnan(scale)):
            return None
        first, self._first = self._first, False
        found = self._compare(now, scale, limit_octaves) if first and self._kept else None
        self._keep(now.step, scale.astype(np.float32))
        return found

    def _keep(self, step: int, scale: npt.NDArray[np.float32]) -> None:
        for later in [kept for kept in self._kept if kept > step]:  # of the attempt before: this one writes its own
            del self._kept[later]
        self._kept[step] = scale
        old = [kept for kept in sorted(self._kept)[:-KEEP_NEWEST] if kept % KEEP_EACH]
        for dropped in old:
            del self._kept[dropped]
        while len(self._kept) > MAX_KEPT:
            del self._kept[min(self._kept)]

    def _compare(self, now: CrossRankStep, scale: npt.NDArray[np.float64], limit_octaves: float) -> Finding | None:
        before = [kept for kept in self._kept if kept <= now.step]
        if not before:
            return None
        saved_step = max(before)
        kept = self._kept[saved_step].astype(np.float64)
        saved = np.full(len(scale), np.nan)
        saved[: len(kept)] = kept
        moved = scale - saved
        known = ~np.isnan(moved)
        if not known.any():
            return None
        off = known & (np.abs(np.nan_to_num(moved)) > limit_octaves)
        if np.count_nonzero(off) * 2 <= np.count_nonzero(known):
            return None
        rows = now.in_flow(off)
        row = int(rows[0])
        evidence = [
            Evidence("scale", float(f"{2.0 ** scale[row]:.6g}"), float(f"{2.0 ** saved[row]:.6g}"), "1", saved_step),
            Evidence("moved_scales", len(rows), 0, f"of {int(np.count_nonzero(known))} scales", now.step),
            Evidence("median_move", round(float(np.median(moved[known])), 2), 0, "octaves", now.step),
        ]
        change = ("scale", evidence[0].value, evidence[0].baseline, f"step {saved_step} of the attempt before")
        return now.finding("recipe-mismatch", "warning", rows, evidence, "fp8", changes=[change], resumed=True)
