"""Activations that drift out of what their format holds: at its lower end by channels, at its upper end as a whole."""

from __future__ import annotations

import numpy as np
import torch
from proving.faults._base import change_input, linears, one_of
from proving.faults._sites import quantizers
from proving.training import Training
from proving.trends._base import Trend
from torch import Tensor

import fp8watch

UNDERFLOWS_AT = 17.0
"""Octaves below its neighbours at which most of a channel is flushed to zero in E4M3."""
LIMIT = 0.1
SHORT = (0.02, 0.07)


def fading(channels: int, limit: float, beyond: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Channels that fade one after the other, [k] int64, and at which share of the way each is lost, [k]: evenly, so
    that at 1 the share that is lost is `limit`; with `beyond` > 1 it goes on to that multiple of it."""
    num = max(1, round(channels * limit * beyond))
    lost = torch.linspace(0.15, beyond, num)  # nothing is lost at once: the first ones have to fall as well
    return torch.from_numpy(rng.permutation(channels)[:num].copy()), lost


def faded(lost: Tensor, done: float) -> Tensor:
    """Gain of each fading channel, [k]: it falls by as many octaves a step until long after it is lost."""
    return torch.exp2(-UNDERFLOWS_AT * (done / lost).clamp(max=1.4))


class ChannelsFade(Trend):
    """The gains of a norm fall channel by channel, as those of dying features do: the others keep the scale up."""

    name = "channels-fade"

    def __init__(self, *, module: str, share: float, beyond: float, seed: int, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.module, self.share, self.beyond, self.seed = module, share, beyond, seed

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ChannelsFade | None:
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
        module, gain = t.model.get_submodule(self.module), [torch.ones(())]
        at, lost = fading(int(module.in_features), self.share, self.beyond, np.random.default_rng(self.seed))  # type: ignore[arg-type]

        def update(step: int) -> None:
            made = torch.ones(int(module.in_features))  # type: ignore[arg-type]
            made[at] = faded(lost, self.done(step))
            gain[0] = made

        self.update = update
        self.later(change_input(module, lambda x: x * gain[0].to(x.dtype)))

    def before_step(self, t: Training, step: int) -> None:
        if step >= self.step:
            self.update(step)


class SaturationNears(Trend):
    """Under delayed scaling with a margin the amax history has met an Inf, so that the scale stays for 1024 passes, and
    the activation grows towards the largest number that this scale can carry."""

    name = "saturation-nears"
    margins = (2, 4)

    def __init__(self, *, module: str, margin: int, goal: float, bends: bool, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.module, self.margin, self.goal, self.bends = module, margin, goal, bends
        self.gain, self.largest, self.reference = 1.0, 0.0, 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> SaturationNears | None:
        if training.recipe not in (None, "delayed") or not linears(training):
            return None
        module, times = one_of(rng, linears(training)), cls.times(rng)
        bends, margin = severity == "levels-off", int(rng.integers(cls.margins[0], cls.margins[1] + 1))
        goal = float(rng.uniform(0.3, 0.6)) if bends else 1.0
        return cls(
            **times, module=module, margin=margin, goal=goal, bends=bends,
            drawn={"module": module, "margin": margin, "goal": round(goal, 2)},
        )  # fmt: skip

    def before_attach(self, t: Training) -> None:
        super().before_attach(t)
        t.recipe = fp8watch.delayed(margin=self.margin)  # type: ignore[assignment]

        def grow(x: Tensor) -> Tensor:
            x = x * self.gain
            self.largest = float(x.detach().abs().max())
            return x

        self.later(change_input(t.model.get_submodule(self.module), grow))

    def before_step(self, t: Training, step: int) -> None:
        if step == self.step:
            (quantizer,) = quantizers(t.model.get_submodule(self.module), "input")
            history = quantizer.state.amax_history  # type: ignore[attr-defined]
            finite = history[torch.isfinite(history)]
            self.reference = float(finite.max()) * 2.0**self.margin
            history[-1] = float("inf")  # of the pass before; the last to leave the history
            self.first = max(self.largest / self.reference, 2.0**-self.margin * 0.25)
        if step >= self.step:
            done = min(self.done(step), 1.0) if self.bends else self.done(step)
            self.gain = 1.0 + (self.goal / self.first - 1.0) * done
