"""Scales that the quantiser itself computes wrongly, in every step and on many tiles.

Unlike scales that go astray on their way, these are the ones that the statistics see: amax·scale/FP8_MAX says it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import Lasting, linears, one_of, onset
from proving.faults._sites import OtherScale, put_kernel
from proving.training import Expected, Training
from torch import Tensor


class ScalesRoundedUp(Lasting):
    """Scales are rounded to powers of two the wrong way, up, so that the largest values of a tile are clipped. Severity is
    whose scales, and by how many octaves."""

    name = "scales-rounded-up"

    def __init__(self, *, operands: list[str], octaves: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.operands, self.octaves = operands, octaves

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ScalesRoundedUp | None:
        names = linears(training)
        if training.recipe not in (None, "blockwise") or not names:
            return None
        operands = {
            "mild": ["weight"],
            "medium": [one_of(rng, ("input", "grad_output"))],
            "severe": ["input", "grad_output"],
        }
        octaves = {"mild": 1, "medium": int(rng.integers(1, 3)), "severe": int(rng.integers(2, 4))}[severity]
        return cls(
            step=onset(rng, training) if rng.random() < 0.5 else 0,
            severity=severity,
            expected=Expected(("scale-rounding", "quantiser-fault", "stale-weight-scale"), tuple(names), None, True),
            drawn={"operands": "+".join(operands[severity]), "octaves": octaves},
            operands=operands[severity],
            octaves=octaves,
        )

    def begin(self, t: Training) -> None:
        def up(scale: Tensor, job: Any) -> Tensor:
            return scale * 2.0**self.octaves

        for name in linears(t):
            for operand in self.operands:
                self.later(put_kernel(t.model.get_submodule(name), operand, lambda base: OtherScale(base, up)))


class ScalesRoundedToNearest(Lasting):
    """Scales are rounded to the nearest power of two: up for every tile whose amax is a little above one, so that the
    largest values of those are clipped by up to √2. Severity is whose scales."""

    name = "scales-rounded-to-nearest"

    def __init__(self, *, operands: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.operands = operands

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ScalesRoundedToNearest | None:
        names = linears(training)
        if training.recipe not in (None, "blockwise") or severity == "severe" or not names:
            return None
        operands = [one_of(rng, ("input", "weight"))] if severity == "mild" else ["input", "weight", "grad_output"]
        return cls(
            step=onset(rng, training) if rng.random() < 0.5 else 0,
            severity=severity,
            expected=Expected(("scale-rounding", "quantiser-fault", "stale-weight-scale"), tuple(names), None, True),
            drawn={"operands": "+".join(operands)},
            operands=operands,
        )

    def begin(self, t: Training) -> None:
        def nearest(scale: Tensor, job: Any) -> Tensor:
            return torch.exp2(scale.log2().round())

        def make(base: Any) -> OtherScale:
            return OtherScale(base, nearest, unrounded=True)

        for name in linears(t):
            for operand in self.operands:
                self.later(put_kernel(t.model.get_submodule(name), operand, make))
