"""Silent data corruption: a bit that flips in a weight, a moment, a gradient or an activation, a page that is lost.

Severity is what the flip does: how many times the value stands above the largest of its tensor, or how much of the tensor
is gone.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    Lasting,
    change_input,
    has_adam,
    linears,
    log_uniform,
    one_of,
    onset,
    role,
    seed,
    trained,
    with_gradient,
)
from proving.training import Expected, Training
from torch import Tensor

_SIZES: dict[str, tuple[float, float]] = {"mild": (1.5, 6.0), "medium": (6.0, 60.0), "severe": (1e20, 1e37)}
"""Times the amax. A flip of one of the low bits of the exponent makes a number 2 to 2^8 times as large, of the highest
2^128 times; what lies between cannot happen."""
_CORRUPT = ("silent-data-corruption",)


def flip_bit(x: Tensor, times: float, rng: np.random.Generator) -> tuple[int, float, float]:
    """Flip one bit of the exponent of one element of a float32 tensor, in place.

    Of some random elements the one is taken that comes nearest to `times` the tensor's amax.

    Returns:
        Index of the element, its value before, its value after.
    """
    flat = x.view(-1)
    wanted = math.log2(times * max(float(flat.abs().max()), 1e-30))
    tried = torch.from_numpy(rng.integers(flat.numel(), size=min(512, flat.numel())))
    flips = torch.tensor([1 << bit for bit in range(23, 31)], dtype=torch.int32)
    after = (flat[tried].view(torch.int32)[:, None] ^ flips).view(torch.float32)
    off = (after.abs().double().log2() - wanted).abs().nan_to_num(math.inf, posinf=math.inf)
    best = int(off.argmin())
    index, value = int(tried[best // len(flips)]), float(after.view(-1)[best])
    before = float(flat[index])
    flat[index] = value
    return index, before, value


def _weights(t: Training) -> list[str]:
    return trained(t, linears(t) or role(t, "linears"))


class WeightBitFlips(Lasting):
    """One bit of the exponent of one weight flips."""

    name = "weight-bit-flips"

    def __init__(self, *, module: str, times: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.times = module, times
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> WeightBitFlips | None:
        names = _weights(training)
        if not names:
            return None
        module, times = one_of(rng, names), log_uniform(rng, *_SIZES[severity])
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected((*_CORRUPT, "outlier-growth"), (module,), "weight", False),
            drawn={"module": module, "times_amax": float(f"{times:.3g}")},
            module=module,
            times=times,
            seed=seed(rng),
        )

    @torch.no_grad()
    def begin(self, t: Training) -> None:
        weight = t.model.get_submodule(self.module).weight
        index, before, after = flip_bit(weight.data, self.times, self.rng)
        self.note(index=index, before=before, after=after)
        self.later(lambda: weight.data.view(-1).__setitem__(index, before))


class MomentBitFlips(Lasting):
    """One bit flips in Adam's first moment, or in SGD's momentum: the next steps carry one weight far away."""

    name = "moment-bit-flips"

    def __init__(self, *, module: str, times: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.times = module, times
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> MomentBitFlips | None:
        names = _weights(training)
        if not names or not (has_adam(training) or isinstance(training.optimizer, torch.optim.SGD)):
            return None
        module, times = one_of(rng, names), log_uniform(rng, *_SIZES[severity])
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected((*_CORRUPT, "outlier-growth", "optimizer-divergence"), (module,), "weight", False),
            drawn={"module": module, "times_amax": float(f"{times:.3g}")},
            module=module,
            times=times,
            seed=seed(rng),
        )

    @torch.no_grad()
    def before_update(self, t: Training, step: int) -> None:
        if step != self.step:
            return
        state = t.optimizer.state[t.model.get_submodule(self.module).weight]
        moment = state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]
        _, before, after = flip_bit(moment, self.times, self.rng)
        self.note(before=before, after=after)


class GradientBitFlips(Lasting):
    """One bit of one gradient flips on its way through the all-reduce, for one step. Clipping turns that into a step that
    all other weights do not take."""

    name = "gradient-bit-flips"

    def __init__(self, *, module: str, times: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.times = module, times
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientBitFlips | None:
        names = _weights(training)
        if not names:
            return None
        module, times, step = one_of(rng, names), log_uniform(rng, *_SIZES[severity]), onset(rng, training)
        return cls(
            step=step,
            until=step + 1,
            severity=severity,
            expected=Expected((*_CORRUPT, "bad-batch", "scalar-shift", "outlier-growth"), (module,), None, False),
            drawn={"module": module, "times_amax": float(f"{times:.3g}")},
            module=module,
            times=times,
            seed=seed(rng),
        )

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        if step == self.step:
            gradient = t.model.get_submodule(self.module).weight.grad
            if gradient is not None and gradient.dtype == torch.float32:
                _, before, after = flip_bit(gradient, self.times, self.rng)
                self.note(before=before, after=after)


class ActivationBitFlips(Lasting):
    """One bit of one activation flips in one step: a bad core, a bad cell of memory."""

    name = "activation-bit-flips"

    def __init__(self, *, module: str, times: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.times = module, times
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ActivationBitFlips | None:
        names = linears(training) or role(training, "linears")
        if not names:
            return None
        module, times, step = one_of(rng, names), log_uniform(rng, *_SIZES[severity]), onset(rng, training)
        return cls(
            step=step,
            until=step + 1,
            severity=severity,
            expected=Expected(
                (*_CORRUPT, "outlier-growth", "inf-laundering", "delayed-clip"), (module,), "input", False
            ),
            drawn={"module": module, "times_amax": float(f"{times:.3g}")},
            module=module,
            times=times,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        def flip(x: Tensor) -> Tensor:
            wrong = x.detach().float().contiguous().clone()
            flip_bit(wrong, self.times, self.rng)
            return with_gradient(x, wrong.to(x.dtype))

        self.later(change_input(t.model.get_submodule(self.module), flip))


class PageLost(Lasting):
    """A page of a weight is overwritten: zeros, or another tensor's bytes (a host buffer that was freed too early).
    Severity is the share of the rows."""

    name = "weight-page-lost"
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.01, 0.05),
        "medium": (0.05, 0.25),
        "severe": (0.25, 1.0),
    }

    def __init__(self, *, module: str, share: float, zeros: bool, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.share, self.zeros = module, share, zeros
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> PageLost | None:
        names = _weights(training)
        if not names:
            return None
        module, share, zeros = one_of(rng, names), log_uniform(rng, *cls.shares[severity]), bool(rng.random() < 0.5)
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected((*_CORRUPT, "outlier-growth", "dead-layer"), (module,), "weight", False),
            drawn={"module": module, "share": round(share, 3), "holds": "zeros" if zeros else "random bytes"},
            module=module,
            share=share,
            zeros=zeros,
            seed=seed(rng),
        )

    @torch.no_grad()
    def begin(self, t: Training) -> None:
        weight = t.model.get_submodule(self.module).weight
        old = weight.detach().clone()
        rows = max(1, round(self.share * weight.shape[0]))
        first = int(self.rng.integers(weight.shape[0] - rows + 1))
        if self.zeros:
            weight[first : first + rows] = 0
        else:  # BF16 numbers of a tensor of another scale
            noise = torch.from_numpy(self.rng.standard_normal((rows, weight.shape[1]))).to(weight.dtype)
            weight[first : first + rows] = noise * log_uniform(self.rng, 0.5, 20.0)
        self.later(lambda: weight.data.copy_(old))
