"""Gradients that overflow: a loss scale that falls, steps that are skipped one after the other. Mode 22, scale-collapse.

Shapes:     loss_scale and status of each step -> at most one finding
Thread:     detect worker

A GradScaler halves its scale at each overflow and doubles it after many clean steps: halvings without growth between
them mean that overflows are the rule. Its search for a scale at the start is no collapse. Engines that keep their scale
to themselves are followed by the steps that they skip. A step that overflowed is poisoned for every other detector, so
this one is asked in both.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import StepStatus
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding, Severity
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.step_view import GRAD_OUTPUT

SEARCH = 2
"""Times as many steps may be skipped by the search at the start: from 2^32, the largest that any engine begins with, it takes 32."""


class Overflows(Detector):
    """Loss scales, and steps that were skipped."""

    modes = ("scale-collapse",)
    between_samples = True

    def __init__(self, num_sites: int) -> None:
        self._warm = False
        self._scale: float | None = None  # of the last step that had one
        self._scale_step = 0
        self._halvings: list[tuple[int, float]] = []  # step, and the scale before it; since the scale grew last
        self._num_skipped = 0  # observed steps in a row
        self._since = 0  # the first of them

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""

    def resume(self) -> None:
        """A new session: it may look for its scale anew."""
        super().resume()
        self._warm, self._scale, self._halvings, self._num_skipped = False, None, [], 0

    def frozen(self) -> None:
        """No site's baseline is in the way."""

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        self._warm = ctx.warm
        return self._judge(ctx.now, ctx.limit)

    def cut_off(self, now: CrossRankStep, limit: Limits) -> list[Finding]:
        """Judge a step whose gradients overflowed."""
        return self._judge(now, limit)

    def _judge(self, now: CrossRankStep, limit: Limits) -> list[Finding]:
        skipped = any(view.status == StepStatus.SKIPPED for view in now.views)
        if skipped and not self._num_skipped:
            self._since = now.step
        self._num_skipped = self._num_skipped + 1 if skipped else 0
        halved = self._follow(now, limit)
        collapses = halved and len(self._halvings) >= limit.collapse_halvings
        most = limit.collapse_skipped_steps * (1 if self._warm else SEARCH)
        if skipped and self._num_skipped >= most:
            return [self._finding(now, "critical")]
        unknown = now.scalar("loss_scale") is None
        if collapses or (skipped and unknown and self._warm and self._num_skipped >= limit.collapse_halvings):
            return [self._finding(now, "warning")]
        overflowed = skipped and unknown and any(view.infinite.any() for view in now.views)
        return [self._finding(now, "info")] if overflowed and len(self._broken(now)) else []

    def _follow(self, now: CrossRankStep, limit: Limits) -> bool:
        """Count what the loss scale was halved by. Whether it was in this step."""
        scale, last = now.scalar("loss_scale"), self._scale
        if scale is None or not math.isfinite(scale) or scale <= 0:
            return False
        apart, self._scale, self._scale_step = now.step - self._scale_step, scale, now.step
        if last is None or not self._warm or scale > last:
            self._halvings = []
            return False
        window = 2 * limit.collapse_window_steps
        self._halvings = [of for of in self._halvings if now.step - of[0] <= window]
        if scale == last:
            return False
        times = min(max(1, round(math.log2(last / scale))), max(1, apart))  # one a step, however far it backs off
        self._halvings += [(now.step, last)] * times
        return True

    @staticmethod
    def _broken(now: CrossRankStep) -> npt.NDArray[np.int64]:
        """Gradients that are not finite, in data-flow order, where nothing else of the step is broken."""
        gradients, loss = now.table.role == GRAD_OUTPUT, now.scalar("loss")
        elsewhere = (now.nonfinite & ~gradients).any() or (loss is not None and not math.isfinite(loss))
        return now.in_flow(now.nonfinite & gradients & (not elsewhere))

    def _finding(self, now: CrossRankStep, severity: Severity) -> Finding:
        evidence: list[Evidence] = []
        began, rows = now.step, self._broken(now)
        if severity != "info" and self._halvings:
            scale, (began, before) = self._scale or math.nan, self._halvings[0]
            evidence += [
                Evidence("loss_scale", scale, before, "1", began),
                Evidence("halvings_without_growth", len(self._halvings), 0, "halvings", began),
                Evidence("halvings_to_one", round(max(0.0, math.log2(scale)), 1), None, "halvings", None),
            ]
        if self._num_skipped:
            began = min(began, self._since)
            evidence.append(Evidence("skipped_steps", self._num_skipped, 0, "steps in a row", self._since))
        if len(rows):
            evidence.append(Evidence("nonfinite_gradients", len(rows), 0, "sites", now.step))
        kind = "overflow" if severity == "info" else None  # takes nothing in
        return now.finding(
            "scale-collapse", severity, rows, evidence, "shared", grad_scaler=True, began=began, kind=kind
        )
