"""Weights, or inputs, that shrink in most layers together and step by step: mode 13, optimizer-divergence.

Shapes:     the last log2 amax [S, 17] of weights and of inputs -> at most one finding
Thread:     detect worker

Weight decay that is no longer multiplied by the learning rate takes a percent of every matrix in each step; where it reaches the
gains of norms, which no quantiser reads, it is what they give that shrinks. Healthy models were seen to lose 0.013 octave of their
weights and 0.075 of their inputs in sixteen steps; the limit is the one that holds for growth. What is replaced at once, as by other
data or by averages of the weights, falls in one step and not in both halves of the window. Most layers are a vote, and sites whose amax is
the same in each step have one together: they read the same tensor, as all blocks of a U-Net do that are given one embedding of time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fp8watch_server.detect.baseline import nanmedian
from fp8watch_server.detect.context import Context, Floats
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.step_view import Mask

FAST = {"weights": (4, 1), "inputs": (8, 3)}
"""Steps in which a fall at the rate that holds for growth is told, and values whose median is an end: inputs scatter."""
SLOW_STEPS, SLOW_ENDS = 16, 5
EACH_HALF = 0.25
"""Share of the fall that lies in each half of the steps."""
CONSECUTIVE = 2
MIN_VOTES = 3


@dataclass(frozen=True)
class _Fall:
    """Sites that fell steadily, most of those that move."""

    sites: Mask  # [S]
    octaves: Floats  # [S]
    num: int  # observed steps that it took
    steps: int  # steps
    votes: int  # of them, those that read the same tensor as one
    num_moving: int  # votes of all that move


class Shrinking(Detector):
    """What shrinks in a run: weights first, else inputs."""

    modes = ("optimizer-divergence",)

    def __init__(self, num_sites: int) -> None:
        self._num_sites = num_sites
        self._num_over = 0
        self._began = -1
        self.in_alarm = False

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._num_sites = num_sites

    def frozen(self) -> Mask | None:
        """Nothing is learned while they shrink."""
        return np.ones(self._num_sites, dtype=np.bool_) if self._num_over or self.in_alarm else None

    def resume(self) -> None:
        """A new session: what was followed begins anew."""
        self._num_over, self._began, self.in_alarm = 0, -1, False

    def cut_off(self, now: CrossRankStep, limit: Limits) -> list[Finding]:
        """Values broke: what they were before says nothing of them."""
        self.resume()
        return []

    @property
    def holds_loss(self) -> bool:
        """The loss of a model that fades is not ordinary."""
        return self.in_alarm

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        for what, which in (("weights", ctx.weights()), ("inputs", ctx.inputs())):
            fell = _fell(ctx, what, which)
            if fell is None:
                continue
            self._num_over += 1
            self._began = self._since(ctx, fell) if self._began < 0 else self._began
            if self._num_over < CONSECUTIVE:
                return []
            self.in_alarm = True
            return [self._finding(ctx, what, fell)]
        self._num_over, self._began, self.in_alarm = 0, -1, False
        return []

    @staticmethod
    def _since(ctx: Context, fell: _Fall) -> int:
        """The first step of the window from which on the median of them is lower than at its begin by a tenth of the fall."""
        at = ctx.base.steps[-1 - fell.num :]
        level = nanmedian(ctx.base.recent_amax.ordered(fell.sites)[:, -len(at) :].T)
        above = np.flatnonzero(level >= level[0] + 0.1 * (level[-1] - level[0]))
        return at[min(int(above[-1]) + 1, len(at) - 1)]

    def _finding(self, ctx: Context, what: str, fell: _Fall) -> Finding:
        now, began = ctx.now, self._began
        hit, of = fell.sites, fell.num_moving
        each = float(np.median(fell.octaves[hit])) / fell.steps
        evidence = [
            Evidence("shrinks", round(100 * (1 - 2.0**each), 2), 0, "% a step", began),
            Evidence(f"shrinking_{what}", fell.votes, 0, f"of {of} {what}", began),
        ]
        lr, loss, usual = now.scalar("lr"), now.scalar("loss"), float(ctx.base.loss.median()[0])
        if lr is not None:
            evidence.append(Evidence("lr", lr, ctx.schedule.usual_lr, "", None))
        if loss is not None and math.isfinite(usual):
            evidence.append(Evidence("loss", loss, round(usual, 4), "", began))
        operands = (ctx.inputs() | ctx.weights()) & ctx.health_known
        healthy = not np.any(ctx.unhealthy[operands]) if operands.any() else None
        said = "not measured" if healthy is None else "yes" if healthy else "no"
        evidence.append(Evidence("quantiser_healthy", said, "yes", "", now.step))
        return now.finding(
            "optimizer-divergence",
            "warning",
            now.in_flow(hit),
            evidence,
            "shared" if healthy else "unknown",
            kind="shrinking",
            what=what,
            weights_seen=bool(np.any(np.isfinite(now.log2_amax[ctx.weights()]))),
            num_known=of,
            began=began,
        )


def _fell(ctx: Context, what: str, which: Mask) -> _Fall | None:
    """The fall of most of these sites over the last steps; None where they stand, or fell at once."""
    at = ctx.base.steps
    if not ctx.warm or not ctx.clean or not which.any():
        return None
    fast, ends = FAST[what]
    limit = ctx.limit
    for num, of_end, rate in ((fast, ends, limit.divergence_rate_octaves), (SLOW_STEPS, SLOW_ENDS, 0.0)):
        if len(at) <= num:
            continue
        steps = at[-1] - at[-1 - num]
        seen = ctx.base.recent_amax.ordered(which).astype(np.float64)[:, -1 - num :]
        first, middle, last = (
            nanmedian(seen[:, i : i + of_end]) for i in (0, (num + 1 - of_end) // 2, num + 1 - of_end)
        )
        total, least = last - first, np.maximum(middle - first, last - middle)
        moving = np.isfinite(total) & (np.ptp(np.nan_to_num(seen), axis=1) > 0)
        with np.errstate(invalid="ignore"):
            steady = (total < -max(limit.divergence_total_octaves, rate * steps)) & (least < EACH_HALF * total)
        if np.count_nonzero(steady) < MIN_VOTES:
            continue
        votes, num_moving = _votes(seen[steady]), _votes(seen[moving])
        if votes >= max(MIN_VOTES, limit.divergence_layers * num_moving):
            sites, octaves = np.zeros(len(ctx.now), dtype=np.bool_), np.full(len(ctx.now), np.nan)
            sites[which], octaves[which] = steady, total
            return _Fall(sites, octaves, num, steps, votes, num_moving)
    return None


def _votes(seen: Floats) -> int:
    """How many of these series are no copy of another: the same log2 amax in each step is the same tensor. [sites, steps]"""
    return len(np.unique(np.nan_to_num(seen), axis=0))
