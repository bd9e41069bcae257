"""NaN and Inf that are born outside of a GEMM: in the loss, a norm, an activation, a backward.

All are severe: what is not finite has no size. They differ in where it is born and in how long it lasts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import (
    Lasting,
    change_input,
    change_output,
    linears,
    log_uniform,
    one_of,
    onset,
    role,
    seed,
    until,
)
from proving.training import Expected, Training
from torch import Tensor


class LogOfZero(Lasting):
    """A term of the loss is log 0 · 0: a probability that underflowed, an entropy without its clamp. Every operand of the
    forward pass is finite."""

    name = "log-of-zero"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LogOfZero | None:
        step = onset(rng, training)
        if severity != "severe":
            return None
        ends = until(rng, step, 1, 3)
        return cls(step=step, until=ends, severity=severity, expected=Expected(("nan-in-loss",), None, None, False))

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        if not self.active(step):
            return loss
        p = (loss - loss.detach()).clamp(0, 0)
        return loss + p * torch.log(p)


class NormWithoutEps(Lasting):
    """A norm has no eps, and a row that it reads is all zero (a padded token): 0/0."""

    name = "norm-without-eps"

    def __init__(self, *, module: str, num_rows: int, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.num_rows = module, num_rows
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> NormWithoutEps | None:
        names = [n for n in role(training, "norm") if _eps_name(training.model.get_submodule(n))]
        if severity != "severe" or not names:
            return None
        module, step, num_rows = one_of(rng, names), onset(rng, training), round(log_uniform(rng, 1, 32))
        return cls(
            step=step,
            until=until(rng, step, 1, 5),
            severity=severity,
            expected=Expected(("nan-in-activation",), None, None, False),
            drawn={"module": module, "num_rows": num_rows},
            module=module,
            num_rows=num_rows,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        norm = t.model.get_submodule(self.module)
        name = _eps_name(norm)
        assert name is not None
        eps = getattr(norm, name)
        setattr(norm, name, 0.0)
        self.later(lambda: setattr(norm, name, eps))

        def zero(x: Tensor) -> Tensor:
            rows = x.numel() // x.shape[-1]
            keep = torch.ones(rows, dtype=x.dtype)
            keep[torch.from_numpy(self.rng.choice(rows, size=min(self.num_rows, rows), replace=False))] = 0
            return x * keep.view(*x.shape[:-1], 1)

        self.later(change_input(norm, zero))


def _eps_name(norm: torch.nn.Module) -> str | None:
    return next((n for n in ("eps", "variance_epsilon") if isinstance(getattr(norm, n, None), float)), None)


class ActivationInf(Lasting):
    """An activation overflows to Inf on its way into a Linear (the product of a SwiGLU in FP16). Under blockwise scaling
    it becomes 448 and its neighbours vanish; the loss stays finite."""

    name = "activation-inf"

    def __init__(self, *, module: str, num: int, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.num = module, num
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ActivationInf | None:
        names = linears(training)
        if not names:
            return None
        # under blockwise scaling the harm grows with the number of tiles; elsewhere one Inf is as bad as many
        num = round(log_uniform(rng, *{"mild": (1, 3), "medium": (3, 24), "severe": (24, 256)}[severity]))
        module, step = one_of(rng, names), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 1, 10, stays=0.2),
            severity=severity,
            expected=Expected(("inf-laundering", "nan-in-activation"), (module,), "input", None),
            drawn={"module": module, "num": num},
            module=module,
            num=num,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        def overflow(x: Tensor) -> Tensor:
            hit = torch.zeros(x.numel(), dtype=torch.bool)
            hit[torch.from_numpy(self.rng.integers(x.numel(), size=self.num))] = True
            return x.masked_fill(hit.view_as(x), float("inf") if self.rng.random() < 0.5 else -float("inf"))

        self.later(change_input(t.model.get_submodule(self.module), overflow))


class BackwardNan(Lasting):
    """A NaN is born in a backward between the GEMMs (Automodel #2722: rotary positions), where the forward is finite."""

    name = "backward-nan"

    def __init__(self, *, module: str, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module = module
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> BackwardNan | None:
        names = linears(training) or role(training, "linears")
        if severity != "severe" or not names:
            return None
        module, step = one_of(rng, names), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 1, 3),
            severity=severity,
            expected=Expected(("nan-in-activation",), (module,), "grad_output", False),
            drawn={"module": module},
            module=module,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        def born(gradient: Tensor) -> Tensor:
            wrong = gradient.clone(memory_format=torch.contiguous_format)
            wrong.view(-1)[int(self.rng.integers(wrong.numel()))] = torch.nan
            return wrong

        def watch(y: Tensor) -> Tensor:
            if y.requires_grad:
                y.register_hook(born)
            return y

        self.later(change_output(t.model.get_submodule(self.module), watch))
