"""Gradients that have the wrong size when they reach the optimizer.

Adam does not ask for the size of a gradient, and clipping hides what is too large: the loss may not move while every
weight decays or stands still. Severity is the factor.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, linears, log_uniform, one_of, onset, role, some_of, trained, until
from proving.training import Expected, Training
from torch import Tensor


class GradientsAccumulateTwice(Lasting):
    """wgrad adds to a buffer that already holds it: ×2 in each micro-batch, so 2^N in a step (Megatron-LM #6660; ms-swift
    #6836: very high gradient norms that nobody can explain). In all Linears, or in those of a few modules."""

    name = "gradients-accumulate-twice"
    doublings: ClassVar[dict[str, tuple[int, int]]] = {"mild": (1, 2), "medium": (2, 5), "severe": (5, 12)}

    def __init__(self, *, modules: list[str], times: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.times = modules, times

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientsAccumulateTwice | None:
        names = trained(training, linears(training) or role(training, "linears"))
        if not names:
            return None
        modules = names if rng.random() < 0.6 else some_of(rng, names, 1, 4)
        times, step = 2.0 ** int(rng.integers(*cls.doublings[severity])), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 5, 40, stays=0.7),
            severity=severity,
            expected=Expected(("scalar-shift", "kernel-output-fault", "optimizer-divergence"), None, None, None),
            drawn={"times": times, "num_modules": len(modules), "module": modules[0]},
            modules=modules,
            times=times,
        )

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        if self.active(step):
            for name in self.modules:
                gradient = t.model.get_submodule(name).weight.grad
                if gradient is not None:
                    gradient.mul_(self.times)


class LossScaledDown(Lasting):
    """The loss that is differentiated is a tiny multiple of the one that is plotted (1e-9: divided twice by tokens, world
    size or scale). The gradient norm falls by as many orders, and where the optimizer's eps is larger, training stops."""

    name = "loss-scaled-down"
    factors: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (1e-4, 1e-2),
        "medium": (1e-7, 1e-4),
        "severe": (1e-12, 1e-7),
    }

    def __init__(self, *, factor: float, plotted: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor, self.plotted = factor, plotted

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LossScaledDown | None:
        factor, step = log_uniform(rng, *cls.factors[severity]), onset(rng, training)
        plotted = bool(rng.random() < 0.3)
        return cls(
            step=step,
            until=until(rng, step, 5, 40, stays=0.7),
            severity=severity,
            expected=Expected(("scalar-shift", "gradient-underflow", "dead-layer"), None, None, False),
            drawn={"factor": float(f"{factor:.2g}"), "plotted": plotted},
            factor=factor,
            plotted=plotted,
        )

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        if not self.active(step):
            return loss
        return loss * self.factor if self.plotted else loss.detach() + (loss - loss.detach()) * self.factor


class GradientScalerOverflows(Lasting):
    """Under mixed FP16 the gradients overflow step after step: the GradScaler halves its scale and skips, and goes on
    halving. Severity is how often."""

    name = "gradient-scaler-overflows"
    times: ClassVar[dict[str, tuple[int, int]]] = {"mild": (3, 5), "medium": (5, 9), "severe": (9, 16)}

    def __init__(self, *, num: int, module: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num, self.module = num, module

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientScalerOverflows | None:
        names = trained(training, linears(training) or role(training, "linears"))
        if training.scaler is None or not names:
            return None
        step, num, module = onset(rng, training), int(rng.integers(*cls.times[severity])), one_of(rng, names)
        return cls(
            step=step,
            until=step + num,
            severity=severity,
            expected=Expected(("scale-collapse", "nan-in-activation"), None, None, None),
            drawn={"num_steps": num},
            num=num,
            module=module,
        )

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        """Steep enough for FP16 at whatever the scale is now: the value stays."""
        if not self.active(step):
            return loss
        assert t.scaler is not None
        steep = 2.0 ** math.ceil(math.log2(1e9 / max(t.scaler.get_scale(), 1e-30)))
        return loss + (steep - 1) * (loss - loss.detach())
