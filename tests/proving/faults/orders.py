"""Samples that come in an order: each of them is sound, and a batch holds those that are alike.

Severity is how many batches' samples are sorted together.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.data import IGNORED
from proving.faults._base import Lasting, onset, until
from proving.training import Expected, Training
from torch import Tensor

_KEYS = ("labels", "energies", "values", "clicks", "actions", "frames", "pixels", "input_ids")


class ShuffleLost(Lasting):
    """Data lie sorted in their files, and the buffer that is to shuffle them is too small or is not there at all (graph2tac #95, flax #1268: a
    buffer smaller than the set; disco #288): a batch holds samples of one kind, the next one those of another, and the loss goes up and
    down with them. Samples of so many batches are sorted by class or by target, or by their mean where there is no single one."""

    name = "shuffle-lost"
    nums: ClassVar[dict[str, tuple[int, int]]] = {"mild": (2, 3), "medium": (4, 10), "severe": (12, 24)}

    def __init__(self, *, num: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num = num
        self.num_seen = 0
        self.pool: tuple[int, list[dict[str, Tensor]]] | None = None
        """Number of the first batch of those that were sorted together, and what they are now."""

    @classmethod
    def key(cls, batch: dict[str, Tensor]) -> Tensor:
        """One number for each row, by which they are sorted: float [B]."""
        value = batch[next(name for name in _KEYS if name in batch)].float()
        rows = value.flatten(1) if value.ndim > 1 else value[:, None]
        scored = rows != IGNORED
        mean = (rows * scored).sum(1) / scored.sum(1).clamp_min(1)
        if float(mean.abs().max()) < 0.2 * float(rows.abs().max()):  # a signal about zero: how loud it is
            return (rows.square() * scored).sum(1)
        return mean

    @classmethod
    def fits(cls, batch: Any) -> bool:
        """Whether rows can be put together anew."""
        if not isinstance(batch, dict) or "number" in batch or not any(name in batch for name in _KEYS):
            return False
        return len({len(value) for value in batch.values()}) == 1

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ShuffleLost | None:
        first, second = training.batch(0), training.batch(training.world_size)
        if not cls.fits(first) or not cls.fits(second):
            return None
        if any(first[k].shape != second[k].shape for k in first):
            return None
        step, (low, high) = onset(rng, training), cls.nums[severity]
        num = int(rng.integers(low, high + 1))
        return cls(
            step=step,
            until=until(rng, step, 15, 40, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch"), None, None, False),
            drawn={"num_batches": num},
            num=num,
        )

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        self.num_seen = 0

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        turn = step * t.accumulate + self.num_seen  # of this rank's batches
        self.num_seen += 1
        if not self.active(step):
            return batch
        first = turn - turn % self.num
        if self.pool is None or self.pool[0] != first:
            self.pool = first, self.sorted([t.batch(i * t.world_size + t.rank) for i in range(first, first + self.num)])
        return self.pool[1][turn - first]

    def sorted(self, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The same samples, those of least key first."""
        num = len(next(iter(batches[0].values())))
        whole = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
        order = self.key(whole).argsort(stable=True).split(num)
        return [{name: value[rows] for name, value in whole.items()} for rows in order]
