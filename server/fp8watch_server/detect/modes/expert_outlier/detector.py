"""An expert that leaves its siblings: mode 27, expert-outlier.

Shapes:     amax of each expert of a site [E], in the steps in which the site has its turn -> at most one finding
Thread:     detect worker

The record of a site is of all its experts together: one among many that grows hides behind the largest until it is the
largest, and one scale for each tile keeps the others healthy. So each expert is held against the median of the others of
the same parameter, and against where it stood to them before. Weights and inputs are judged; gradients go by the tokens
that an expert got. Ranks that hold the same parameter are merged by the largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.step_view import INPUT, WEIGHT, Mask

Floats = npt.NDArray[np.float64]

MIN_EXPERTS = 3
MIN_LOOKS = 3
"""Looks at a site before one is judged."""
MEMORY_LOOKS = 16
"""Looks over which where an expert stood is averaged."""
REPEAT_STEPS = 8
"""A finding is told again this often between the turns of its site: an incident ends after 20 steps without one."""


class ExpertOutliers(Detector):
    """Experts whose amax left that of the others."""

    modes = ("expert-outlier",)
    between_samples = True

    def __init__(self, num_sites: int) -> None:
        self._usual: dict[int, Floats] = {}  # row -> octaves above the median of its siblings, [E]
        self._looks: dict[int, int] = {}
        self._doubted: dict[int, int] = {}  # row of an input -> expert of one look: a second must agree
        self._open: dict[int, tuple[int, int, float, float, int, int]] = {}
        """Row -> expert, first step, octaves, usual octaves, rank, step in which it was told."""

    def grow(self, num_sites: int) -> None:
        """More sites were registered: what is followed is by site as it comes."""

    def frozen(self) -> Mask | None:
        """Baselines of sites go on."""
        return None

    def resume(self) -> None:
        """A new session: where experts stood stays, alarms are over."""
        super().resume()
        self._open, self._doubted = {}, {}

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, role = ctx.now, ctx.now.table.role
        for row, seen in now.experts.items():
            if role[row] in (WEIGHT, INPUT) and len(seen.amax) >= MIN_EXPERTS:
                self._look(ctx, row, seen.amax, seen.tokens if role[row] == INPUT else None, seen.rank)
        due = [row for row, last in self._open.items() if now.step - last[5] >= REPEAT_STEPS or last[5] < 0]
        if not due:
            return []
        rows = now.in_flow(np.isin(np.arange(len(now)), due))
        for row in due:
            self._open[row] = (*self._open[row][:5], now.step)
        return [self._finding(ctx, rows)]

    def _look(self, ctx: Context, row: int, amax: Floats, tokens: Floats | None, rank: npt.NDArray[np.int64]) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            octaves = np.log2(amax)
        octaves = np.where(np.isfinite(octaves) & (amax > 0), octaves, np.nan)
        if tokens is not None:
            octaves = np.where(tokens > 0, octaves, np.nan)
        if np.count_nonzero(~np.isnan(octaves)) < MIN_EXPERTS:
            return
        apart = octaves - np.nanmedian(octaves)
        usual, looks = self._usual.get(row), self._looks.get(row, 0)
        if usual is None or len(usual) != len(apart):
            usual, looks = np.full(len(apart), np.nan), 0
        limit = ctx.limit.expert_octaves
        with np.errstate(invalid="ignore"):
            far = (apart >= limit) & (apart - usual >= limit)
        known = looks >= MIN_LOOKS and ctx.warm and ctx.clean
        expert = int(np.nanargmax(np.where(far, apart, -np.inf))) if far.any() else -1
        if row in self._open:
            held = self._open[row][0]
            with np.errstate(invalid="ignore"):
                if not (apart[held] - usual[held] >= limit / 2):
                    del self._open[row]
        elif known and expert >= 0:
            if tokens is None or self._doubted.get(row) == expert:
                octave, before = float(apart[expert]), float(usual[expert])
                self._open[row] = (expert, ctx.now.step, octave, before, int(rank[expert]), -1)
            self._doubted[row] = expert
        else:
            self._doubted.pop(row, None)
        learn = ~np.isnan(apart) & ~far
        moved = usual + (apart - usual) / min(looks + 1, MEMORY_LOOKS)
        self._usual[row] = np.where(learn, np.where(np.isnan(usual), apart, moved), usual)
        self._looks[row] = looks + 1

    def _finding(self, ctx: Context, rows: npt.NDArray[np.int64]) -> Finding:
        first = int(rows[0])
        expert, since, octaves, usual, rank, _ = self._open[first]
        evidence = [Evidence("expert", expert, None, "", since),
                    Evidence("octaves_above_siblings", round(octaves, 1), round(usual, 1), "octaves", since)]  # fmt: skip
        amax = ctx.now.experts.get(first)
        if amax is not None:
            evidence.append(Evidence("amax_max", float(f"{amax.amax[expert]:.4g}"), None, "x", ctx.now.step))
        return ctx.now.finding(
            "expert-outlier", "warning", rows, evidence, ctx.verdict(rows), rank=rank, expert=expert, began=since,
            octaves=round(octaves, 1),
        )  # fmt: skip
