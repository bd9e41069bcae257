"""Behind the last layer: logits that grow without a bound, losses that are reduced over the wrong number.

Severity is the factor by which logits or loss are off.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, log_uniform, one_of, onset, role, trained, until
from proving.training import Expected, Training
from torch import Tensor


class OutputLogitsGrow(Lasting):
    """The weights of the head grow by a factor a step, and nothing holds the logits (no z-loss, no decay of the head):
    the model gets surer and surer, and wrong tokens dearer."""

    name = "output-logits-grow"
    growths: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (2.0, 5.0),
        "medium": (5.0, 30.0),
        "severe": (30.0, 1000.0),
    }

    def __init__(self, *, module: str, total: float, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.rate, self.steps, self.done = module, total ** (1 / steps), steps, 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> OutputLogitsGrow | None:
        heads = trained(training, role(training, "head"))
        if not heads:
            return None
        total, steps = log_uniform(rng, *cls.growths[severity]), int(rng.integers(8, 40))
        module = one_of(rng, heads)
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(
                ("scalar-shift", "optimizer-divergence", "outlier-growth", "bad-batch"), None, None, False
            ),
            drawn={"module": module, "growth": round(total, 1), "steps": steps},
            module=module,
            total=total,
            steps=steps,
        )

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if self.active(step) and self.done < self.steps:
            self.done += 1
            t.model.get_submodule(self.module).weight.mul_(self.rate)


class LossReducedWrongly(Lasting):
    """The loss is divided by another number than it was: micro-batches in place of tokens (the gradient accumulation bug of
    2024), ranks twice, or not at all. Plot and gradient are off by one factor."""

    name = "loss-reduced-wrongly"
    factors: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (1.2, 2.0),
        "medium": (2.0, 16.0),
        "severe": (16.0, 2000.0),
    }

    def __init__(self, *, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LossReducedWrongly | None:
        step, factor = onset(rng, training), log_uniform(rng, *cls.factors[severity])
        factor = factor if rng.random() < 0.7 else 1 / factor
        return cls(
            step=step,
            until=until(rng, step, 5, 40, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch"), None, None, False),
            drawn={"factor": float(f"{factor:.3g}")},
            factor=factor,
        )

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        return loss * self.factor if self.active(step) else loss
