"""A gradient norm that stands at a multiple of what it was: mode 25, scalar-shift.

Shapes:     grad norm, and log2 amax of gradients [S], per step -> at most one finding
Thread:     detect worker

Gradients that are accumulated twice, summed where they are to be averaged, or not unscaled: Adam does not ask for their
size and clipping hides it, so the loss hardly moves. What tells the cause is where the factor appears: when the operands
of the backward GEMMs are as they were and the norm of the weights' gradients is not, it came behind them. Where the loss moved
in the same step the data did: gradients of tokens that agree add up to a larger norm, and their amax hardly shows it.
Where weights have their first gradient in that step, or none any more, they were unfrozen or frozen: a norm of more of them is larger.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import MAD_TO_SIGMA
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding, Verdict
from fp8watch_server.detect.modes.scalar_shift.gradients_in_norm import GradientsInNorm

NUM_LAST, NUM_BEFORE = 5, 24
SIGMA = 5.0
SPREAD_OCTAVES = 0.1
"""The smallest spread of a norm that is believed."""
ABRUPT = 0.7
"""Of the change, as much must come from one step to the next."""
MIN_GRADIENTS = 3
SAME_BATCH_OCTAVES = 0.2
"""Elements of the gradients: beyond, another batch or sequence length explains another norm."""
LOSS_SHARE = 0.05
"""Of its level: a loss that moved by more, in the same step and out of where it was, moved with the norm."""
BEHIND = 0.35
"""Of the change, the gradients that enter the GEMMs have at most so much where it came behind them."""


class GradientFactor(Detector):
    """The last norms against those before."""

    modes = ("scalar-shift",)
    between_samples = True
    parts = (GradientsInNorm,)

    def __init__(self, num_sites: int = 0) -> None:
        self._seen: list[tuple[float, float, float, float]] = []
        """log2 of norm, of the median gradient's amax and of elements; loss."""
        self._steps: list[int] = []
        self._of = GradientsInNorm(num_sites)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._of.grow(num_sites)

    def frozen(self) -> None:
        """Nothing of the sites."""

    def resume(self) -> None:
        """Norms of the attempt before stay: a factor that a restart brought is one."""

    def _forget(self) -> None:
        self._seen, self._steps = [], []

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        norm = ctx.now.scalar("grad_norm")
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return []
        if not ctx.clean:
            self._forget()
            return []
        self._of.look(ctx.now)
        amax = ctx.now.log2_amax[ctx.gradients()]
        amax = amax[np.isfinite(amax)]
        elements = ctx.now.column("num_elements")[ctx.gradients()]
        elements = elements[elements > 0]
        median = float(np.median(amax)) if len(amax) >= MIN_GRADIENTS else math.nan
        most = math.log2(float(elements.max())) if len(elements) else math.nan
        keep = NUM_LAST + NUM_BEFORE
        loss = ctx.now.scalar("loss")
        self._seen = [*self._seen, (math.log2(norm), median, most, math.nan if loss is None else loss)][-keep:]
        self._steps = [*self._steps, ctx.now.step][-keep:]
        if not ctx.warm or len(self._seen) < keep:
            return []
        found = self._judge(ctx)
        if found is not None:
            self._forget()  # the level that is reached is the usual one
        return [] if found is None else [found]

    def _judge(self, ctx: Context) -> Finding | None:
        norm, amax, elements, losses = (np.array(column) for column in zip(*self._seen, strict=True))
        before, last = norm[:NUM_BEFORE], norm[NUM_BEFORE:]
        usual, level = float(np.median(before)), float(np.median(last))
        spread = max(MAD_TO_SIGMA * float(np.median(np.abs(before - usual))), SPREAD_OCTAVES)
        change = level - usual
        side = math.copysign(1.0, change)
        need = max(SIGMA * spread, ctx.limit.gradient_factor_octaves)
        step = float(last[0] - before[-4:].mean())
        furthest = float((before * side).max())
        if abs(change) <= need or step * side < ABRUPT * abs(change) or float((last * side).min()) <= furthest:
            return None
        if not abs(np.median(elements[NUM_BEFORE:]) - np.median(elements[:NUM_BEFORE])) <= SAME_BATCH_OCTAVES:
            return None
        entering = float(np.nanmedian(amax[NUM_BEFORE:]) - np.nanmedian(amax[:NUM_BEFORE]))
        if math.isnan(entering):
            return None
        return self._finding(ctx, usual, level, entering, _loss_moved(losses))

    def _finding(
        self, ctx: Context, usual: float, level: float, entering: float, loss_moved: tuple[float, float] | None
    ) -> Finding:
        since = self._steps[NUM_BEFORE]
        evidence = [
            Evidence("grad_norm", float(f"{2.0**level:.4g}"), float(f"{2.0**usual:.4g}"), "", since),
            Evidence("gradient_change", round(entering, 2), 0, "octaves", since),
        ]
        loss, usual_loss = ctx.now.scalar("loss"), float(ctx.base.loss.median()[0])
        if loss_moved is not None:
            evidence.append(Evidence("loss", round(loss_moved[1], 4), round(loss_moved[0], 4), "", since))
        elif loss is not None and math.isfinite(loss) and math.isfinite(usual_loss):
            evidence.append(Evidence("loss", round(loss, 4), round(usual_loss, 4), "", ctx.now.step))
        known = ctx.gradients() & ctx.health_known
        worse = np.count_nonzero(known & ctx.unhealthy & ~ctx.now.table.observed)
        verdict: Verdict = "unknown" if not known.any() else "fp8" if 2 * worse > np.count_nonzero(known) else "shared"
        changed, of = self._of.began(NUM_LAST) if level > usual else self._of.ceased(NUM_LAST)
        if changed:
            evidence.append(
                Evidence("first_gradients" if level > usual else "no_gradients", changed, 0, f"of {of} weights", since)
            )
        behind = loss_moved is None and not changed and abs(entering) <= BEHIND * abs(level - usual)
        found = ctx.now.finding(
            "scalar-shift", "warning" if behind else "info", np.zeros(0, dtype=np.int64), evidence, verdict,
            name="grad_norm", why="factor", kind="factor", behind=behind,
            with_loss=loss_moved is not None, changed=(changed, of) if changed else None, factor=2.0 ** (level - usual), began=since,
            not_before=since,
        )  # fmt: skip
        return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})


def _loss_moved(losses: npt.NDArray[np.float64]) -> tuple[float, float] | None:
    """(level before, level since) where the loss left its last twelve values with the norm, to one side; None where it did not."""
    before, last = losses[NUM_BEFORE - 12 : NUM_BEFORE], losses[NUM_BEFORE:]
    usual, level = float(np.median(before)), float(np.median(last))
    if not (np.isfinite(before).all() and np.isfinite(last).all()) or abs(level - usual) <= LOSS_SHARE * abs(usual):
        return None
    side = math.copysign(1.0, level - usual)
    return (usual, level) if float((last * side).min()) > float((before * side).max()) else None
