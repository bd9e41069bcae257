"""A loss that jumps: mode 14, bad-batch, whether it comes back or stays. Or the learning rate.

Shapes:     loss and grad norm per step -> at most one finding
Thread:     detect worker

Told when it is over: until then a bad batch and the beginning of a divergence look alike. The jump is measured against
a median that the jump does not move, and the gradient norm must jump as well. What the data did is said of inputs that
were measured, each with its step; an input that leaped is another cause, which `outlier` tells. Where most inputs moved,
weights did it or what enters the model did: it is told where the input of the first GEMM moved as well. Where the batch was there
before, bit for bit, it is not the batch; where modules have just begun to train, or weights were written, it is that. A learning rate that leaped, or was climbing out of its range, at or right before the jump is the cause, and then it is mode 13, optimizer-divergence.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_agent.batch_names import HASH
from fp8watch_agent.record import Measured
from fp8watch_agent.training_names import WEIGHTS_CHANGED, WEIGHTS_LOOKED
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.cross_rank_step import CrossRankStep, measured
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.families.jump_told import _Inputs, _Jump, finding, norm_jumped
from fp8watch_server.detect.families.loss_stays import CALM, StaysUp
from fp8watch_server.detect.families.ordinary_losses import came_before, of_skewed
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.limits import Limits

SIGMA_FLOOR_SHARE = 0.01
"""Of the loss: the smallest spread that is believed."""
INPUT_SIGMA = 4.0
LR_BEFORE = 6
"""Observed steps before the jump of the loss in which a leap of the LR, or the last of a climb, is its cause."""
ENTERS_OCTAVES = 0.5
"""Above its own past, of the input of the first GEMM: what enters the model is larger."""
SMALL_SHARE = 0.5
"""Of the usual rows: with so many or fewer a batch is a small one, and its loss scatters by that much more."""
KEPT_LOSSES = 256
KEPT = 64
"""Batches that are looked back, and odd ones whose height is known."""
NEARLY_NOTHING = 0.05
"""Of the first loss: what is drawn anew in each step, as dropout is, scatters a loss that is so small by its multiples."""
LEARNT, LITTLE = 0.02, 0.15
"""Of the first loss, the usual one and the height of a jump: the data are learnt by heart, and one row of a batch that is not is a
jump by multiples."""
MOST_NATS = 16.0
"""A first loss above this is no cross-entropy, not even over a vocabulary of millions: what falls far from it has a unit, and learns."""
WRITTEN_BEFORE = 8
"""Observed steps in which no weight was written before: what writes them every few steps is no news."""
UNFROZEN_SHARE = 0.25
"""Of all sites of gradients, that have their first one: parameters began to train. An expert's first tokens are fewer."""
SIZES = 16
"""Observed steps whose batch sizes say what is usual."""
HIGHER = 2.0
"""Times the height of a jump that goes on: what jumps further is another matter."""
LR_STEPS = 2
"""Observed steps after which a loss that stays up is told, where the LR is known to have leaped."""


