"""Ranges that do not fit together: scales that are stored in too small a format, a clamp of another format, scales that a captured
graph replays, an amax that is taken after the cast.

Severity is the relative error of what the GEMM reads, and for the delayed scale how far it is clipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import ERRORS, Lasting, change_input, log_uniform, one_of, onset, relative_error, until
from proving.faults._kernel import KernelFault, Key, kernel_sites
from proving.faults._sites import Operand, Wrapped, put_kernel, quantizers, tile_amax
from proving.faults.delayed import DelayedFault
from proving.training import Expected, Training
from torch import Tensor

from fp8watch.kernels.backend import Backend, Quantized
from fp8watch.numerics.quantize_job import QuantizeJob


class ScalesFlushed(KernelFault):
    """What scales are made of goes through a half-precision buffer, and the smallest are 0 when they come back: their tiles stand for
    nothing (Model-Optimizer #1350: scales that underflow when they are cast to FP16; lmdeploy #4276, vLLM #34577). Where that
    begins follows from the error that was drawn."""

    name = "scales-flushed"
    operands = ("input", "grad_output")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limits: dict[Key, float] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KernelFault | None:
        fault = super().draw(rng, training, severity)
        return fault if training.recipe in (None, "blockwise", "mxfp8") else None  # one scale alone: all or nothing

    def spoil(self, name: str, operand: Operand) -> Tensor:
        key = name, operand.columnwise
        if operand.columnwise not in self.columnwise or not float(operand.right.abs().max()) > 0:
            return operand.right
        num_rows, num_columns = operand.right.shape
        amax = operand.spread(tile_amax(operand.x, operand.job))[:num_rows, :num_columns]
        if key not in self.limits:
            sizes, order = amax.flatten().sort()
            lost = operand.right.double().square().flatten()[order].cumsum(0)
            at = int(torch.searchsorted(lost, self.error**2 * lost[-1]))
            self.limits[key] = float(sizes[min(at, len(sizes) - 1)])
        wrong = torch.where(amax <= self.limits[key], 0.0, operand.right)
        self.note(error=relative_error(wrong, operand.right), at=f"{name} {tuple(wrong.shape)}")
        return wrong


class ClampedAtOtherMaximum(KernelFault):
    """The scale makes room up to 448, and the cast clamps at the largest number of something else: 240 or 224 of AMD's formats, 127 of
    INT8 (ROCm's Transformer Engine #485, vLLM #32201: one of the two asks the device, the other does not)."""

    name = "clamped-at-other-maximum"
    only = ("mild", "medium")

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KernelFault | None:
        fault = super().draw(rng, training, severity)
        return None if training.recipe == "delayed" else fault  # there nothing comes near the maximum

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.part = one_of(self.rng, (240, 224, 127)) / 448
        self.note(part_of_range=round(self.part, 3))

    def wrong(self, name: str, operand: Operand) -> Tensor:
        largest = operand.spread(operand.scale_inv)[: operand.right.shape[0], : operand.right.shape[1]]
        limit = self.part * operand.job.fmt.max_finite * largest
        return torch.maximum(torch.minimum(operand.right, limit), -limit)


class _Captured(Wrapped):
    """A quantiser whose scales are those of the first call of a shape, and stay. All that it says belongs to the scales that it uses."""

    def __init__(self, base: Backend, fault: ScalesOfCapturedGraph) -> None:
        super().__init__(base)
        self.fault = fault
        self.kept: dict[tuple[Any, ...], Tensor] = {}

    def scale(self, x: Tensor, job: QuantizeJob) -> Tensor:
        key = (*x.shape, *job.tile)
        if key not in self.kept:
            now = 1.0 / self.base.quantize(x, job)[1]
            if not float(x.abs().max()) > 0:
                return now.contiguous()
            found = {}
            turn = (torch.arange(now.numel()) * 37 % 16).view_as(
                now
            )  # some tiles have outgrown theirs by an octave more
            for sixteenths in (*range(16), *range(16, 200, 8)):
                outgrown = (now * 2.0 ** ((sixteenths - turn + 15) // 16)).contiguous()
                found[sixteenths] = relative_error(self.base.quantize_dequantize(x, job, outgrown)[0], x)
            best = min(found, key=lambda sixteenths: abs(found[sixteenths] - self.fault.error))
            self.fault.note(octaves=best / 16, error=found[best])
            self.kept[key] = (now * 2.0 ** ((best - turn + 15) // 16)).contiguous()
        return self.kept[key]

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, job, self.scale(x, job))

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, job, self.scale(x, job))


class ScalesOfCapturedGraph(Lasting):
    """A captured graph replays the scales of the pass in which it was captured, and each tile is cast with those of other data
    (Transformer Engine #575, #2119: scales that are frozen, and kernels that heed no flag under CUDA graphs). By how much today's
    values have outgrown them follows from the error that was drawn."""

    name = "scales-of-captured-graph"

    def __init__(self, *, modules: list[str], operand: str, error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.operand, self.error = modules, operand, error

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ScalesOfCapturedGraph | None:
        operand = one_of(rng, ("input", "grad_output"))
        names = kernel_sites(rng, training, operand)
        if not names or training.recipe == "delayed":  # there scales are of other passes by design
            return None
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 4, 30, stays=0.8),
            severity=severity,
            expected=Expected(("frozen-scale", "quantiser-fault"), tuple(names), operand, True),
            drawn={"operand": operand, "module": names[0], "num_modules": len(names), "asked_error": round(error, 4)},
            modules=names,
            operand=operand,
            error=error,
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            self.later(put_kernel(module, self.operand, lambda base: _Captured(base, self)))


class AmaxAfterTheCast(DelayedFault):
    """The amax of delayed scaling is read off what has been cast already, and can say no more than the scale lets through
    (hipBLASLt #698): an activation that grows is clipped, and nothing ever tells the scale. Severity is how far it grows."""

    name = "amax-after-the-cast"
    modes = ("delayed-clip", "frozen-scale")
    lasts = (1, 1, 1.0)

    def begin(self, t: Training) -> None:
        (quantizer,) = quantizers(t.model.get_submodule(self.module), "input")
        state, rate, gain = quantizer.state, log_uniform(self.rng, 1.1, 1.6), [1.0]  # type: ignore[attr-defined]
        self.note(growth_a_pass=round(rate, 3))
        record, largest = state.record, state.format.max_finite

        def of_what_was_cast(amax: Tensor, num_nan: Tensor | None = None) -> None:
            record(torch.minimum(amax.reshape(1), largest / state.scale.reshape(1)), num_nan)

        state.record = of_what_was_cast
        self.later(lambda: state.__dict__.pop("record", None))

        def grow(x: Tensor) -> Tensor:
            gain[0] = min(self.size, gain[0] * rate)
            return x * gain[0]

        self.later(change_input(t.model.get_submodule(self.module), grow))
