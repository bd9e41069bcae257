"""What every statistical detector may look at besides the step itself: baselines, history, schedule, thresholds.

Shapes:     columns [S]
Thread:     detect worker
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.finding import Evidence, Verdict
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.lr_schedule import Schedule
from fp8watch_server.detect.step_view import GRAD_OUTPUT, INPUT, OUTPUT, WEIGHT, Mask

Floats = npt.NDArray[np.float64]
RECENT = 17
"""Observations in the ring of what came last, clean or not: 16 steps of growth."""
UNDERFLOW_FLOOR = 0.005
SQNR_FLOOR_DB = 0.3
KURTOSIS_FLOOR_OCTAVES = 0.3
AFTER_LR_STEPS = 10
"""Observed steps after a leap of the LR in which values that leap are its consequence."""
LEAP_SIGMA = 6.0


@dataclass
class Baselines:
    """What is usual for each site, and for the run."""

    amax: Baseline
    amin: Baseline
    sqnr: Baseline
    underflow: Baseline
    kurtosis: Baseline
    recent_amax: Baseline  # always fed
    steps: list[int] = field(default_factory=list)  # of recent_amax
    loss: Baseline = field(default_factory=lambda: Baseline(1))
    grad_norm: Baseline = field(default_factory=lambda: Baseline(1))

    @classmethod
    def of(cls, num_sites: int) -> Baselines:
        """Empty ones."""
        amax, amin, sqnr, underflow, kurtosis = (Baseline(num_sites) for _ in range(5))
        return cls(amax, amin, sqnr, underflow, kurtosis, Baseline(num_sites, RECENT))

    def per_site(self) -> list[Baseline]:
        """Those with one series a site."""
        return [self.amax, self.amin, self.sqnr, self.underflow, self.kurtosis, self.recent_amax]


@dataclass
class Context:
    """One step's surroundings."""

    now: CrossRankStep
    base: Baselines
    schedule: Schedule
    limit: Limits
    num_steps: int  # observed since the attempt began
    warm: bool  # statistical tests may judge
    clean: bool  # no other fault is known that would explain what is seen

    @cached_property
    def floor(self) -> Floats:
        """Smallest spread of log2 amax that is believed, by role. [S]"""
        role = self.now.table.role
        floors = np.full(len(role), self.limit.input_floor_octaves)
        floors[role == WEIGHT] = self.limit.weight_floor_octaves
        floors[role == GRAD_OUTPUT] = self.limit.grad_output_floor_octaves
        return floors

    def known(self, baseline: Baseline) -> Mask:
        """Series whose baseline is long enough to judge with. [S]"""
        return np.asarray(baseline.count >= self.limit.min_baseline_steps)

    @cached_property
    def above_usual(self) -> Floats:
        """log2 amax over the site's own baseline; of gradients, less what all gradients did (common mode). [S]"""
        change = np.where(self.known(self.base.amax), self.now.log2_amax - self.base.amax.median(), np.nan)
        gradients = self.now.table.role == GRAD_OUTPUT
        common = change[gradients & ~np.isnan(change)]
        if len(common) >= 3:
            change[gradients] -= np.median(common)
        return change

    @property
    def lr_leaped(self) -> bool:
        """Whether the LR leaped a few steps ago: what leaps now follows it."""
        jump = self.schedule.jump_step
        return jump is not None and self.now.step - jump <= AFTER_LR_STEPS

    @cached_property
    def leaping(self) -> Mask:
        """Inputs, and outputs that a probe looks at, whose amax stands octaves above their own band in this step. [S]

        What comes before every GEMM, as an embedding, moves with its table alone: less is a leap there.
        """
        table = self.now.table
        named = (self.inputs() | (table.role == OUTPUT)) & ~np.isnan(self.above_usual)
        if not self.warm or not self.clean or self.lr_leaped:
            return np.zeros(len(self.now), dtype=np.bool_)
        need = np.where(table.before_gemms, self.limit.outlier_leap_octaves / 2, self.limit.outlier_leap_octaves)
        with np.errstate(invalid="ignore"):
            over = self.above_usual - LEAP_SIGMA * (self.base.amax.spread(self.floor) - self.floor)
            return np.asarray(named & (over >= need))

    @cached_property
    def sqnr_drop(self) -> Floats:
        """dB under the site's own baseline. [S]"""
        return np.where(self.known(self.base.sqnr), self.base.sqnr.median() - self.now.sqnr_db, np.nan)

    @cached_property
    def underflow_rise(self) -> Floats:
        """Share over the site's own baseline. [S]"""
        return np.where(self.known(self.base.underflow), self.now.underflow - self.base.underflow.median(), np.nan)

    @cached_property
    def unhealthy(self) -> Mask:
        """Sites whose quantiser does worse than it used to: SQNR, underflow, or values that are clipped. [S]"""
        with np.errstate(invalid="ignore"):
            worse = (self.sqnr_drop > self.limit.sqnr_drop_db) | (self.underflow_rise > self.limit.underflow_points)
            table = self.now.table
            most = np.where(table.current_scaling & ~table.four_bit, 1 + 2.0**-10, self.limit.clip_depth)
            clipped = self.now.clip_depth > most
        return np.asarray(worse | clipped)

    @cached_property
    def health_known(self) -> Mask:
        """Sites whose quantiser was measured in this step: its SQNR, or what it clipped and what it made 0. [S]"""
        counted = ~np.isnan(self.now.clip_depth) & ~np.isnan(self.underflow_rise)
        return np.asarray(~np.isnan(self.sqnr_drop) | counted)

    def verdict(self, rows: npt.NDArray[np.int64]) -> Verdict:
        """Of an alarm at these sites: FP8 when a quantiser there is not healthy, shared when all are, as measured."""
        if np.any(self.unhealthy[rows]):
            return "fp8"
        return "shared" if np.any(self.health_known[rows]) else "unknown"

    def inputs(self) -> Mask:
        """Rowwise inputs. [S]"""
        return np.asarray((self.now.table.role == INPUT) & self.now.table.rowwise)

    def weights(self) -> Mask:
        """Weights. [S]"""
        return np.asarray((self.now.table.role == WEIGHT) & self.now.table.rowwise)

    def gradients(self) -> Mask:
        """Gradients, both directions. [S]"""
        return np.asarray(self.now.table.role == GRAD_OUTPUT)


def damage(ctx: Context, row: int) -> list[Evidence]:
    """SQNR, saturation and underflow of a site against what is usual there."""
    now, evidence = ctx.now, []
    sqnr = float(now.sqnr_db[row])
    if np.isfinite(sqnr):
        usual = float(ctx.base.sqnr.median()[row])
        evidence.append(
            Evidence("tile_sqnr_db", round(sqnr, 2), round(usual, 2) if np.isfinite(usual) else None, "dB", None)
        )
    saturated = now.column("num_saturated")[row]
    if saturated > 0:
        evidence.append(Evidence("num_saturated", int(saturated), 0, "elements", None))
    share = float(now.underflow[row])
    usual = float(ctx.base.underflow.median()[row])
    if np.isfinite(share) and share > 0.01:
        baseline = round(usual, 4) if np.isfinite(usual) else None
        evidence.append(Evidence("underflow_ratio", round(share, 4), baseline, "share", None))
    return evidence
