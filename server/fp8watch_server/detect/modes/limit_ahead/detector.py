"""Trends that lead to a limit: mode 28, limit-ahead.

Shapes:     underflow, clip depth [S]; `watch.log(max_attention_logit=…)` -> at most one finding, of severity info
Thread:     detect worker

Underflow against the limit of chronic-quantization-noise, clip depth of delayed and static scales against 1, logged
attention logits against the first limit of attention-logit-growth. Each is looked at on a log scale, once a bin
(`binned_series`), by the rules of `trend`; it is said when two looks in a row say so, and until one does not. Steps
before the learning rate is warm, and those in which something is broken, are left out. Logits of a young model in health
grow with its age: where they grow no faster, nothing is said.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8watch_server.detect.binned_series import BinnedSeries
from fp8watch_server.detect.context import Context, Floats
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.families.attention_logits import YOUNG_OCTAVES
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.modes.limit_ahead import quantities
from fp8watch_server.detect.modes.limit_ahead.quantities import BY_FIELD, CLIP_DEPTH, LOGITS, UNDERFLOW, Quantity
from fp8watch_server.detect.step_view import Mask
from fp8watch_server.detect.trend import Forecast

MAX_NAMES = 1024


class LimitsAhead(Detector):
    """What is heading for a limit, the soonest of them named."""

    modes = ("limit-ahead",)
    between_samples = True
    parts = (BinnedSeries,)

    def __init__(self, num_sites: int) -> None:
        self._underflow = BinnedSeries(num_sites)
        self._clip_depth = BinnedSeries(num_sites)
        self._logits = BinnedSeries(0)
        self._names: list[str] = []
        self._looks: dict[str, int] = {}  # "field/row" -> looks in a row that said so
        self._said: list[list[Any]] = []  # field, row, and the numbers of its forecast: the soonest first

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._underflow.grow(num_sites)
        self._clip_depth.grow(num_sites)

    def frozen(self) -> Mask | None:
        """Nothing is wrong: baselines learn."""
        return None

    def resume(self) -> None:
        """A new session: a line does not go across the restart."""
        for series in (self._underflow, self._clip_depth, self._logits):
            series.forget()
        self._looks, self._said = {}, []

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, limit = ctx.now, ctx.limit
        series = (self._underflow, self._clip_depth, self._logits)
        logits = self._logits_of(now.logs)
        closed = [s.begin(now.step) for s in series]
        if any(closed):
            flushes = np.array([quantities.flushes(f.operand, f.format) for f in now.table.facts], dtype=np.bool_)
            carries = np.array([quantities.carries(f.recipe) for f in now.table.facts], dtype=np.bool_)
            limits = (
                np.where(flushes, math.log2(limit.chronic_underflow), np.nan),
                np.where(carries, math.log2(quantities.CLIPS_ABOVE), np.nan),
                np.full(len(self._names), math.log2(limit.attention_logit_warning)),
            )
            self._look(zip((UNDERFLOW, CLIP_DEPTH, LOGITS), series, limits, strict=True))
        if ctx.warm and ctx.clean:
            self._underflow.push(now.step, _log2(now.underflow))
            self._clip_depth.push(now.step, _log2(now.clip_depth))
            self._logits.push(now.step, _log2(logits))
        return [self._finding(ctx)] if self._said else []

    def _logits_of(self, logs: dict[str, float]) -> Floats:
        """The logits of this step, in the order of the names. [N]"""
        given = {k: v for k, v in logs.items() if k == LOGITS.field or k.startswith(LOGITS.field + "/")}
        news = [name for name in given if name not in self._names]
        self._names += news[: MAX_NAMES - len(self._names)]
        self._logits.grow(len(self._names))
        return np.array([given.get(name, math.nan) for name in self._names], dtype=np.float64)

    def _look(self, asked: Any) -> None:
        """After a bin: which trends last, for the second time in a row at least."""
        before, self._looks, self._said = self._looks, {}, []
        for quantity, series, limits in asked:
            for row, found in series.forecasts(limits).items():
                if quantity is LOGITS and found.slope <= _young(found):
                    continue
                key = f"{quantity.field}/{row}"
                self._looks[key] = before.get(key, 0) + 1
                if self._looks[key] > 1:
                    numbers = [found.limit, found.now, found.soonest, found.steps, found.latest]
                    self._said.append([quantity.field, row, *numbers, found.first_step, found.last_step])
        self._said.sort(key=lambda said: said[5] + said[8])

    def _finding(self, ctx: Context) -> Finding:
        field, row, limit, level, soonest, steps, latest, first, last = self._said[0]
        quantity: Quantity = BY_FIELD[field]
        rows = np.array([said[1] for said in self._said if said[0] != LOGITS.field], dtype=np.int64)
        if quantity is LOGITS:
            rows = rows[:0]
        name = self._names[row] if quantity is LOGITS else None
        value, bound = float(f"{2.0**level:.3g}"), float(f"{2.0**limit:.3g}")
        evidence = [
            Evidence(field, value, bound, quantity.unit, first),
            Evidence("steps_ahead", steps, f"{soonest} to {latest}", "steps", last),
        ]
        others = dict.fromkeys(said[0] for said in self._said)
        news = [Evidence(f, float(f"{2.0**s[3]:.3g}"), float(f"{2.0**s[2]:.3g}"), BY_FIELD[f].unit, s[7])
                for f in others if f != field for s in [next(s for s in self._said if s[0] == f)]]  # fmt: skip
        return ctx.now.finding(
            "limit-ahead",
            "info",
            rows,
            [*evidence, *news],
            "shared" if quantity is LOGITS else "fp8",
            soonest=soonest,
            steps=steps,
            latest=latest,
            first=first,
            last=last,
            name=name,
            news=news,
            quantity=field,
        )


def _young(found: Forecast) -> float:
    """Octaves a step by which the logits of a young model in health may grow over the window."""
    span = found.last_step - found.first_step
    return YOUNG_OCTAVES * math.log2((found.last_step + 1) / (found.first_step + 1)) / max(span, 1)


def _log2(values: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        got = np.log2(values)
    return np.where(np.isfinite(got), got, np.nan)
