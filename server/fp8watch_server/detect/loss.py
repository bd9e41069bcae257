"""A loss that jumps and comes back: mode 14, bad-batch. One that stays where it jumped to: a shift of the data.

Upstream:   fp8watch_server.detect.context   Downstream: fp8watch_server.detect.statistics
Shapes:     loss and grad norm per step -> at most one finding
Thread:     detect worker

Told when it is over: until then a bad batch and the beginning of a divergence look alike. The jump is measured against
a median that the jump does not move, and the gradient norm must jump as well. Inputs must be where they were, or it is
no matter of the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .context import Context
from .finding import LOSS_FLOW, Evidence, Finding

SIGMA_FLOOR_SHARE = 0.01
"""Of the loss: the smallest spread that is believed."""
INPUT_SIGMA = 4.0


@dataclass
class _Jump:
    step: int
    num: int  # observed steps since
    loss: float
    usual: float
    spread: float
    grad_norm: float | None
    usual_grad_norm: float | None
    batch_id: str | None
    inputs_moved: bool


class LossJumps:
    """The loss against its own recent past."""

    modes = ("bad-batch",)

    def __init__(self) -> None:
        self._jump: _Jump | None = None

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """The loss's own baseline only: `holds_loss`."""

    @property
    def holds_loss(self) -> bool:
        """A jump is open: its losses are not learned."""
        return self._jump is not None

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        loss, grad_norm = ctx.now.scalar("loss"), ctx.now.scalar("grad_norm")
        if loss is None or not math.isfinite(loss) or not ctx.clean:
            self._jump = None
            return []
        if self._jump is None:
            self._jump = self._begins(ctx, loss, grad_norm)
            return []
        jump = self._jump
        jump.num += 1
        if grad_norm is not None and math.isfinite(grad_norm) and jump.grad_norm is not None:
            jump.grad_norm = max(jump.grad_norm, grad_norm) if jump.num == 1 else jump.grad_norm
        jump.loss = max(jump.loss, loss)
        back = loss < jump.usual + max(3 * jump.spread, 0.25 * (jump.loss - jump.usual))
        if not back and jump.num < ctx.limit.recover_steps:
            return []
        self._jump = None
        jumped_norm = jump.grad_norm is None or jump.usual_grad_norm is None
        jumped_norm = jumped_norm or (jump.grad_norm or 0) > ctx.limit.grad_norm_jump * (
            jump.usual_grad_norm or math.inf
        )
        if jump.inputs_moved or (back and not jumped_norm):
            return []
        return [self._finding(ctx, jump, shift=not back)]

    def _begins(self, ctx: Context, loss: float, grad_norm: float | None) -> _Jump | None:
        if not ctx.warm or int(ctx.base.loss.count[0]) < ctx.limit.min_baseline_steps:
            return None
        usual = float(ctx.base.loss.median()[0])
        spread = float(ctx.base.loss.spread(SIGMA_FLOOR_SHARE * abs(usual))[0])
        if loss - usual <= max(ctx.limit.loss_jump_sigma * spread, ctx.limit.loss_jump_min * abs(usual)):
            return None
        usual_norm = float(ctx.base.grad_norm.median()[0])
        inputs = ctx.inputs()
        moved = np.abs(ctx.above_usual[inputs]) / ctx.base.amax.spread(ctx.floor)[inputs]
        moved = moved[np.isfinite(moved)]
        return _Jump(
            step=ctx.now.step,
            num=0,
            loss=loss,
            usual=usual,
            spread=spread,
            grad_norm=grad_norm if grad_norm is not None and math.isfinite(grad_norm) else None,
            usual_grad_norm=usual_norm if math.isfinite(usual_norm) else None,
            batch_id=ctx.now.batch_id,
            inputs_moved=len(moved) > 0 and float(np.median(moved)) > INPUT_SIGMA,
        )

    def _finding(self, ctx: Context, jump: _Jump, *, shift: bool) -> Finding:
        evidence = [Evidence("loss", round(jump.loss, 4), round(jump.usual, 4), "", jump.step)]
        if jump.grad_norm is not None:
            usual = None if jump.usual_grad_norm is None else float(f"{jump.usual_grad_norm:.4g}")
            evidence.append(Evidence("grad_norm", float(f"{jump.grad_norm:.4g}"), usual, "", jump.step))
        if shift:
            evidence.append(Evidence("steps_above", jump.num, 0, "steps", jump.step))
        else:
            evidence.append(Evidence("recovered_after", jump.num, "5 or less", "steps", jump.step))
        none = np.zeros(0, dtype=np.int64)
        found = ctx.now.finding(
            "bad-batch",
            "info" if shift else "warning",
            none,
            evidence,
            "unknown" if np.any(ctx.unhealthy & (ctx.inputs() | ctx.weights())) else "shared",
            shift=shift,
            onset=jump.step,
            jump_batch_id=jump.batch_id,
        )
        return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})
