"""What all trends share: long trainings, a logged attention logit, and how far the trend has come at a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from proving.faults._base import one_of
from proving.training import Change, Training
from torch import Tensor

STEPS = 480
"""A trend needs time: as long again before it, after it and for it as a run of the proving ground."""
ONSET = (50, 100)
ARRIVES_AFTER = (140, 320)
"""Steps from the onset of a trend to the limit, as it is planned: the training moves things as well."""
PATHS: dict[str, Callable[[float], float]] = {
    "even": lambda p: p,
    "speeding up": lambda p: p**1.6,
    "slowing down": lambda p: p**0.6,
}
"""Share of the time -> share of the way."""
SEVERITIES = ("arrives", "levels-off")


class Trend(Change):
    """One drawn instance of a trend. Every number is drawn from the training's own generator, as those of a fault are."""

    name: ClassVar[str]

    def __init__(self, *, step: int, steps: int, path: str, drawn: dict[str, Any]) -> None:
        self.step, self.steps, self.path = step, steps, path
        self.drawn = {"from": step, "steps": steps, "path": path} | drawn
        self._undo: list[Callable[[], object]] = []

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> Trend | None:
        """One instance that arrives or levels off; None where the training has no such place."""
        raise NotImplementedError

    @classmethod
    def times(cls, rng: np.random.Generator) -> dict[str, Any]:
        """When it begins, how long it takes, and along which path."""
        return {
            "step": int(rng.integers(ONSET[0], ONSET[1] + 1)),
            "steps": int(rng.integers(ARRIVES_AFTER[0], ARRIVES_AFTER[1] + 1)),
            "path": one_of(rng, sorted(PATHS)),
        }

    def done(self, step: int) -> float:
        """Share of the way at a step: 0 before the onset, 1 at the limit, and a quarter of the time beyond."""
        share = (step - self.step) / self.steps
        return PATHS[self.path](min(max(share, 0.0), 1.25))

    def started(self, t: Training) -> None:
        make_long(t)

    def before_attach(self, t: Training) -> None:
        if t.notes.get("attention"):
            self._undo.append(log_logits(t))

    def later(self, undo: Callable[[], object]) -> None:
        """Call this when the run is over."""
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def make_long(t: Training) -> None:
    """The same training over more steps: its schedule is stretched."""
    schedule, stretch = t.schedule, t.steps / STEPS
    t.steps = STEPS
    if schedule is not None:
        t.schedule = lambda step: schedule(step * stretch)  # type: ignore[arg-type]


def log_logits(t: Training) -> Callable[[], None]:
    """From now on the training logs its largest attention logit, as one does who fears that it grows; returns how to stop."""
    attend, own, largest = F.scaled_dot_product_attention, t.log, [0.0]

    def looked_at(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            keys = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            logits = q.float() @ keys.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
            if kwargs.get("is_causal"):
                logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
            largest[0] = max(largest[0], float(logits.max()))
        return attend(q, k, v, *args, **kwargs)

    def log(t: Training, step: int) -> dict[str, float]:
        said, largest[0] = largest[0], 0.0
        t.notes["logit"] = said
        return {"max_attention_logit": said} | (own(t, step) if own is not None else {})

    t.log, t.logs = log, True
    F.scaled_dot_product_attention = looked_at  # type: ignore[assignment]

    def stop() -> None:
        F.scaled_dot_product_attention = attend  # type: ignore[assignment]

    return stop