class LossJumps(Detector):
    """The loss against its own recent past."""

    modes = ("bad-batch", "optimizer-divergence")
    between_samples = True
    parts = (_Inputs, _Jump, StaysUp)
    _left = False
    """The loss was up when statistics began to judge: it does not begin there."""
    _goes_on = False
    """A jump was told that did not come back: what is up now is that one, but for a jump of HIGHER times its height."""
    _height = 0.0
    """Of that jump, over what was usual."""
    _calm = 0
    """Ordinary losses in a row: with CALM of them both are over."""
    _sizes: tuple[float, ...] = ()
    """Rows a call into the first GEMM, of the last steps."""
    _batches: tuple[tuple[int, float], ...] = ()
    """Step and hash of the last batches of the first rank that says it."""
    _with_gradient: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    """Sites that had a gradient."""
    _unfrozen: tuple[int, int, int] | None = None
    _first: float | None = None
    """The first loss of the run."""
    _losses: tuple[float, ...] = ()
    """The last ones that were of no jump."""
    _num_steps = 0
    """Observed."""
    _written: int | None = None
    """Which of them is the last before which weights were written by anything but an optimizer."""
    _heights: tuple[float, ...] = ()
    """Of the last jumps that came back and warned nobody, over what was usual."""
    _lost = False
    """In the last step gradients were quantised worse than they used to be: they wrote the weights that this loss is of."""

    def __init__(self, num_sites: int = 0) -> None:
        self._jump: _Jump | None = None
        self._stays = StaysUp()

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """The loss's own baseline only: `holds_loss`."""

    def resume(self) -> None:
        """A jump of the attempt before is over."""
        self._jump, self._left, self._goes_on, self._batches, self._written = None, False, False, (), None
        self._stays.forget()

    @property
    def holds_loss(self) -> bool:
        """A jump is open: its losses are not learned."""
        return self._jump is not None

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        loss, grad_norm = ctx.now.scalar("loss"), ctx.now.scalar("grad_norm")
        written = self._notice_written(ctx)
        if not ctx.clean or (loss is not None and not math.isfinite(loss)):
            return self.cut_off(ctx.now, ctx.limit)
        if loss is None:
            return []
        again = self._stays.observe(ctx.now, loss, ctx.limit)
        small, seen_before = self._small(ctx), self._seen_before(ctx)
        self._notice_unfrozen(ctx)
        lost, self._lost = self._lost, bool(np.any((ctx.sqnr_drop > ctx.limit.sqnr_drop_db) & ctx.gradients()))
        self._first = loss if self._first is None else self._first
        if self._jump is None:
            self._jump = self._begins(ctx, loss, grad_norm)
            if self._jump is None:
                self._losses = (*self._losses, loss)[-KEPT_LOSSES:]
            else:
                self._jump.small, self._jump.seen_before, self._jump.written = small, seen_before, written
                self._jump.scatter = self._scatter(self._jump.usual)
                if self._unfrozen is not None and ctx.now.step - self._unfrozen[0] <= LR_BEFORE:
                    self._jump.unfrozen = self._unfrozen
                if lost and self._jump.inputs is not None:  # gradients of this step are the jump's
                    self._jump.inputs.healthy = False
            return again
        jump = self._jump
        jump.num += 1
        if grad_norm is not None and math.isfinite(grad_norm):
            jump.norms = (*jump.norms, grad_norm)
        if grad_norm is not None and math.isfinite(grad_norm) and jump.grad_norm is not None:
            jump.grad_norm = max(jump.grad_norm, grad_norm) if jump.num == 1 else jump.grad_norm
        if loss > jump.loss:
            jump.loss, jump.peak = loss, ctx.now.step
        jump.inputs = jump.inputs or _look(ctx)
        back = jump.is_back(loss)
        patience = ctx.limit.recover_steps if jump.lr is None else min(LR_STEPS, ctx.limit.recover_steps)
        if not back and jump.num < patience:
            return again
        self._jump = None
        jump.small_loss = 0 < jump.loss < NEARLY_NOTHING * self._first
        jump.learnt = 0 < jump.usual < LEARNT * self._first and jump.loss < LITTLE * min(self._first, MOST_NATS)
        if back and not norm_jumped(jump, ctx.limit):
            self._heights = (*self._heights, jump.loss - jump.usual)[-KEPT:]
            return []
        if self._goes_on and back and jump.lr is not None:
            return []
        told = finding(ctx.now, jump, ctx.limit, back=back)
        self._calm = 0
        if back:  # from a worse one to the one that goes on
            if not any(f.severity != "info" for f in told):
                self._heights = (*self._heights, jump.loss - jump.usual)[-KEPT:]
            return told
        if any(f.mode == "bad-batch" and f.severity != "info" for f in told):
            self._stays.begin(jump)
        self._goes_on, self._height = bool(told), jump.loss - jump.usual if told else 0.0
        return told

    def _scatter(self, usual: float) -> float | None:
        """The furthest that a loss was from the usual one, odd batches with it; None where no loss is under 0, and multiples say it."""
        if usual > 0 and min(self._losses, default=usual) > 0:
            return None
        return max((*(abs(loss - usual) for loss in self._losses), *self._heights), default=0.0)

    def _small(self, ctx: Context) -> tuple[float, float] | None:
        """(rows of this step's batch, the usual ones) where they are few; notes the size."""
        rows = ctx.now.in_flow(ctx.inputs())
        if not len(rows):
            return None
        first = int(rows[0])
        of_call = max(float(ctx.now.column("num_calls")[first]), 1.0) * max(ctx.now.table.facts[first].shape[1], 1)
        size = float(ctx.now.column("num_elements")[first]) / of_call
        if not math.isfinite(size):
            return None
        usual = float(np.median(self._sizes)) if len(self._sizes) == SIZES else math.nan
        self._sizes = (*self._sizes, size)[-SIZES:]
        return (round(size), round(usual)) if size <= SMALL_SHARE * usual else None

    def _seen_before(self, ctx: Context) -> int | None:
        """The step before that had this step's batch, bit for bit."""
        value = next((float(v) for view in ctx.now.views if (v := view.logs().get(HASH)) is not None), math.nan)
        if not math.isfinite(value):
            return None
        before = next((step for step, known in reversed(self._batches) if known == value), None)
        self._batches = (*self._batches, (ctx.now.step, value))[-KEPT:]
        return before

    def _notice_unfrozen(self, ctx: Context) -> None:
        """Sites that have their first gradient in the middle of training, behind others or behind a head that is not watched."""
        now = ctx.now.table.ids[ctx.gradients() & measured(ctx.now, Measured.COUNTS)]
        new = np.setdiff1d(now, self._with_gradient)
        if not len(new):
            return
        known = len(self._with_gradient)
        self._with_gradient = np.union1d(self._with_gradient, new)
        if ctx.warm and len(new) > UNFROZEN_SHARE * len(self._with_gradient):
            self._unfrozen = (ctx.now.step, len(new), known + len(new))

    def _notice_written(self, ctx: Context) -> tuple[int, int] | None:
        """(weights that something wrote between the optimizer's last step and this one, of those looked at), where that is news."""
        self._num_steps += 1
        views = sorted(ctx.now.views, key=lambda view: view.rank)
        logs = next((logs for view in views if (logs := view.logs()).get(WEIGHTS_CHANGED)), None)
        if logs is None:
            return None
        last, self._written = self._written, self._num_steps
        if last is not None and self._num_steps - last <= WRITTEN_BEFORE:
            return None
        return int(logs[WEIGHTS_CHANGED]), int(logs.get(WEIGHTS_LOOKED, 0))

    def cut_off(self, now: CrossRankStep, limit: Limits) -> list[Finding]:
        """Values broke while a jump was open: it began before them, and is told as far as it was seen."""
        jump, self._jump = self._jump, None
        self._stays.forget()
        if jump is None or jump.step >= now.step or not norm_jumped(jump, limit):
            return []
        return finding(now, jump, limit, back=False, cut=True)

    def _begins(self, ctx: Context, loss: float, grad_norm: float | None) -> _Jump | None:
        if int(ctx.base.loss.count[0]) < ctx.limit.min_baseline_steps:
            return None
        usual = float(ctx.base.loss.median()[0])
        spread = float(ctx.base.loss.spread(SIGMA_FLOOR_SHARE * abs(usual))[0])
        far = max(ctx.limit.loss_jump_sigma * spread, ctx.limit.loss_jump_min * abs(usual))
        ordinary = loss - usual <= far or loss - usual <= of_skewed(ctx.base.loss.ordered()[0], usual)
        self._calm = self._calm + 1 if ordinary else 0
        if ordinary or came_before(self._losses, usual, loss):
            if self._calm >= CALM or not ordinary:
                self._left = self._goes_on = False
            return None
        if not ctx.warm:  # where it is up when statistics begin to judge, it did not jump there
            self._left = True
        if self._left:
            return None
        usual_norm = float(ctx.base.grad_norm.median()[0])
        step, leap, risen = ctx.now.step, ctx.schedule.last_leap, ctx.schedule.risen_step
        lr = leap if risen is not None and step - LR_BEFORE <= risen else None
        if self._goes_on and lr is None and loss - usual <= HIGHER * self._height:
            return None
        return _Jump(
            step=step,
            num=0,
            loss=loss,
            peak=step,
            usual=usual,
            spread=spread,
            grad_norm=grad_norm if grad_norm is not None and math.isfinite(grad_norm) else None,
            usual_grad_norm=usual_norm if math.isfinite(usual_norm) else None,
            batch_id=ctx.now.batch_id,
            lr=lr,
            inputs=_look(ctx),
        )


