"""Faults of delayed scaling: the scale is that of earlier passes, and what outgrows it is clipped.

All of them run under recipe "delayed", which their training has or is given before attach; the healthy twin needs the
same recipe. Severity is the clip depth, amax·scale/FP8_MAX, or the octaves by which a scale moves.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, change_input, linears, log_uniform, one_of, onset, seed, until
from proving.faults._sites import quantizers
from proving.training import Expected, Training
from torch import Tensor

DEPTHS = {"mild": (2.0, 5.0), "medium": (5.0, 20.0), "severe": (20.0, 200.0)}
"""Clip depth: how many times the amax is above what the scale can carry."""


class DelayedFault(Lasting):
    """One Linear's input under delayed scaling."""

    needs_recipe = "delayed"
    prepares = True
    modes: ClassVar[tuple[str, ...]]
    sizes: ClassVar[dict[str, tuple[float, float]]] = DEPTHS
    lasts: ClassVar[tuple[int, int, float]] = (1, 12, 0.0)
    """Shortest and longest duration in steps, and how often it stays."""

    def __init__(self, *, module: str, size: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.size = module, size
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> DelayedFault | None:
        if training.recipe not in (None, "blockwise", "delayed") or not linears(training):
            return None
        module, step = one_of(rng, linears(training)), onset(rng, training)
        size = log_uniform(rng, *cls.sizes[severity])
        return cls(
            step=step,
            until=until(rng, step, *cls.lasts),
            severity=severity,
            expected=Expected(cls.modes, (module,), "input", True),
            drawn={"module": module, "times": round(size, 2)},
            module=module,
            size=size,
            seed=seed(rng),
        )

    def before_attach(self, t: Training) -> None:
        t.recipe = "delayed"


class DelayedOutlier(DelayedFault):
    """Some channels of an activation jump above everything in the amax history (torchao #1691: SwiGLU)."""

    name = "delayed-outlier"
    modes = ("delayed-clip", "outlier-growth")

    def begin(self, t: Training) -> None:
        num = round(log_uniform(self.rng, 1, 8))
        self.note(num_channels=num)

        def grow(x: Tensor) -> Tensor:
            largest = x.detach().abs().flatten(0, -2).amax(0)
            gain = torch.ones_like(largest)
            top = largest.topk(min(num, largest.numel())).indices
            gain[top] = self.size * largest.max() / largest[top].clamp_min(1e-12)
            return x * gain.to(x.dtype)

        self.later(change_input(t.model.get_submodule(self.module), grow))


class HistoryPoisoned(DelayedFault):
    """One NaN or Inf enters the amax history, so that the old scale stays until it has left it, 1024 passes later; and
    the activation grows meanwhile, as activations do."""

    name = "history-poisoned"
    modes = ("frozen-scale", "delayed-clip")
    lasts = (1, 1, 1.0)

    def begin(self, t: Training) -> None:
        (quantizer,) = quantizers(t.model.get_submodule(self.module), "input")
        poison = one_of(self.rng, (float("nan"), float("inf")))
        rate = log_uniform(self.rng, 1.05, 1.5)
        self.note(poison=str(poison), growth_a_step=round(rate, 3))
        state, gain = quantizer.state, [1.0]  # type: ignore[attr-defined]
        old = state.amax_history.clone()
        state.amax_history[-1] = poison  # of the pass before; the last to leave the history

        def grow(x: Tensor) -> Tensor:
            gain[0] = min(self.size, gain[0] * rate)
            return x * gain[0]

        self.later(lambda: state.amax_history.copy_(old))
        self.later(change_input(t.model.get_submodule(self.module), grow))


class AmaxOfShard(DelayedFault):
    """The amax is reduced over the wrong group (Megatron-LM #442: 40B diverged after about 1000 steps; torchtitan #3109):
    this rank's history never hears of the largest values, and the scale is made for smaller ones."""

    name = "amax-of-shard"
    modes = ("frozen-scale", "delayed-clip", "cross-rank-disagreement")
    lasts = (1, 1, 1.0)

    def begin(self, t: Training) -> None:
        (quantizer,) = quantizers(t.model.get_submodule(self.module), "input")
        state = quantizer.state  # type: ignore[attr-defined]
        record = state.record

        def of_shard(amax: Tensor, num_nan: Tensor | None = None) -> None:
            record(amax / self.size, num_nan)

        state.record = of_shard
        state.amax_history.div_(self.size)  # as if the group had been wrong from the start
        self.later(lambda: state.amax_history.mul_(self.size))
        self.later(lambda: state.__dict__.pop("record", None))


class ScaleFalls(DelayedFault):
    """An activation grows a little with every pass, and the delayed scale falls after it, octave by octave, always one
    pass late. Severity is how far it falls."""

    name = "scale-falls"
    modes = ("scale-collapse", "outlier-growth", "delayed-clip")
    sizes: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (2.0**3, 2.0**4),
        "medium": (2.0**4, 2.0**6),
        "severe": (2.0**6, 2.0**12),
    }
    lasts = (1, 1, 1.0)

    def begin(self, t: Training) -> None:
        rate, channel = log_uniform(self.rng, 1.1, 2.0), float(self.rng.random())
        self.note(growth_a_pass=round(rate, 3))
        gain = [1.0]

        def grow(x: Tensor) -> Tensor:
            gain[0] = min(self.size, gain[0] * rate)
            at = int(channel * x.shape[-1])
            largest, own = x.detach().abs().amax(), x[..., at].detach().abs().amax().clamp_min(1e-12)
            more = torch.ones(x.shape[-1], dtype=x.dtype)
            more[at] = gain[0] * largest / own
            return x * more

        self.later(change_input(t.model.get_submodule(self.module), grow))
