"""Weights that are replaced by what belongs elsewhere: averages that stay after an evaluation, and masters that are put together from two
halves in the wrong way.

Severity is how far back the average reaches, and how much larger a weight becomes in one step.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, log_uniform, onset, seed
from proving.training import Expected, Training
from torch import Tensor


class AverageLeftInPlace(Lasting):
    """An evaluation puts the exponential average of the weights in the place of the weights and forgets to put them back
    (Open-Sora-Plan #186, waifu-diffusion #31), each time. Moments stay those of the weights that were. Severity is how many steps
    the average reaches back."""

    name = "average-left-in-place"
    reaches: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (10.0, 20.0),
        "medium": (20.0, 40.0),
        "severe": (40.0, 120.0),
    }

    def __init__(self, *, reach: float, every: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reach, self.every = reach, every
        self.average: list[Tensor] = []

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> AverageLeftInPlace | None:
        if training.world_size > 1:
            return None
        reach, every, step = log_uniform(rng, *cls.reaches[severity]), int(rng.integers(8, 25)), onset(rng, training)
        return cls(
            step=step,
            severity=severity,
            expected=Expected(("silent-data-corruption", "scalar-shift", "optimizer-divergence"), None, None, False),
            drawn={"reach": round(reach, 1), "every": every},
            reach=reach,
            every=every,
        )

    @torch.no_grad()
    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        weights = [p for p in t.model.parameters() if p.requires_grad]
        if not self.average:
            self.average = [p.detach().clone() for p in weights]
        for average, p in zip(self.average, weights, strict=True):
            average.lerp_(p, 1 / self.reach)
        if self.active(step) and (step - self.step) % self.every == 0:
            for average, p in zip(self.average, weights, strict=True):
                p.copy_(average)


class RemaindersMisread(Lasting):
    """A master weight is put together from its BF16 half and the 16 bits that remain, and the borrow of a negative remainder is left out:
    such weights grow by a step of BF16 (apex #1842), again and again. Severity is how much the weights grow in one step."""

    name = "remainders-misread"
    growths: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (2e-4, 1e-3),
        "medium": (1e-3, 4e-3),
        "severe": (4e-3, 3e-2),
    }

    def __init__(self, *, growth: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.growth = growth
        self.random = torch.Generator().manual_seed(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RemaindersMisread | None:
        growth, step = log_uniform(rng, *cls.growths[severity]), onset(rng, training)
        if training.world_size > 1:
            return None
        return cls(
            step=step,
            severity=severity,
            expected=Expected(("silent-data-corruption", "optimizer-divergence"), None, None, False),
            drawn={"growth": float(f"{growth:.3g}")},
            growth=growth,
            seed=seed(rng),
        )

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if not self.active(step):
            return
        share = (
            self.growth * 2.0**7 / 0.72
        )  # a step of BF16 is 2^-7 of the power of two below a number, 0.72 of it on average
        times = max(1, int(np.ceil(share)))  # one of the low bits of what is left may be misread with it
        for p in t.model.parameters():
            if p.ndim >= 2 and p.requires_grad:
                weight = p.detach().float()
                ulp = torch.ldexp(torch.ones_like(weight), torch.frexp(weight)[1] - 8)
                hit = torch.rand(p.shape, generator=self.random) < share / times
                p.add_(torch.where(hit, times * ulp * p.sign(), 0.0).to(p.dtype))
