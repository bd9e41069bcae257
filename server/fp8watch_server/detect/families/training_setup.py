"""How training is set up, seen to change while it runs: mode 10, recipe-mismatch; and mode 13, where gradients leave what they
were clipped to.

Shapes:     what gradients are clipped to, attention modules that see ahead, per step -> findings of one step
Thread:     detect worker

Neither is a matter of FP8, and neither need show in the loss: it even falls where a causal model begins to see what it is
to predict. Clipping is told where it was there in each step and is gone for some, or is to another norm that stays; where
another optimizer takes over in that step it is another stage of training, and information.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8watch_agent.training_names import CLIP_NORM, OPTIMIZER_BEGINS, SEES_AHEAD
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding, Severity

MIN_CLIPPED = 16
"""Steps in a row that were clipped to one norm, before another, or none, says anything."""
GONE_STEPS = 3
"""Steps in a row without the usual norm, or with another."""
REPEAT_STEPS = 5
MAX_NAMED = 8


class TrainingSetup(Detector):
    """Clipping, and who sees ahead."""

    modes = ("recipe-mismatch", "optimizer-divergence")
    between_samples = True
    _begun = -1
    """Step that an optimizer ended in the stead of another, the last one; a state that was saved before has none."""

    def __init__(self, num_sites: int = 0) -> None:
        self._usual, self._num_usual = math.nan, 0  # norm, steps in a row
        self._num_clipping = 0  # of them, whose gradients were larger
        self._now, self._num_now, self._since = math.nan, 0, -1  # another norm, NaN for none
        self._lost, self._lost_since = math.nan, -1  # norm that gradients are clipped to no longer
        self._largest = 0.0  # norm since they may not have been
        self._told_ahead = -1

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Baselines of sites go on."""

    def resume(self) -> None:
        """What was usual stays: a restart may lose it."""
        self._num_now, self._told_ahead, self._largest = 0, -1, 0.0

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        logs = ctx.now.logs
        norm = logs.get(CLIP_NORM, math.nan)
        if logs.get(OPTIMIZER_BEGINS):
            self._begun = ctx.now.step
        clipping, beyond = self._clipping(ctx, norm), self._beyond(ctx, norm)
        clipping = None if beyond is not None else clipping  # it says both
        return [f for f in (clipping, beyond, self._ahead(ctx, logs)) if f is not None]

    def _beyond(self, ctx: Context, norm: float) -> Finding | None:
        """Gradients that are larger than what they were clipped to, since nothing clips them there."""
        if norm <= self._lost:
            self._lost = math.nan
        size = ctx.now.scalar("grad_norm")
        if size is not None and math.isfinite(size):
            self._largest = max(self._largest, size)
        if math.isnan(self._lost) or not self._largest > self._lost:
            return None
        lost, since, largest, self._lost = self._lost, self._lost_since, self._largest, math.nan
        evidence = [
            Evidence("grad_norm", float(f"{largest:.4g}"), float(f"{lost:.4g}"), "", since),
            Evidence(
                "clip_norm", "none" if math.isnan(norm) else float(f"{norm:.4g}"), float(f"{lost:.4g}"), "", since
            ),
        ]
        return ctx.now.finding(
            "optimizer-divergence", "warning", np.array([], dtype=np.int64), evidence, "shared", kind="clipping-lost",
            began=since, not_before=since,
        )  # fmt: skip

    def _clipping(self, ctx: Context, norm: float) -> Finding | None:
        size = ctx.now.scalar("grad_norm")
        clips = size is not None and size > norm
        if norm == self._usual:
            self._num_usual, self._num_now = self._num_usual + 1, 0
            self._largest = 0.0 if math.isnan(self._lost) else self._largest
            self._num_clipping += clips
            return None
        if self._num_usual < MIN_CLIPPED:  # nothing is usual yet
            self._usual, self._num_usual, self._num_clipping, self._num_now = norm, int(not math.isnan(norm)), clips, 0
            return None
        if not self._num_now or not _same(norm, self._now):
            self._now, self._num_now, self._since = norm, 0, ctx.now.step
            self._largest = 0.0
        self._num_now += 1
        if self._num_now < GONE_STEPS:
            return None
        usual, num, clipping = self._usual, self._num_usual, self._num_clipping
        self._usual, self._num_usual, self._num_clipping, self._num_now = norm, 0, 0, 0
        often, taken_over = clipping > num // 10, self._since == self._begun
        if not norm < usual and not taken_over:
            self._lost, self._lost_since = usual, self._since
        now = "none" if math.isnan(norm) else float(f"{norm:.4g}")
        evidence = [
            Evidence("clip_norm", now, float(f"{usual:.4g}"), "", self._since),
            Evidence("steps_that_were_clipped", clipping, None, f"of {num} before", self._since),
        ]
        if taken_over:
            evidence.append(Evidence("optimizer", "another one", None, "from this step on", self._since))
        severity: Severity = "warning" if often and not norm < usual and not taken_over else "info"
        return self._finding(ctx, severity, evidence, "clipping", self._since)

    def _ahead(self, ctx: Context, logs: dict[str, float]) -> Finding | None:
        modules = [
            name.removeprefix(SEES_AHEAD) for name, value in logs.items() if name.startswith(SEES_AHEAD) and value > 0
        ]
        if not modules:
            return None
        if self._told_ahead >= 0 and ctx.now.step - self._told_ahead < REPEAT_STEPS:
            return None
        self._told_ahead = ctx.now.step
        evidence = [
            Evidence("attention_sees_ahead", name, "no later token", "", ctx.now.step) for name in modules[:MAX_NAMED]
        ]
        return self._finding(ctx, "warning", evidence, "sees-ahead", ctx.now.step, modules[0], num=len(modules))

    @staticmethod
    def _finding(
        ctx: Context,
        severity: Severity,
        evidence: list[Evidence],
        kind: str,
        began: int,
        module: str = "",
        **extra: Any,
    ) -> Finding:
        rows = np.array([i for i, f in enumerate(ctx.now.table.facts) if module and f.module == module], dtype=np.int64)
        return ctx.now.finding(
            "recipe-mismatch", severity, rows, evidence, "shared", kind=kind, began=began, not_before=began, **extra
        )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
