"""Weights that grow in most layers at once: mode 13, optimizer-divergence.

Upstream:   fp8watch_server.detect.view, fp8watch_server.detect.baseline    Downstream: fp8watch_server.detect.engine
Shapes:     per step [W] amax of the weight sites -> at most one finding
Thread:     detect worker

The optimizer moves every layer, a quantiser fault moves one: growth of log2 amax, in octaves per step, is taken over
the last steps and looked at across the layers. A small model trained from scratch with AdamW at 2e-3 grows by at most
0.012 octave a step after its first 50 steps (the median layer); the same model after its learning rate was
multiplied by 30 grows by 0.2 to 0.5 in the first two. The threshold lies between, on a logarithmic scale: 0.05.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import Measured

from .baseline import Baseline
from .finding import Evidence, Finding
from .invariant import tile_sqnr_db
from .view import WEIGHT, StepView

WARM_UP_STEPS = 50
AFTER_LR_WARM_UP_STEPS = 10
MIN_BASELINE = 6
"""Clean growth rates that must be known before one is judged."""
GROWTH_STEPS = 4
"""Growth is taken over this many observed steps: one odd step is not growth."""
MIN_RATE_OCTAVES = 0.05
MIN_TOTAL_OCTAVES = 0.20
TIMES_BASELINE = 4.0
"""The rate must also be this many times the median rate of the baseline."""
MOST_LAYERS = 0.6
CONSECUTIVE = 2
"""Observed steps in a row that must agree before it opens; it stays while half the rate does."""
LR_JUMP = 3.0
MAX_SQNR_DROP_DB = 3.0


class Divergence:
    """Growth of the weights of one session on one rank."""

    def __init__(self, weight_ids: npt.NDArray[np.uint64]) -> None:
        self._ids = weight_ids
        self._amax = Baseline(len(weight_ids), GROWTH_STEPS + 1)  # log2 amax, newest GROWTH_STEPS + 1
        self._sqnr = Baseline(len(weight_ids))
        self._rate = Baseline(1)
        self._lr = Baseline(1)
        self._loss = Baseline(1)
        self._steps: list[int] = []  # of self._amax, oldest first
        self._first_step: int | None = None
        self._last_lr: float | None = None
        self._ramp_end: int | None = None
        self._ramping = True
        self._jump_step: int | None = None
        self._num_over = 0
        self._onset = 0
        self.in_alarm = False

    def remap(self, weight_ids: npt.NDArray[np.uint64]) -> None:
        """More weight sites were registered."""
        at = {int(s): i for i, s in enumerate(self._ids)}
        source = np.array([at.get(int(s), -1) for s in weight_ids], dtype=np.int64)
        self._amax.remap(source)
        self._sqnr.remap(source)
        self._ids = weight_ids

    def forget(self) -> None:
        """The weights were replaced or broke: growth across this point means nothing."""
        self._steps = []
        self._amax = Baseline(len(self._ids), GROWTH_STEPS + 1)
        self._num_over = 0
        self.in_alarm = False

    def observe(self, view: StepView, *, clean: bool) -> Finding | None:
        """Take one step in, steps ascending.

        Args:
            view: the step.
            clean: no other fault is known; otherwise growth is followed, but not judged and not learned.
        """
        self._observe_lr(view, clean=clean)
        at = np.flatnonzero((view.role == WEIGHT) & view.has(Measured.AMAX))
        if not len(at):
            return None
        if self._first_step is None:
            self._first_step = view.step
        column = np.searchsorted(self._ids, view.columns.table.ids[view.row[at]])
        amax = np.full(len(self._ids), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            log2 = np.log2(view.raw("amax_max")[at].astype(np.float64))
        amax[column] = np.where(np.isfinite(log2), log2, np.nan)
        self._amax.push(amax)
        self._steps = [*self._steps, view.step][-(GROWTH_STEPS + 1) :]
        finding = self._judge(view, clean=clean)
        loss = view.scalar("loss")
        if clean and not self._num_over and not self.in_alarm:
            sqnr = np.full(len(self._ids), np.nan)
            sqnr[column] = tile_sqnr_db(view)[at]
            self._sqnr.push(sqnr)
            if loss is not None and math.isfinite(loss):
                self._loss.push(np.array([loss]))
        return finding

    def _observe_lr(self, view: StepView, *, clean: bool) -> None:
        lr = view.scalar("lr")
        if lr is None or not math.isfinite(lr) or lr <= 0:
            return
        if self._ramping and self._last_lr is not None:
            if self._last_lr < lr < LR_JUMP * self._last_lr or self._lr.num_pushed < 4:
                self._ramp_end = view.step if lr > self._last_lr else self._ramp_end
            else:
                self._ramping = False
        self._last_lr = lr
        usual = float(self._lr.median()[0])
        if math.isfinite(usual) and lr > LR_JUMP * usual and not self._ramping:
            self._jump_step = view.step if self._jump_step is None else self._jump_step
        else:
            self._jump_step = None
            if clean and not self.in_alarm:
                self._lr.push(np.array([lr]))

    def _warm(self, step: int) -> bool:
        if self._first_step is None or step - self._first_step < WARM_UP_STEPS:
            return False
        return self._ramp_end is None or step - self._ramp_end >= AFTER_LR_WARM_UP_STEPS

    def _judge(self, view: StepView, *, clean: bool) -> Finding | None:
        if len(self._steps) < 2:
            return None
        history = self._amax.history().astype(np.float64)[-len(self._steps) :]
        total = history[-1] - history[0]  # [W] octaves
        rate = total / (self._steps[-1] - self._steps[0])
        moving = np.isfinite(total) & (np.nan_to_num(np.abs(np.diff(history, axis=0))).max(axis=0) > 0)
        if np.count_nonzero(moving) < 2 or not clean:
            self._num_over, self.in_alarm = 0, False
            return None
        median_rate = float(np.median(rate[moving]))
        usual = float(self._rate.median()[0])
        threshold = max(MIN_RATE_OCTAVES, TIMES_BASELINE * usual if math.isfinite(usual) else 0.0)
        total_needed = MIN_TOTAL_OCTAVES
        if self.in_alarm:
            threshold, total_needed = threshold / 2, total_needed / 2
        growing = moving & (rate > threshold) & (total > total_needed)
        over = np.count_nonzero(growing) >= MOST_LAYERS * np.count_nonzero(moving)
        if not over:
            self._num_over, self.in_alarm = 0, False
            if median_rate < MIN_RATE_OCTAVES and len(self._steps) > GROWTH_STEPS:
                self._rate.push(np.array([median_rate]))
            return None
        if not self._warm(view.step) or self._rate.num_pushed < MIN_BASELINE:
            return None
        if not self._num_over:
            self._onset = view.step
        self._num_over += 1
        if self._num_over < CONSECUTIVE:
            return None
        self.in_alarm = True
        return self._finding(view, rate, total, growing, moving, median_rate, usual)

    def _quantiser_is_healthy(self, view: StepView) -> bool:
        """Tile SQNR of the weights within 3 dB of their baseline (the median site)."""
        at = np.flatnonzero((view.role == WEIGHT) & view.has(Measured.ENERGIES))
        if not len(at):
            return True
        column = np.searchsorted(self._ids, view.columns.table.ids[view.row[at]])
        drop = self._sqnr.median()[column] - tile_sqnr_db(view)[at]
        drop = drop[np.isfinite(drop)]
        return not len(drop) or float(np.median(drop)) <= MAX_SQNR_DROP_DB

    def _finding(
        self,
        view: StepView,
        rate: npt.NDArray[np.float64],
        total: npt.NDArray[np.float64],
        growing: npt.NDArray[np.bool_],
        moving: npt.NDArray[np.bool_],
        median_rate: float,
        usual: float,
    ) -> Finding:
        onset = self._onset
        fastest = int(np.argmax(np.where(growing, rate, -np.inf)))
        baseline = round(usual, 4) if math.isfinite(usual) else None
        num_growing, num_moving = int(np.count_nonzero(growing)), int(np.count_nonzero(moving))
        evidence = [
            Evidence("weight_growth", round(median_rate, 3), baseline, "octaves/step", onset),
            Evidence("growing_weights", num_growing, 0, f"of {num_moving} weights", onset),
        ]
        lr, usual_lr = view.scalar("lr"), float(self._lr.median()[0])
        jumped = self._jump_step is not None
        if lr is not None and math.isfinite(usual_lr):
            since = self._jump_step if jumped else None
            evidence.insert(0 if jumped else 2, Evidence("lr", lr, float(f"{usual_lr:.6g}"), "", since))
        loss, usual_loss = view.scalar("loss"), float(self._loss.median()[0])
        if loss is not None and math.isfinite(usual_loss):
            evidence.append(Evidence("loss", loss, round(usual_loss, 4), "", onset))
        healthy = self._quantiser_is_healthy(view)
        evidence.append(Evidence("quantiser_healthy", "yes" if healthy else "no", "yes", "", view.step))
        facts = view.columns.table.sites[int(self._ids[fastest])]
        order = [int(self._ids[i]) for i in np.argsort(-np.where(growing, rate, -np.inf), kind="stable")[:num_growing]]
        return Finding(
            mode="optimizer-divergence",
            severity="critical",
            step=view.step,
            rank=view.rank,
            site=facts.id,
            tile=None,
            element=None,
            evidence=tuple(evidence),
            verdict="shared" if healthy else "unknown",
            rank_in_flow=facts.order,
            extra={
                "sites": order[:256],
                "num_sites": num_growing,
                "num_moving": num_moving,
                "operands": ["weight"],
                "lr_jump": (float(f"{usual_lr:.6g}"), lr) if jumped else None,
                "growth": median_rate,
                "octaves": float(total[fastest]),
            },
        )
