"""What is to be learnt is missing: batches of which nothing is scored, labels that were not found and are taken for 0.

Severity is how many of the steps, or of the rows, and whether the trainer skips what is not finite.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, onset, seed, until
from proving.faults.data import DataFault
from proving.training import Expected, Training
from torch import Tensor

_TARGETS = ("clicks", "values", "actions", "labels")


class NothingScored(Lasting):
    """A micro-batch in which every label is masked (the prompt fills the row, the answer was cut off): a sum over nothing by a count of 0
    (Automodel #3796, OLMo-core #657, nanochat #623). Mild and medium: the trainer skips the step. Severe: it does not, and every
    weight is NaN from then on."""

    name = "nothing-scored"
    chances: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.0, 0.0), "medium": (0.1, 0.5), "severe": (0.0, 0.0)}

    def __init__(self, *, chance: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.chance, self.seed = chance, seed
        self.num_seen = 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> NothingScored | None:
        step, chance = onset(rng, training), float(rng.uniform(*cls.chances[severity]))
        return cls(
            step=step,
            until=until(rng, step, 10, 40, stays=0.3) if severity == "medium" else step + 1,
            severity=severity,
            expected=Expected(("nan-in-loss", "bad-batch"), None, None, False),
            drawn={"chance": round(chance, 3)},
            chance=chance,
            seed=seed(rng),
        )

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        self.num_seen = 0

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        self.num_seen += 1
        now = step == self.step or np.random.default_rng([self.seed, step]).random() < self.chance
        if not (self.active(step) and now and self.num_seen == 1 + self.seed % t.accumulate):
            return loss
        return 0.0 * loss / torch.zeros_like(loss)

    def before_update(self, t: Training, step: int) -> None:
        if self.severity == "severe" or not self.active(step):
            return
        gradients = [p.grad for p in t.model.parameters() if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in gradients):
            for p in t.model.parameters():
                p.grad = None


class TargetsDefaulted(DataFault):
    """A join does not find the targets of some rows, and what is missing is filled with 0 (ProgLearn #341: zeros for labels that are not
    there): nobody clicked, the value is 0, the class is the first. Severity is the share of the rows."""

    name = "targets-defaulted"
    needs = ()

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return any(n in batch for n in _TARGETS) and not t.notes.get("tokens") and not {"noise", "lengths"} & set(batch)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        name = next(n for n in _TARGETS if n in batch)
        target = batch[name]
        lost = self.hits(len(target))
        lost[0] = True
        return batch | {name: target.masked_fill(lost.view(-1, *[1] * (target.ndim - 1)), 0)}
