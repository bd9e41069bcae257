"""Things that belong together and do not meet: samples whose axes were taken for each other, a teacher that speaks of another position.

Severity is the share of the rows.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from proving.faults.data import DataFault
from proving.training import Training
from torch import Tensor

_INPUTS = ("input_ids", "frames", "pixels", "places", "chosen")


class AxesReshaped(DataFault):
    """A batch lies in memory with time in front and is brought into rows by `reshape` where it had to be transposed (lola #12, CARLA #16): the
    numbers are all there, and each row is put together from those of several samples. What has the same two axes goes with it; what
    belongs to a whole row stays where it was."""

    name = "axes-reshaped"
    needs = ()

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        name = next((n for n in _INPUTS if n in batch), None)
        return name is not None and batch[name].ndim >= 2 and "noise" not in batch and min(batch[name].shape[:2]) > 2

    @staticmethod
    def reshaped(x: Tensor) -> Tensor:
        """[B, T, …] as it comes from [T, B, …] by `reshape`."""
        return x.transpose(0, 1).contiguous().view(x.shape)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        name = next(n for n in _INPUTS if n in batch)
        axes, rows = batch[name].shape[:2], self.hits(len(batch[name]))
        rows[0] = True
        for key, x in batch.items():
            if x.shape[:2] == axes:
                hit = rows.view(-1, *[1] * (x.ndim - 1))
                batch[key] = torch.where(hit, self.reshaped(x), x)
        return batch


class TeacherOffByOne(DataFault):
    """What the teacher says of a position is held against what the student says of the next one, or of the one before: one of the two was
    shifted already (fmchisel #23, AReaL #1729). The bytes themselves are where they belong."""

    name = "teacher-off-by-one"
    needs = ("input_ids",)
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.3, 0.6), "medium": (0.6, 0.9), "severe": (0.9, 1.0)}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by = int(self.rng.choice([-1, 1]))
        self.note(by=self.by)

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return "distillation" in t.notes and super().fits(t, batch)

    def begin(self, t: Training) -> None:
        distillation: Any = t.notes["distillation"]
        taught = distillation.taught

        def shifted(tokens: Tensor) -> Tensor:
            right = taught(tokens)
            rows = self.hits(len(right))
            rows[0] = True
            return torch.where(rows[:, None, None], right.roll(self.by, 1), right)

        distillation.taught = shifted
        self.later(lambda: distillation.__dict__.pop("taught"))

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        return batch
