"""Attention logits as training said them: mode 12, attention-logit-growth.

Shapes:     `watch.log(max_attention_logit=…)`, or `max_attention_logit/<module>` -> at most one finding
Thread:     detect worker

Fixed limits, because softmax has a fixed scale: above 100 it is one-hot, above 1e4 bfloat16 loses the differences of
neighbours. Below the limits, a slope that lasts and is steeper than that of a young model.

Logits of a healthy model grow until its learning rate has warmed up and for a while after it, and where they stay then
is a property of the model. So before that only the last limit pages; a value above the first is information, and is
taken for what is usual. Afterwards a value above the first limit is growth only where it was lower, or half as much;
in the first steps of a run, where small models in health pass that limit and come back, only where it came faster.

Logits that begin to grow when the learning rate has left its range follow it: mode 13, optimizer-divergence.
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
MIN_USUAL = 4
"""Looks after which a name has a usual value."""
GREW = 2.0
"""Times its usual value, where that is above the limit already."""
YOUNG_OCTAVES = 5.0
"""By which logits may grow while the number of steps doubles: small models in health were seen to grow by 2 to 4 until
about step 100. Late in a training that is next to nothing."""
YOUNG_STEPS = 1000
"""Before which a model in health may pass the first limit: the demo's reached 125 at step 130 and came back below 105."""
JUMP_OCTAVES = 1.0
"""From one look to the next, beyond what another sample of rows makes."""


class AttentionLogits(Detector):
    """The largest attention logit of each name that was logged."""

    modes = ("attention-logit-growth", "optimizer-divergence")
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._series: dict[str, Baseline] = {}
        self._usual: dict[str, Baseline] = {}
        self._num_over: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._at: dict[str, list[int]] = {}
        self._told = -1  # step of the leap of the LR that was told by logits: what more of them grow is the same

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
        limit, usual = ctx.limit, self._usual.setdefault(name, Baseline(1))
        jumped = self._jumped(name, value, ctx)
        slope = self._slope(name, value, ctx)
        if self._is_over(ctx, value, slope, usual, jumped):
            self._since.setdefault(name, ctx.now.step)
            self._num_over[name] = self._num_over.get(name, 0) + 1
            if value > limit.attention_logit_critical:
                return slope, "critical"
            if not ctx.warm:
                usual.push(np.array([value]))
                return (slope, "info") if self._num_over[name] >= SUSTAIN else None
            lasts = value > limit.attention_logit_warning or self._num_over[name] >= SUSTAIN
            return (slope, "warning") if lasts else None
        self._num_over[name] = 0
        self._since.pop(name, None)
        usual.push(np.array([value]))
        return None

    def _slope(self, name: str, value: float, ctx: Context) -> float:
        """Octaves a step over the last looks since the learning rate is warm; 0 where there are few, or a young model does
        as much."""
        series = self._series.setdefault(name, Baseline(1, WINDOW))
        if not ctx.warm:
            series.forget()
            self._at[name] = []
            return 0.0
        at = self._at[name] = [*self._at.get(name, []), ctx.now.step][-WINDOW:]
        series.push(np.array([math.log2(value)]))
        if len(at) < WINDOW // 2:
            return 0.0
        looks = series.ordered()[0, -len(at) :].astype(np.float64)
        third = len(at) // 3  # each look is at other rows and heads: medians of a third
        first, last = float(np.median(at[:third])), float(np.median(at[-third:]))
        slope = float(np.median(looks[-third:]) - np.median(looks[:third])) / max(last - first, 1.0)
        young = YOUNG_OCTAVES * math.log2((last + 1) / (first + 1)) / max(last - first, 1.0)
        return slope if slope > young else 0.0

    def _jumped(self, name: str, value: float, ctx: Context) -> bool:
        """Whether it rose since the last look by more than another sample of rows, or a young model, makes."""
        at = self._at.get(name)
        if not at:
            return False
        young = YOUNG_OCTAVES * math.log2((ctx.now.step + 1) / (at[-1] + 1))
        return math.log2(value) - float(self._series[name].ordered()[0, -1]) > max(young, JUMP_OCTAVES)

    @staticmethod
    def _is_over(ctx: Context, value: float, slope: float, usual: Baseline, jumped: bool) -> bool:
        limit = ctx.limit
        if value > limit.attention_logit_critical:
            return True
        if value > limit.attention_logit_warning:
            known = int(usual.count[0]) >= MIN_USUAL
            was = float(usual.median()[0]) if known else 0.0
            if ctx.warm and (ctx.now.step < YOUNG_STEPS or not known) and not (jumped or slope > 0):
                return False
            return not ctx.warm or was <= limit.attention_logit_warning or value > GREW * was
        return ctx.warm and value > limit.attention_logit_floor and slope > limit.attention_logit_rate_octaves

    def _finding(self, ctx: Context, value: float, name: str, slope: float, severity: Severity) -> Finding:
        module = name.partition("/")[2]
        table = ctx.now.table
        inside = np.array(
            [f.module == module or f.module.startswith(module + ".") for f in table.facts], dtype=np.bool_
        )
        rows = ctx.now.in_flow(inside & ctx.inputs())[:1] if module else np.zeros(0, dtype=np.int64)
        usual = float(self._usual[name].median()[0])
        baseline = float(f"{usual:.4g}") if math.isfinite(usual) else None
        since = self._since.get(name, ctx.now.step)
        evidence = [
            Evidence("max_attention_logit", float(f"{value:.6g}"), baseline, "logit", since),
            Evidence("logit_growth", round(slope, 4), 0, "octaves/step", since),
        ]
        risen = ctx.schedule.risen(since)
        if risen is None or not ctx.warm:
            return ctx.now.finding(
                "attention-logit-growth", severity, rows, evidence, "shared", bound=False, began=since, attention=module or None
            )  # fmt: skip
        at, before, lr = risen
        goes_on, self._told = self._told == at, at
        evidence.insert(0, Evidence("lr", lr, before, "", at))
        return ctx.now.finding(
            "optimizer-divergence", severity, rows, evidence, "shared", kind="logits", began=at, not_before=at,
            lr_jump=(before, lr), attention=module or None, consequence=goes_on,
        )  # fmt: skip
