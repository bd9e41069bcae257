"""Memory beside a GEMM that is not what the kernel takes it for: a slot for the amax that several tensors share and nobody clears, inputs that
wait for the backward pass and come back too coarse.

Severity is the relative error of what the GEMM reads, or gives.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from proving.faults._base import ERRORS, Lasting, log_uniform, one_of, onset, relative_error, until
from proving.faults._kernel import kernel_sites
from proving.faults._sites import Wrapped, put_kernel
from proving.faults.products import ProductFault
from proving.training import Expected, Training
from torch import Tensor

from fp8watch.kernels.backend import Backend, Quantized
from fp8watch.numerics.quantize_job import QuantizeJob

_MOST_OCTAVES = 40


class _NeverZeroed(Wrapped):
    """A quantiser that takes the larger of a tile's amax and of what its slot holds. All that it says belongs to the scales that it uses."""

    def __init__(self, base: Backend, fault: AmaxNeverZeroed) -> None:
        super().__init__(base)
        self.fault = fault
        self.least: Tensor | None = None
        """The scale of the largest amax that the slot has seen."""

    def scale(self, x: Tensor, job: QuantizeJob) -> Tensor:
        now = 1.0 / self.base.quantize(x, job)[1]
        if self.least is None:
            if not float(x.abs().max()) > 0:
                return now.contiguous()
            self.least = self._held(x, job, now)
        self.least = torch.minimum(self.least, now.min())
        return torch.minimum(now, self.least).contiguous()

    def _held(self, x: Tensor, job: QuantizeJob, now: Tensor) -> Tensor:
        """What a larger tensor has left: by as many octaves larger as make the error."""
        halves = range(0, 2 * _MOST_OCTAVES, 2 if job.power_2_scale else 1)
        errors = {}
        for octaves in (half / 2 for half in halves):
            scale = torch.minimum(now, now.min() * 2.0**-octaves).contiguous()
            errors[octaves] = relative_error(self.base.quantize_dequantize(x, job, scale)[0], x)
        best = min(errors, key=lambda octaves: abs(errors[octaves] - self.fault.error))
        self.fault.note(octaves=best, error=errors[best])
        return now.min() * 2.0**-best

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, job, self.scale(x, job))

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, job, self.scale(x, job))


class AmaxNeverZeroed(Lasting):
    """The amax is an atomic maximum in a workspace that is not cleared between two casts, or on another stream (cudnn-frontend #481: buffers
    are reset on the stream of the launch), so that every later tensor is scaled as if it held the largest number of all that came
    before. An activation was there first, and what is smaller, a gradient above all, is flushed. How much larger it was follows
    from the error that was drawn; the slot never falls."""

    name = "amax-never-zeroed"

    def __init__(self, *, modules: list[str], operand: str, error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.operand, self.error = modules, operand, error

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> AmaxNeverZeroed | None:
        operand = one_of(rng, ("grad_output", "grad_output", "input"))
        names = kernel_sites(rng, training, operand)
        if not names or training.recipe == "delayed":  # there the scale is of the steps before
            return None
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        modes = ("gradient-underflow", "quantiser-fault", "frozen-scale")
        return cls(
            step=step,
            until=until(rng, step, 4, 30, stays=0.8),
            severity=severity,
            expected=Expected(modes if operand == "grad_output" else modes[1:], tuple(names), operand, True),
            drawn={"operand": operand, "module": names[0], "num_modules": len(names), "asked_error": round(error, 4)},
            modules=names,
            operand=operand,
            error=error,
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            self.later(put_kernel(module, self.operand, lambda base: _NeverZeroed(base, self)))


class SavedWithOneScale(ProductFault):
    """Activations wait for the backward pass in eight bits, with one scale for a whole tensor that some large number has set, so that few of
    the levels are left for all others (COAT, arXiv 2410.19313, takes a scale a group for that; megablocks #23, pytorch #64729). The loss
    of the step is right, and so is the gradient that is passed on; that of the weight is not. How far apart the levels are follows
    from the error that was drawn, at the first wrong call, and then stays; what lies beyond the last level is clipped to it."""

    name = "saved-with-one-scale"
    modes = ("quantiser-fault", "kernel-output-fault", "accumulator-precision")
    gemms = ("wgrad",)
    most = 127
    """Levels to either side."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps: dict[tuple[int, ...], float] = {}
        """Of each shape, how far the levels are apart."""

    def levels(self, x: Tensor, step: float) -> Tensor:
        """Rounded to equal steps."""
        return (x.float() / step).round().clamp(-self.most, self.most) * step

    def step_of(self, x: Tensor) -> float:
        """How far apart levels are that give the error; 0 where there is nothing to keep."""
        rms = math.sqrt(float(x.double().square().mean()))
        if not (rms > 0 and math.isfinite(rms)):
            return 0.0
        # for numbers that fill many levels the error is step/√12 of their size; where few are left it is searched for
        steps = [math.sqrt(12) * self.error * rms * 2.0 ** (quarter / 4) for quarter in range(-6, 16)]
        errors = {step: relative_error(self.levels(x, step), x) for step in steps}
        return min(steps, key=lambda step: abs(errors[step] - self.error))

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        key = tuple(b.shape)
        if key not in self.steps and (step := self.step_of(b)):
            self.steps[key] = step
            came_back = self.levels(b, step)
            self.note(
                error_of_input=round(relative_error(came_back, b), 4),
                levels=len(came_back.unique()),
                at=f"[{b.shape[0]}, {b.shape[1]}]",
            )
        if key not in self.steps:
            return out
        return a.float() @ self.levels(b, self.steps[key])
