"""Weights that grow in most layers at once: mode 13, optimizer-divergence.

Shapes:     per step log2 amax [S] of the weight sites -> at most one finding
Thread:     detect worker

The optimizer moves every layer, a quantiser fault moves one: growth of log2 amax, in octaves per step, is taken over
the last steps and looked at across the layers. A small model trained from scratch with AdamW at 2e-3 grows by at most
0.012 octave a step after its first 50 steps (the median layer); the same model after its learning rate was
multiplied by 30 grows by 0.2 to 0.5 in the first two. The threshold lies between, on a logarithmic scale: 0.05.
Across weights that something else wrote, as the outer step of local SGD does, growth is none of the optimizer's. Where most
were written, as by a load of earlier ones, they have been as large before: they grow again, until they are larger than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from fp8watch_agent.training_names import WEIGHTS_CHANGED, WEIGHTS_LOOKED
from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.limits import Limits

MIN_BASELINE = 6
"""Clean growth rates that must be known before one is judged."""
GROWTH_STEPS = 4
"""Growth is taken over this many observed steps: one odd step is not growth."""
TIMES_BASELINE = 4.0
"""The rate must also be this many times the median rate of the baseline."""
CONSECUTIVE = 2
"""Observed steps in a row that must agree before it opens; it stays while half the rate does."""

Floats = npt.NDArray[np.float64]


class Divergence(Detector):
    """Growth of the weights of a run."""

    modes = ("optimizer-divergence",)
    between_samples = True
    whole_samples = True
    _num_steps = 0
    """Observed; a state that was saved before has none of this and the next."""
    _written: int | None = None
    """Which of them is the last before which something other than an optimizer wrote most weights."""
    _level: Floats = np.zeros(0)
    """log2 amax before most weights were written, of those times the largest; NaN: of none. [S]"""
    _first: int | None = None
    """First step in which what grows may have begun to: that after the look before the one that showed it."""

    def __init__(self, num_sites: int) -> None:
        self._amax = Baseline(num_sites, GROWTH_STEPS + 1)  # log2, the newest, clean or not
        self._steps: list[int] = []
        self._rate = Baseline(1)
        self._num_over = 0
        self._onset = 0
        self.in_alarm = False

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._amax.grow(num_sites)

    def frozen(self) -> npt.NDArray[np.bool_] | None:
        """Nothing is learned while the weights run away."""
        return np.ones(self._amax.num_series, dtype=np.bool_) if self._num_over or self.in_alarm else None

    def resume(self) -> None:
        """A new session: growth across the restart is none; the usual rate stays."""
        self._steps = []
        self._amax.forget()
        self._num_over, self.in_alarm, self._written, self._level = 0, False, None, np.zeros(0)

    def cut_off(self, now: CrossRankStep, limit: Limits) -> list[Finding]:
        """The weights were replaced or broke: growth across this point means nothing."""
        self._steps = []
        self._amax.forget()
        self._num_over = 0
        self.in_alarm = False
        return []

    @property
    def holds_loss(self) -> bool:
        """The loss of weights that run away is not ordinary."""
        return self.in_alarm

    @property
    def holds_lr(self) -> bool:
        """Nor is the learning rate that made them."""
        return self.in_alarm

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step. Without `ctx.clean`, growth is followed, but not judged and not learned."""
        if self._notice_written(ctx):
            last = np.fmax.reduce(self._amax.ordered().astype(np.float64), axis=1)
            self._level = np.fmax(last, np.pad(self._level, (0, len(last) - len(self._level)), constant_values=np.nan))
            self._steps = []
            self._amax.forget()
        weights = ctx.weights()
        amax = np.where(weights, ctx.now.log2_amax, np.nan)
        known = int(np.count_nonzero(weights & (ctx.base.recent_amax.count > 0)))
        if int(np.count_nonzero(~np.isnan(amax))) * 2 < max(known, 1):  # between samples come those that broke alone
            return []
        self._amax.push(amax)
        self._steps = [*self._steps, ctx.now.step][-(GROWTH_STEPS + 1) :]
        found = self._judge(ctx)
        return [] if found is None else [found]

    def _notice_written(self, ctx: Context) -> bool:
        """Whether most weights were written behind the last update. What does so within each few steps is part of the updates."""
        self._num_steps += 1
        if not any(2 * logs.get(WEIGHTS_CHANGED, 0) > logs.get(WEIGHTS_LOOKED, math.inf) for logs in _logs(ctx)):
            return False
        last, self._written = self._written, self._num_steps
        return last is None or self._num_steps - last > GROWTH_STEPS

    def _judge(self, ctx: Context) -> Finding | None:
        if len(self._steps) < 2:
            self._num_over, self.in_alarm = 0, False
            return None
        weights = ctx.weights()
        history = np.full((len(self._steps), len(weights)), np.nan)  # [steps, S]
        history[:, weights] = self._amax.ordered(weights)[:, -len(self._steps) :].T
        total = history[-1] - history[0]  # [S] octaves
        rate = total / (self._steps[-1] - self._steps[0])
        moving = np.isfinite(total) & (np.nan_to_num(np.abs(np.diff(history, axis=0))).max(axis=0) > 0)
        if np.count_nonzero(moving) < 2 or not ctx.clean:
            self._num_over, self.in_alarm = 0, False
            return None
        limit = ctx.limit
        median_rate = float(np.median(rate[moving]))
        usual = float(self._rate.median()[0])
        threshold = max(limit.divergence_rate_octaves, TIMES_BASELINE * usual if math.isfinite(usual) else 0.0)
        total_needed = limit.divergence_total_octaves
        if self.in_alarm:
            threshold, total_needed = threshold / 2, total_needed / 2
        with np.errstate(invalid="ignore"):
            growing = moving & (rate > threshold) & (total > total_needed)
            growing[: len(self._level)] &= ~(history[-1][: len(self._level)] <= self._level)
        over = np.count_nonzero(growing) >= limit.divergence_layers * np.count_nonzero(moving)
        if not over:
            self._num_over, self.in_alarm = 0, False
            if median_rate < limit.divergence_rate_octaves and len(self._steps) > GROWTH_STEPS:
                self._rate.push(np.array([median_rate]))
            return None
        if not ctx.warm or int(self._rate.count[0]) < MIN_BASELINE:
            return None
        if not self._num_over:
            self._onset, self._first = ctx.now.step, self._steps[-2] + 1
        self._num_over += 1
        if self._num_over < CONSECUTIVE:
            return None
        self.in_alarm = True
        return self._finding(ctx, rate, total, growing, moving, median_rate, usual)

    @staticmethod
    def _quantiser_is_healthy(ctx: Context) -> bool | None:
        """Tile SQNR of the weights within 3 dB of their baseline (the median site), else what they clip and make 0.

        None where neither was measured in this step.
        """
        drop = ctx.sqnr_drop[ctx.weights()]
        drop = drop[np.isfinite(drop)]
        if len(drop):
            return float(np.median(drop)) <= ctx.limit.sqnr_drop_db
        known = ctx.weights() & ctx.health_known
        return bool(np.count_nonzero(ctx.unhealthy[known]) * 2 < np.count_nonzero(known)) if known.any() else None

    def _finding(
        self,
        ctx: Context,
        rate: Floats,
        total: Floats,
        growing: npt.NDArray[np.bool_],
        moving: npt.NDArray[np.bool_],
        median_rate: float,
        usual: float,
    ) -> Finding:
        onset, now = self._onset, ctx.now
        fastest = int(np.argmax(np.where(growing, rate, -np.inf)))
        baseline = round(usual, 4) if math.isfinite(usual) else None
        num_growing, num_moving = int(np.count_nonzero(growing)), int(np.count_nonzero(moving))
        evidence = [
            Evidence("weight_growth", round(median_rate, 3), baseline, "octaves/step", onset),
            Evidence("growing_weights", num_growing, 0, f"of {num_moving} weights", onset),
        ]
        lr, usual_lr, jump_step = now.scalar("lr"), ctx.schedule.lr_before, ctx.schedule.jump_step
        risen = ctx.schedule.risen(onset, self._first)  # an LR that left its range long before is another story
        jumped = risen is not None and jump_step is not None and usual_lr is not None and lr is not None
        if lr is not None and usual_lr is not None:
            evidence.insert(0 if jumped else 2, Evidence("lr", lr, usual_lr, "", jump_step if jumped else None))
        loss, usual_loss = now.scalar("loss"), float(ctx.base.loss.median()[0])
        if loss is not None and math.isfinite(usual_loss):
            evidence.append(Evidence("loss", loss, round(usual_loss, 4), "", onset))
        healthy = self._quantiser_is_healthy(ctx)
        said = "not measured" if healthy is None else "yes" if healthy else "no"
        evidence.append(Evidence("quantiser_healthy", said, "yes", "", now.step))
        rows = np.argsort(-np.where(growing, rate, -np.inf), kind="stable")[:num_growing]
        return now.finding(
            "optimizer-divergence",
            "critical",
            rows,
            evidence,
            "shared" if healthy else "unknown",
            began=min(onset, jump_step) if jumped and jump_step is not None else onset,
            not_before=jump_step if jumped else None,
            invariant_held=bool(np.any(~np.isnan(now.clip_depth[ctx.weights()]))),
            num_moving=num_moving,
            lr_jump=(usual_lr, lr) if jumped else None,
            growth=median_rate,
            octaves=float(total[fastest]),
        )


def _logs(ctx: Context) -> Iterator[Mapping[str, float]]:
    return (view.logs() for view in ctx.now.views)
