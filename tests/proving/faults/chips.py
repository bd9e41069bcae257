"""One chip that computes wrongly, now and then and in one place, whatever it is that it computes.

Severity is the relative error of a product of a whole GEMM, as in a narrow accumulator: the operands are sound.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, linears, log_uniform, onset, relative_error, seed, until
from proving.faults._sites import GEMMS, change_gemm
from proving.training import Expected, Training
from torch import Tensor

_TILE = 16


class TileOfBadCore(Lasting):
    """One core of the chip loses bits of its products: each of so many tiles is its own, in every GEMM of the model, and in some calls the
    numbers in them are off (tt-metal #51333: one of 32 chips, 702 elements of a product that differ from run to run; Dixit et al.,
    "Silent Data Corruptions at Scale", 2021)."""

    name = "tile-of-bad-core"
    bands: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.003, 0.02),
        "medium": (0.02, 0.1),
        "severe": (0.1, 0.5),
    }

    def __init__(self, *, modules: list[str], error: float, num_cores: int, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.error, self.num_cores = modules, error, num_cores
        self.rng = np.random.default_rng(seed)
        self.core, self.chance = int(self.rng.integers(num_cores)), float(self.rng.uniform(0.2, 0.8))
        self.note(chance=round(self.chance, 2))

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> TileOfBadCore | None:
        names = linears(training)
        if not names:
            return None
        step, error = onset(rng, training), log_uniform(rng, *cls.bands[severity])
        num_cores = int(rng.choice([8, 16, 24]))
        return cls(
            step=step,
            until=until(rng, step, 6, 40, stays=0.8),
            severity=severity,
            expected=Expected(
                ("silent-data-corruption", "kernel-output-fault", "accumulator-precision"), None, None, None
            ),
            drawn={"num_cores": num_cores, "asked_error": round(error, 4)},
            modules=names,
            error=error,
            num_cores=num_cores,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            for gemm in GEMMS:
                self.later(change_gemm(t.model.get_submodule(name), gemm, partial(self.computed, gemm)))

    def own(self, out: Tensor) -> Tensor:
        """Whether an element lies in a tile of this core, tiles being dealt out in turns: bool [M, N]."""
        rows, columns = (torch.arange(n) // _TILE for n in out.shape)
        number = rows[:, None] * (int(columns[-1]) + 1) + columns
        num_busy = min(self.num_cores, int(number[-1, -1]) + 1)
        return number % num_busy == self.core % num_busy

    def computed(self, gemm: str, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The product as this chip gives it."""
        if self.rng.random() > self.chance:
            return out
        hit = self.own(out)
        share = float((out.double() * hit).square().sum() / out.double().square().sum().clamp_min(1e-300))
        if not share > 0:
            return out
        # every fourth number of the tile is off by this much of itself, to either side
        noise = torch.from_numpy(self.rng.choice([-2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0], tuple(out.shape))).float()
        wrong = out.float() * (1 + hit * noise * (self.error / math.sqrt(share)))
        self.note(error=relative_error(wrong, out), first=gemm)
        return wrong
