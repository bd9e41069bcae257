"""Scratch memory of a cast that is not what the kernel takes it for: a slot for the amax that several tensors share and nobody clears.

Severity is the relative error of what the GEMM reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import ERRORS, Lasting, log_uniform, one_of, onset, relative_error, until
from proving.faults._kernel import kernel_sites
from proving.faults._sites import Wrapped, put_kernel
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
