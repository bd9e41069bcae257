"""Attention logits as training said them: mode 12, attention-logit-growth.

Shapes:     `watch.log(max_attention_logit=…)`, or `max_attention_logit/<module>` -> at most one finding
Thread:     detect worker

Fixed limits, because softmax has a fixed scale: above 100 it is one-hot, above 1e4 bfloat16 loses the differences of
neighbours. Below the limits, a slope that lasts.
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding, Severity

LOG = "max_attention_logit"
WINDOW = 17
SUSTAIN = 3


class AttentionLogits(Detector):
    """The largest attention logit of each name that was logged."""

    modes = ("attention-logit-growth",)
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._series: dict[str, Baseline] = {}
        self._usual: dict[str, Baseline] = {}
        self._num_over: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._at: dict[str, list[int]] = {}

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Its own series only."""

    def resume(self) -> None:
        """A new session: growth across the restart is none."""
        self._series, self._at, self._num_over, self._since = {}, {}, {}, {}

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        worst: tuple[float, str, float, Severity] | None = None
        for name, value in ctx.now.logs.items():
            if not (name == LOG or name.startswith(LOG + "/")) or not math.isfinite(value) or value <= 0:
                continue
            got = self._judge(ctx, name, value)
            if got is not None and (worst is None or value > worst[0]):
                worst = (value, name, *got)
        return [] if worst is None else [self._finding(ctx, *worst)]

    def _judge(self, ctx: Context, name: str, value: float) -> tuple[float, Severity] | None:
        series = self._series.setdefault(name, Baseline(1, WINDOW))
        at = self._at[name] = [*self._at.get(name, []), ctx.now.step][-WINDOW:]
        usual = self._usual.setdefault(name, Baseline(1))
        series.push(np.array([math.log2(value)]))
        apart = (at[-1] - at[0]) / max(len(at) - 1, 1)  # it is logged when a step is sampled: a slope is by the step
        slope = float(series.slope()[0]) / max(apart, 1.0) if int(series.count[0]) >= WINDOW // 2 else 0.0
        limit = ctx.limit
        rising = ctx.warm and value > limit.attention_logit_floor and slope > limit.attention_logit_rate_octaves
        over = value > limit.attention_logit_warning or rising
        if not over:
            self._num_over[name] = 0
            self._since.pop(name, None)
            usual.push(np.array([value]))
            return None
        self._since.setdefault(name, ctx.now.step)
        self._num_over[name] = self._num_over.get(name, 0) + 1
        if value > limit.attention_logit_critical:
            return slope, "critical"
        return (slope, "warning") if value > limit.attention_logit_warning or self._num_over[name] >= SUSTAIN else None

    def _finding(self, ctx: Context, value: float, name: str, slope: float, severity: Severity) -> Finding:
        module = name.partition("/")[2]
        table = ctx.now.table
        inside = np.array(
            [f.module == module or f.module.startswith(module + ".") for f in table.facts], dtype=np.bool_
        )
        rows = ctx.now.in_flow(inside & ctx.inputs())[:1] if module else np.zeros(0, dtype=np.int64)
        usual = float(self._usual[name].median()[0])
        baseline = float(f"{usual:.4g}") if math.isfinite(usual) else None
        return ctx.now.finding(
            "attention-logit-growth",
            severity,
            rows,
            [
                Evidence("max_attention_logit", float(f"{value:.6g}"), baseline, "logit", self._since.get(name)),
                Evidence("logit_growth", round(slope, 4), 0, "octaves/step", self._since.get(name)),
            ],
            "shared",
            bound=False,
            began=self._since.get(name, ctx.now.step),
            attention=module or None,
        )
