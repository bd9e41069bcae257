"""A loss that stays on another level, by less than a jump: mode 14, bad-batch, as information.

Shapes:     loss per step -> at most one finding
Thread:     detect worker

Labels that are shifted for half of the rows, another mixture: the loss rises by some percent and stays, and no rule of
spikes sees it. The last losses are held against those before them, both without their spikes: eight against 24, and where
losses scatter too much for that, 24 against 48. The windows move along, so a loss that falls slower, or climbs over
hundreds of steps, is none. What jumps further is told by `families.loss_jump`, but where losses scatter so much that it takes
the jump for scatter, and goes on learning them.
Where the LR falls at once, the losses before it say nothing of those behind: the end of a search for one, a step of a schedule.
A fall is told where it is at once and twice as far: a batch that is repeated, labels that stand in the inputs; from where the
run began it is none.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import MAD_TO_SIGMA
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding, Verdict

WINDOWS = ((8, 24, 2.5), (24, 48, 1.25))
"""(last losses, those before, difference in spreads of one loss): five of its own standard errors and more."""
MOST = sum(WINDOWS[-1][:2])
SPREAD_SHARE = 0.01
FALL_TIMES = 2.0
"""Times further than up."""
PLATEAU = 0.9
"""Of the run's first loss: what stood above it has learned nothing yet, and its fall is that it learns."""
WINSOR = 3.0
"""Spreads from the median at which a loss counts no more: a spike is no level."""


class LossLevel(Detector):
    """The median of the last losses against that of those before."""

    modes = ("bad-batch",)
    between_samples = True
    _num_learned: tuple[int, ...] = ()
    """Losses that the baseline had taken in, at each of them: not those of a jump that is open. A state that was saved before has none."""

    _first: float | None = None
    """Loss of the run's first step; of one whose state was saved before, of the first since."""

    def __init__(self, num_sites: int = 0) -> None:
        self._losses: list[float] = []
        self._steps: list[int] = []

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Nothing of the sites."""

    def resume(self) -> None:
        """Losses of the attempt before stay: a level that a restart changed is one."""

    def forget(self) -> None:
        """Begin anew: the level that is reached is the usual one."""
        self._losses, self._steps, self._num_learned = [], [], ()

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        loss = ctx.now.scalar("loss")
        if loss is None or not math.isfinite(loss):
            return []
        self._first = loss if self._first is None else self._first
        leap, fell = ctx.schedule.last_leap, ctx.schedule.fallen_step
        fell_since = fell is not None and (fell == ctx.now.step or (bool(self._steps) and fell > self._steps[-1]))
        if not ctx.clean or fell_since or (leap is not None and ctx.now.step - leap[0] <= MOST):
            self.forget()
            return []
        self._losses = [*self._losses, loss][-MOST:]
        self._steps = [*self._steps, ctx.now.step][-MOST:]
        self._num_learned = (*self._num_learned, int(ctx.base.loss.count[0]))[-MOST:]
        for num_last, num_before, sigma in WINDOWS if ctx.warm else ():
            if len(self._losses) < num_last + num_before:
                continue
            usual, level, spread = levels(np.array(self._losses[-num_last - num_before :]), num_last)
            rose = level - usual
            # A loss falls in health: one that fell at once stands far off, and off the line that it was on.
            need = max(sigma * spread, ctx.limit.loss_level_min * abs(usual)) * (1 if rose > 0 else FALL_TIMES)
            away = (
                rose
                if rose > 0
                else rose - min(0.0, _slope(self._losses[-num_last - num_before : -num_last])) * num_before
            )
            if min(abs(rose), away * np.sign(rose)) <= need or (rose < 0 and usual >= PLATEAU * self._first > 0):
                continue
            last = np.array(self._losses[-num_last:])
            if np.count_nonzero((last - usual) * np.sign(rose) > 0) < 0.85 * num_last:
                continue
            began = onset(
                np.sign(rose) * np.array(self._losses[-num_last - num_before :]),
                self._steps,
                np.sign(rose) * (usual + rose / 2),
            )
            jumped = rose > max(ctx.limit.loss_jump_sigma * spread, ctx.limit.loss_jump_min * abs(usual))
            learned = self._num_learned[-num_last:]
            held = len(learned) < num_last or learned[-1] - learned[0] < num_last - 1
            if jumped and held:
                self.forget()
                return []
            # what a jump that came back has held up is no level: so many must stand there without it
            counts = np.diff(np.array(self._num_learned[-num_last - 1 :])) > 0
            if (
                len(counts) == num_last
                and np.count_nonzero(((last - usual) * np.sign(rose) > 0) & counts) < 0.85 * num_last
            ):
                continue
            self.forget()
            return [self._finding(ctx, usual, level, began, num_last)]
        return []

    @staticmethod
    def _finding(ctx: Context, usual: float, level: float, began: int, num: int) -> Finding:
        evidence = [
            Evidence("loss", round(level, 4), round(usual, 4), "", began),
            Evidence("steps_above" if level > usual else "steps_below", num, 0, "steps", began),
        ]
        operands = (ctx.inputs() | ctx.weights()) & ctx.health_known
        healthy = not np.any(ctx.unhealthy[operands]) if operands.any() else None
        if healthy is not None:
            said = "yes" if healthy else "no"
            evidence.append(Evidence("quantiser_healthy", said, "yes", "", ctx.now.step))
        verdict: Verdict = "shared" if healthy else "unknown"
        found = ctx.now.finding(
            "bad-batch",
            "info",
            np.zeros(0, dtype=np.int64),
            evidence,
            verdict,
            level=True,
            fell=level < usual,
            shift=True,
            began=began,
            not_before=began,
        )
        return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})


def levels(losses: npt.NDArray[np.float64], num_last: int) -> tuple[float, float, float]:
    """(level before, level of the last, spread of one loss before), with spikes cut off."""
    before, last = losses[:-num_last], losses[-num_last:]
    middle = float(np.median(before))
    spread = max(MAD_TO_SIGMA * float(np.median(np.abs(before - middle))), SPREAD_SHARE * abs(middle))
    high, low = float(np.median(last)) + WINSOR * spread, float(np.median(last)) - WINSOR * spread
    usual = float(np.clip(before, middle - WINSOR * spread, middle + WINSOR * spread).mean())
    return usual, float(np.clip(last, low, high).mean()), spread


def _slope(losses: list[float]) -> float:
    """Per step, of the line through two halves."""
    half = len(losses) // 2
    return (float(np.median(losses[half:])) - float(np.median(losses[:half]))) / max(half, 1)


def onset(losses: npt.NDArray[np.float64], steps: list[int], between: float) -> int:
    """The step that splits the losses best into a lower and a higher level."""
    over = np.sign(losses - between)
    first = int(np.argmax(np.cumsum(over[::-1])))  # from the end, as far as most are above
    return steps[len(steps) - 1 - first]
