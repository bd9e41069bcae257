"""Where a matrix ends and its last tile does not: what lies behind it counts for the scale, and rows that fill it up count for a gradient.

Severity is the relative error of what the GEMM reads, or gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import (
    ERRORS,
    Lasting,
    behind_the_first,
    linears,
    log_uniform,
    one_of,
    onset,
    relative_error,
    trained,
    until,
)
from proving.faults._sites import Wrapped, put_kernel
from proving.faults.products import ProductFault
from proving.faults.stashes import inputs_of
from proving.training import Expected, Training
from torch import Tensor

from fp8watch.kernels.backend import Backend, Quantized
from fp8watch.numerics.quantize_job import QuantizeJob

_MOST_OCTAVES = 40


class _Overread(Wrapped):
    """A quantiser whose last tile along one axis has an amax that is not of the matrix. All that it says belongs to the scales that it uses."""

    def __init__(self, base: Backend, fault: RaggedTileOverread) -> None:
        super().__init__(base)
        self.fault = fault

    def scale(self, x: Tensor, job: QuantizeJob) -> Tensor | None:
        """Of each tile; None where nothing is read that is not there."""
        columnwise = job.tile[0] > job.tile[1] == 1
        if columnwise != self.fault.columnwise or not float(x.abs().max()) > 0:
            return None
        axis = 0 if columnwise or not x.shape[1] % job.tile[1] else 1
        if not x.shape[axis] % job.tile[axis]:
            return None
        right = 1.0 / self.base.quantize(x, job)[1]
        if self.fault.octaves is None:
            halves = range(0, 2 * _MOST_OCTAVES, 2 if job.power_2_scale else 1)
            errors = {
                half / 2: relative_error(
                    self.base.quantize_dequantize(x, job, self._smaller(right, axis, half / 2))[0], x
                )
                for half in halves
            }
            self.fault.octaves = min(errors, key=lambda octaves: abs(errors[octaves] - self.fault.error))
            self.fault.note(octaves=self.fault.octaves, error=errors[self.fault.octaves])
        return self._smaller(right, axis, self.fault.octaves)

    @staticmethod
    def _smaller(scale: Tensor, axis: int, octaves: float) -> Tensor:
        out = scale.clone()
        out.select(axis, -1).mul_(2.0**-octaves)
        return out.contiguous()

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, job, self.scale(x, job))

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, job, self.scale(x, job))


class RaggedTileOverread(Lasting):
    """The last tile of a matrix that does not divide evenly is reduced over all of its lanes, and those behind the end hold whatever memory
    holds (aiter #4288, #4383: masked lanes without a value enter the amax): its scale makes room for something large, and what is there
    is flushed. All other tiles are right."""

    name = "ragged-tile-overread"

    def __init__(self, *, modules: list[str], operand: str, columnwise: bool, error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.operand, self.columnwise, self.error = modules, operand, columnwise, error
        self.octaves: float | None = None

    @classmethod
    def places(cls, t: Training, error: float) -> dict[tuple[str, bool], list[str]]:
        """(operand, whether columnwise) -> Linears whose last tile is ragged there, and holds so much that its loss makes the error."""
        names = linears(t)
        if not names or t.recipe not in (None, "blockwise", "mxfp8"):
            return {}
        size, backward = 32 if t.recipe == "mxfp8" else 128, behind_the_first(t, trained(t, names))
        found: dict[tuple[str, bool], list[str]] = {}

        def enough(num: int) -> bool:
            return bool(num % size) and num % size >= error**2 * num

        for name, x in inputs_of(t, names).items():
            module: Any = t.model.get_submodule(name)
            along = {"input": module.in_features, "weight": module.in_features, "grad_output": module.out_features}
            for operand, num_columns in along.items():
                if enough(num_columns) and (operand != "grad_output" or name in backward):
                    found.setdefault((operand, False), []).append(name)
                if operand != "weight" and enough(len(x)) and name in backward:
                    found.setdefault((operand, True), []).append(name)
        return found

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RaggedTileOverread | None:
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        places = cls.places(training, error)
        if not places:
            return None
        operand, columnwise = one_of(rng, sorted(places))
        names = places[operand, columnwise]
        if rng.random() < 0.6:
            names = [one_of(rng, names)]
        modes = ("gradient-underflow", "quantiser-fault") if operand == "grad_output" else ("quantiser-fault",)
        stale = ("stale-weight-scale",) if operand == "weight" else ()
        return cls(
            step=step,
            until=until(rng, step, 4, 30, stays=0.8),
            severity=severity,
            expected=Expected((*modes, *stale, "chronic-quantization-noise"), tuple(names), operand, True),
            drawn={
                "operand": operand, "copy": "columnwise" if columnwise else "rowwise", "module": names[0],
                "num_modules": len(names), "asked_error": round(error, 4),
            },
            modules=names,
            operand=operand,
            columnwise=columnwise,
            error=error,
        )  # fmt: skip

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            self.later(put_kernel(module, self.operand, lambda base: _Overread(base, self)))


class PaddingCounted(ProductFault):
    """FP8 wants a number of rows that divides evenly, and what is missing is filled up with copies of the last row; the forward pass cuts
    them off, the gradient of the weight sums over them (as where samples are repeated until they divide evenly, pytorch #49180). How
    many copies there are follows from the error that was drawn."""

    name = "padding-counted"
    modes = ("kernel-output-fault", "accumulator-precision")
    gemms = ("wgrad",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num = 0
        """Of copies."""

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        given = (a.abs().amax(0) > 0).nonzero().flatten()
        if not len(given):
            return out
        last = int(given[-1])  # a row that is not scored has no gradient to repeat
        again = torch.outer(a[:, last].float(), b[last].float())
        if not self.num:
            size = float(again.norm())
            if not size > 0:
                return out
            self.num = max(1, round(self.error * float(out.float().norm()) / size))
            self.note(num_copies=self.num)
        return out + self.num * again
