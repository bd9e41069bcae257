"""Gradients of tokens that fade, as those of tokens do that the model has learned, or that a schedule weighs less and less."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import linears, one_of
from proving.training import Training
from proving.trends._base import Trend
from proving.trends.activations import LIMIT, SHORT, faded, fading
from torch import Tensor, nn


class TokensFade(Trend):
    """The gradient of some rows of one Linear's output fades, row by row: across tokens the others keep the scale up."""

    name = "tokens-fade"

    def __init__(self, *, module: str, share: float, beyond: float, seed: int, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.module, self.share, self.beyond, self.seed = module, share, beyond, seed
        self.now = 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> TokensFade | None:
        names = linears(training)
        if not names:
            return None
        module, times = one_of(rng, names), cls.times(rng)
        bends = severity == "levels-off"
        share = float(rng.uniform(*SHORT)) if bends else LIMIT
        return cls(
            **times, module=module, share=share, beyond=1.0 if bends else 1.25, seed=int(rng.integers(1 << 31)),
            drawn={"module": module, "share": round(share, 3)},
        )  # fmt: skip

    def before_attach(self, t: Training) -> None:
        super().before_attach(t)

        def fade(gradient: Tensor) -> Tensor:
            rows = gradient.numel() // gradient.shape[-1]
            at, lost = fading(rows, self.share, self.beyond, np.random.default_rng(self.seed))
            gain = torch.ones(rows, dtype=gradient.dtype)
            gain[at] = faded(lost, self.now).to(gradient.dtype)
            return gradient * gain.view(*gradient.shape[:-1], 1)

        def hook(m: nn.Module, args: Any, out: Tensor) -> None:
            if m.training and self.now > 0 and out.requires_grad:
                out.register_hook(fade)

        self.later(t.model.get_submodule(self.module).register_forward_hook(hook).remove)

    def before_step(self, t: Training, step: int) -> None:
        self.now = self.done(step)
