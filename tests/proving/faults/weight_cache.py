"""Weights that the GEMMs read and the optimizer does not write, or the other way round.

FP8 weights are cached over micro-batches and gathered ahead of their layer; masters are kept beside them. Whatever of it
is not refreshed is read as it was.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from proving.faults._base import (
    ERRORS,
    Lasting,
    linears,
    log_uniform,
    onset,
    relative_error,
    some_of,
    trained,
    until,
)
from proving.faults._kernel import kernel_sites
from proving.faults._sites import Operand, OtherScale, WrongKernel, put_kernel
from proving.training import Expected, Training
from torch import Tensor


class WeightScaleStale(Lasting):
    """The scale of a weight is that of an earlier weight: the cache is not told of a new first micro-batch, or a gathered
    FP8 parameter comes with old scales (`--fp8-param-gather`). Above the scale is clipped, below it bits are wasted.

    Severity is the clipping: how many times today's amax is above what the scale can carry.
    """

    name = "weight-scale-stale"
    ratios: ClassVar[dict[str, tuple[float, float]]] = {"mild": (1.1, 2.0), "medium": (2.0, 6.0), "severe": (6.0, 60.0)}

    def __init__(self, *, modules: list[str], ratio: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.ratio = modules, ratio

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> WeightScaleStale | None:
        names = kernel_sites(rng, training, "weight") if training.recipe in (None, "blockwise") else []
        if not names:
            return None
        step, ratio = onset(rng, training), log_uniform(rng, *cls.ratios[severity])
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.7),
            severity=severity,
            expected=Expected(("stale-weight-scale", "quantiser-fault"), tuple(names), "weight", True),
            drawn={"module": names[0], "num_modules": len(names), "ratio": round(ratio, 3)},
            modules=names,
            # with power-of-two scales the amax fills between a half and all of the range: the clip is what remains
            ratio=2.0 * ratio,
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            cached: list[Tensor] = []

            def stale(scale: Tensor, job: Any, cached: list[Tensor] = cached) -> Tensor:
                if not cached:
                    cached.append(
                        scale * 2.0 ** round(math.log2(self.ratio)) if job.power_2_scale else scale * self.ratio
                    )
                return cached[0]

            module = t.model.get_submodule(name)
            self.later(put_kernel(module, "weight", lambda base, stale=stale: OtherScale(base, stale)))


class WeightsGatheredStale(Lasting):
    """The forward pass reads weights of some steps ago: the gather overlaps with the update and is not waited for
    (Megatron-Bridge #1255, #1771, #1865, cured by `overlap_param_gather=false`). Codes and scales are old together.

    How old follows from the error that was drawn: between the first weights and those of today.
    """

    name = "weights-gathered-stale"

    def __init__(self, *, modules: list[str], error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.error = modules, error
        self.first: dict[str, Tensor] = {}
        self.away: dict[str, Tensor] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> WeightsGatheredStale | None:
        names = trained(training, kernel_sites(rng, training, "weight"))
        if not names:
            return None
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.7),
            severity=severity,
            expected=Expected(("stale-weight-scale", "quantiser-fault"), tuple(names), "weight", True),
            drawn={"module": names[0], "num_modules": len(names), "asked_error": round(error, 4)},
            modules=names,
            error=error,
        )

    def attached(self, t: Training, watch: Any) -> None:
        self.first = {name: t.model.get_submodule(name).weight.detach().float().clone() for name in self.modules}

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            now = module.weight.detach().float()
            whole = relative_error(self.first[name], now)
            old = now + min(1.0, self.error / max(whole, 1e-6)) * (self.first[name] - now)
            self.note(error=relative_error(old, now))

            def reads_old(operand: Operand, old: Tensor = old) -> Tensor:
                return operand.sound.quantize_dequantize(old, operand.job)[0]  # quantised when it was gathered

            self.later(put_kernel(module, "weight", lambda base, reads_old=reads_old: WrongKernel(base, reads_old)))


class UpdatesNotWrittenBack(Lasting):
    """The optimizer steps on copies that nobody writes back (a param group built before `.to()` or a re-tied module): the
    weights of some modules, or all, stand still while the gradients go on. Severity is the share that stands still."""

    name = "updates-not-written-back"
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.05, 0.2), "medium": (0.2, 0.6), "severe": (0.6, 1.0)}

    def __init__(self, *, modules: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules = modules

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> UpdatesNotWrittenBack | None:
        names = trained(training, linears(training))
        if len(names) < 4:
            return None
        n = max(1, round(rng.uniform(*cls.shares[severity]) * len(names)))
        modules = some_of(rng, names, n, n)
        step = onset(rng, training)
        return cls(
            step=step,
            severity=severity,
            expected=Expected(("dead-layer", "stale-weight-scale", "scalar-shift"), tuple(modules), None, False),
            drawn={"num_modules": n, "module": modules[0]},
            modules=modules,
        )

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        if self._begun:  # the optimizer no longer clears them
            for name in self.modules:
                t.model.get_submodule(name).weight.grad = None

    def begin(self, t: Training) -> None:
        groups = [list(group["params"]) for group in t.optimizer.param_groups]
        for name in self.modules:
            weight = t.model.get_submodule(name).weight
            copy = weight.detach().clone().requires_grad_()
            for group in t.optimizer.param_groups:
                group["params"] = [copy if p is weight else p for p in group["params"]]
            if weight in t.optimizer.state:
                t.optimizer.state[copy] = t.optimizer.state[weight]
            self.later(weight.register_post_accumulate_grad_hook(_hands_over(copy)).remove)

        def put_back() -> None:
            for group, params in zip(t.optimizer.param_groups, groups, strict=True):
                group["params"] = params

        self.later(put_back)


def _hands_over(copy: Tensor) -> Any:
    """The copy gets the gradient that the weight gets, which stays where it is for who looks at it."""

    def hook(weight: Tensor) -> None:
        copy.grad = None if weight.grad is None else weight.grad.clone()

    return hook
