"""Weights that fade: columns that get no gradient any more, and decay."""

from __future__ import annotations

import numpy as np
import torch
from proving.faults._base import linears, one_of, trained
from proving.training import Training
from proving.trends._base import Trend
from proving.trends.activations import LIMIT, SHORT, faded, fading


class ColumnsFade(Trend):
    """Columns of one weight are frozen and decay, one faster than the other, as gradual pruning leaves them."""

    name = "columns-fade"

    def __init__(self, *, module: str, share: float, beyond: float, seed: int, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.module, self.share, self.beyond = module, share, beyond
        self.rng, self.kept = np.random.default_rng(seed), torch.empty(0)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ColumnsFade | None:
        names = trained(training, linears(training))
        if not names:
            return None
        module, times = one_of(rng, names), cls.times(rng)
        bends = severity == "levels-off"
        share = float(rng.uniform(*SHORT)) if bends else LIMIT
        return cls(
            **times, module=module, share=share, beyond=1.0 if bends else 1.25, seed=int(rng.integers(1 << 31)),
            drawn={"module": module, "share": round(share, 3)},
        )  # fmt: skip

    @torch.no_grad()
    def before_step(self, t: Training, step: int) -> None:
        if step < self.step:
            return
        weight = t.model.get_submodule(self.module).weight
        if step == self.step:
            self.at, self.lost = fading(weight.shape[1], self.share, self.beyond, self.rng)
            self.kept = weight[:, self.at].clone()
        weight[:, self.at] = self.kept * faded(self.lost, self.done(step)).to(weight.dtype)