def _look(ctx: Context) -> _Inputs | None:
    """The inputs of this step against their own baselines; None where none was measured."""
    inputs = ctx.inputs()
    up = np.where(inputs & ~ctx.returning, ctx.above_usual, np.nan)
    known = np.isfinite(up)
    if not known.any():
        return None
    row, first = int(np.nanargmax(up)), int(ctx.now.in_flow(inputs)[0])
    spread = ctx.base.amax.spread(ctx.floor)
    common = float(np.median(np.abs(up[known]) / spread[known])) > INPUT_SIGMA
    octaves = float(up[row])
    looked_at = (inputs | ctx.weights()) & ctx.health_known
    return _Inputs(
        step=ctx.now.step,
        amax=float(f"{2.0 ** ctx.now.log2_amax[row]:.4g}"),
        usual=float(f"{2.0 ** ctx.base.amax.median()[row]:.4g}"),
        site=int(ctx.now.table.ids[row]),
        octaves=round(octaves, 2),
        ordinary=not common and octaves <= ctx.limit.outlier_input_octaves,
        moved=common or octaves >= ctx.limit.outlier_leap_octaves,
        healthy=not np.any(ctx.unhealthy[looked_at]) if looked_at.any() else None,
        entered=bool(common and up[first] > max(INPUT_SIGMA * spread[first], ENTERS_OCTAVES))
        and octaves < ctx.limit.outlier_leap_octaves,
    )
