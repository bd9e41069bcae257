"""What every statistical detector may look at besides the step itself: baselines, history, schedule, thresholds.

Shapes:     columns [S]
Thread:     detect worker
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import Baseline, nanmedian
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
CAME_TO = 4
"""Values of one window that make it one. What leaps once in a while is none."""
PAST_WINDOWS = 16
"""Windows of amax for which such a level is remembered."""
EMPTY_OCTAVES = 0.25
"""Of the largest tile over the smallest, at most, of an operand of rows that are all alike; behind a norm it is 0.5 and more."""
EMPTY_SHARE = 3 / 8
"""Of the last values, at least: fewer than half, as a median is a few steps old."""
SAME_OCTAVES = 0.01
"""By more than that the largest and the smallest tile part where rows are no longer alike."""


@dataclass
class Baselines:
    """What is usual for each site, and for the run."""

    amax: Baseline
    amin: Baseline
    sqnr: Baseline
    underflow: Baseline
    kurtosis: Baseline
    recent_amax: Baseline  # always fed
    came_to: Baseline  # log2, of each window of amax that is over: what the site came to and went back from
    steps: list[int] = field(default_factory=list)  # of recent_amax
    loss: Baseline = field(default_factory=lambda: Baseline(1))
    grad_norm: Baseline = field(default_factory=lambda: Baseline(1))

    @classmethod
    def of(cls, num_sites: int) -> Baselines:
        """Empty ones."""
        amax, amin, sqnr, underflow, kurtosis = (Baseline(num_sites) for _ in range(5))
        return cls(
            amax, amin, sqnr, underflow, kurtosis, Baseline(num_sites, RECENT), Baseline(num_sites, PAST_WINDOWS)
        )

    def per_site(self) -> list[Baseline]:
        """Those with one series a site."""
        return [self.amax, self.amin, self.sqnr, self.underflow, self.kurtosis, self.recent_amax, self.came_to]


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
        with np.errstate(invalid="ignore"):
            over = self.above_usual - LEAP_SIGMA * (self.base.amax.spread(self.floor) - self.floor)
            return np.asarray(self._far & (over >= self._leap) & ~self.returning)

    @cached_property
    def returning(self) -> Mask:
        """Those whose amax stands octaves above the usual, and no higher above where the site came to before and went back from
        than any input may stand above its usual: that of an expert that had no tokens in most of the last steps, and has now. That
        holds as far as it is no leap above what its like, the other experts, have or came to: what comes and goes in one layer alone is one. Where all
        rows were alike in those steps, as empty slots are, it may be as high above what its like have; and where they are
        alike now, no tokens came. [S]"""
        far = self._far
        rows, table = np.flatnonzero(far), self.now.table
        if not len(rows):
            return far
        kind = table.kind_of_module[table.module]
        asked = far | (self.inputs() & np.isin(kind, kind[rows]))
        came_to, usual = np.full(len(far), np.nan), np.full(len(far), np.nan)
        before = np.fmax.reduce(self.base.came_to.ordered(asked), axis=1)
        came_to[asked] = np.fmax(went_back_from(self.base.amax, self.limit, asked), before)
        usual[asked] = np.fmax(self.base.amax.median()[asked], came_to[asked])
        of_like = np.where(self.inputs(), self._of_its_like(np.where(self.inputs(), usual, np.nan)), np.nan)[rows]
        empty, gap = self._empty(far)
        no_leap = of_like + self._leap[rows] - self.limit.outlier_input_octaves
        capped = np.where(np.isnan(of_like), came_to[rows], np.minimum(came_to[rows], no_leap))
        level = np.where(empty, np.fmax(came_to[rows], of_like), capped)
        amax, amin = self.now.log2_amax[rows], self.now.log2_amin[rows]
        out = np.zeros(len(far), dtype=np.bool_)
        with np.errstate(invalid="ignore"):
            tokens = ~empty | (amax - amin > gap + SAME_OCTAVES)
            out[rows] = tokens & (amax <= level + self.limit.outlier_input_octaves)
        return out

    def _empty(self, asked: Mask) -> tuple[Mask, Floats]:
        """Of the sites that are asked for, those of several tiles that were all of one size in many of the last steps, and how many
        octaves those parted in these. [asked] each"""
        gap = (self.base.amax.ordered(asked) - self.base.amin.ordered(asked)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            alike = gap <= EMPTY_OCTAVES
            many = np.count_nonzero(alike, axis=1) >= EMPTY_SHARE * np.count_nonzero(~np.isnan(gap), axis=1)
            return many & (self.now.column("num_tiles")[asked] > 1), nanmedian(np.where(alike, gap, np.nan))

    def _of_its_like(self, values: Floats) -> Floats:
        """The largest of these values among the sites of other modules that have the same name but for a number; NaN where there is
        none. [S] -> [S]"""
        table, known = self.now.table, np.flatnonzero(~np.isnan(values))
        of_module = np.full(len(table.modules), -np.inf)
        np.maximum.at(of_module, table.module[known], values[known])
        kind = table.kind_of_module
        most, next_to_it = np.full(len(kind), -np.inf), np.full(len(kind), -np.inf)
        np.maximum.at(most, kind, of_module)
        leads = of_module == most[kind]
        np.maximum.at(next_to_it, kind, np.where(leads, -np.inf, of_module))
        alone = leads & (np.bincount(kind[leads], minlength=len(kind))[kind] == 1)
        like = np.where(alone, next_to_it[kind], most[kind])[table.module]
        return np.where(np.isfinite(like), like, np.nan)

    @cached_property
    def _leap(self) -> Floats:
        """Octaves above the usual from which on amax leaped. [S]"""
        return np.where(
            self.now.table.before_gemms, self.limit.outlier_leap_octaves / 2, self.limit.outlier_leap_octaves
        )

    @cached_property
    def _far(self) -> Mask:
        """Inputs and probed outputs so far above their usual, in a step that is judged. [S]"""
        named = self.inputs() | (self.now.table.role == OUTPUT)
        if not self.warm or not self.clean or self.lr_leaped:
            return np.zeros(len(self.now), dtype=np.bool_)
        with np.errstate(invalid="ignore"):
            return np.asarray(named & (self.above_usual >= self._leap))

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


def went_back_from(amax: Baseline, limit: Limits, which: Mask | None = None) -> Floats:
    """The largest of their last values, log2, of sites that were far above their median several times and came back behind that: growth
    goes on, and what was an alarm is not learned. NaN of the others. [S or chosen]"""
    past = amax.ordered(which).astype(np.float64)
    median = amax.median() if which is None else amax.median()[which]
    with np.errstate(invalid="ignore"):
        high = past > (median + limit.outlier_input_octaves)[:, None]
        ordinary = ~high & ~np.isnan(past)
    left = high & np.logical_or.accumulate(ordinary[:, ::-1], axis=1)[:, ::-1]
    return np.where(np.count_nonzero(left, axis=1) >= CAME_TO, np.fmax.reduce(past, axis=1), np.nan)


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
