"""A gradient that all but vanished in every layer at once: mode 25, scalar-shift.

Shapes:     grad norm, and log2 amax of gradients [S], per step -> at most one finding
Thread:     detect worker

A loss that is scaled by 1e-9 or by 0, an output that was detached, a mask over every token: the loss may look as ever,
the norm of the gradient does not. What all gradients do together is taken out before one layer is judged, so no other
detector sees it. The norm is what people log; where it is not, nine of ten gradients against their own baselines say it: where some go
on as ever, a part of the model is cut off from the loss, for good or by a term that is clamped, and `dead-layer` names it.

Ten octaves are told however they come. Five are where they come from one step to the next, and the norm is a quarter of the
smallest of late: a loss divided twice by its tokens.
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding, Verdict
from fp8watch_server.detect.step_view import Mask

SUSTAIN = 3
"""Steps in a row: a batch whose every token is masked has no gradient for one of them."""
MIN_GRADIENTS = 3
SPARED = 0.1
"""Of the gradients, that need not have fallen."""
AT_ONCE_OCTAVES = 5.0
"""A fall from one step to the next; what drifts there is the training's own."""
USUAL_OCTAVES = 1.5
"""Within these of its usual value the step before was as ever."""


class GradientFall(Detector):
    """The gradients of a run as one."""

    modes = ("scalar-shift",)
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._num_low = 0
        self._since = -1
        self._usual_norm: float | None = None  # when it began
        self._as_ever = False  # the step before was
        self._num_sites = num_sites

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._num_sites = num_sites

    def frozen(self) -> Mask | None:
        """Nothing is learned of gradients that are not there."""
        return np.ones(self._num_sites, dtype=np.bool_) if self._num_low else None

    @property
    def holds_loss(self) -> bool:
        """Nor of their norm."""
        return self._num_low > 0

    def resume(self) -> None:
        """A new session."""
        self._num_low, self._since, self._as_ever = 0, -1, False

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        if not ctx.warm or not ctx.clean:
            return []
        norm, usual = ctx.now.scalar("grad_norm"), float(ctx.base.grad_norm.median()[0])
        known = (
            norm is not None
            and math.isfinite(norm)
            and int(ctx.base.grad_norm.count[0]) >= ctx.limit.min_baseline_steps
        )
        fallen = self._fallen(ctx)
        if not known and fallen is None:
            return []
        least = ctx.limit.gradient_fall_octaves
        at_once = min(AT_ONCE_OCTAVES, least) if self._as_ever or self._num_low else least
        norm_fell = _octaves(norm, usual) if known else None
        by_norm = norm_fell is not None and norm_fell > (at_once if _is_least(ctx, norm) else least)
        by_sites = fallen is not None and fallen > at_once
        if not (by_norm or by_sites):
            self._num_low, self._since = 0, -1
            moved = [abs(x) for x in (norm_fell, fallen) if x is not None]
            self._as_ever = max(moved) < USUAL_OCTAVES
            return []
        self._as_ever = False
        if not self._num_low:
            self._since = ctx.now.step
        self._num_low += 1
        if self._num_low < SUSTAIN:
            return []
        return [self._finding(ctx, norm if by_norm else None, usual, fallen)]

    @staticmethod
    def _fallen(ctx: Context) -> float | None:
        """Octaves that nine of ten gradients stand under their baselines at least; Inf where they are zero, None where none was seen."""
        now = ctx.now
        change = ctx.base.amax.median() - now.log2_amax
        change = np.where(now.all_zero, math.inf, change)
        known = ctx.gradients() & ctx.known(ctx.base.amax) & ~np.isnan(change)
        if np.count_nonzero(known) < MIN_GRADIENTS:
            return None
        return float(np.quantile(change[known], SPARED, method="lower"))

    def _finding(self, ctx: Context, norm: float | None, usual: float, fallen: float | None) -> Finding:
        evidence = []
        if norm is not None:
            evidence.append(Evidence("grad_norm", float(f"{norm:.4g}"), float(f"{usual:.4g}"), "", self._since))
        if fallen is not None:
            value = "all zero" if math.isinf(fallen) else round(fallen, 1)
            evidence.append(Evidence("gradient_fall", value, 0, "octaves", self._since))
        loss, usual_loss = ctx.now.scalar("loss"), float(ctx.base.loss.median()[0])
        if loss is not None and math.isfinite(usual_loss):
            evidence.append(Evidence("loss", round(loss, 4), round(usual_loss, 4), "", ctx.now.step))
        gradients = ctx.gradients() & ctx.health_known & ~ctx.now.all_zero
        worse = gradients & ctx.unhealthy & ~ctx.now.table.observed
        verdict: Verdict = "unknown"
        if gradients.any():
            verdict = "fp8" if np.count_nonzero(worse) * 2 > np.count_nonzero(gradients) else "shared"
        elif fallen is not None and math.isinf(fallen):
            verdict = "shared"  # they are zero before the cast
        found = ctx.now.finding(
            "scalar-shift",
            "warning",
            np.zeros(0, dtype=np.int64),
            evidence,
            verdict,
            name="grad_norm",
            why="fall",
            kind="grad_norm",
            began=self._since,
            not_before=self._since,
        )
        return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})


def _octaves(norm: float | None, usual: float) -> float | None:
    """By which the norm stands under its usual value; Inf where it is 0."""
    if norm is None or not usual > 0:
        return None
    return math.log2(usual / norm) if norm > 0 else math.inf


def _is_least(ctx: Context, norm: float | None) -> bool:
    """Whether the norm is a quarter of the smallest of the last clean steps: some trainings' norms scatter far."""
    return norm is not None and 4 * norm < float(np.nanmin(ctx.base.grad_norm.ordered()[0]))
