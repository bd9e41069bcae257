"""What a kernel stores is not what it was to store: casts that cut or lose a sign, scales of a part of a tile, GEMMs that write over
each other, onto old contents, or through a format that is too small.

Severity is the relative error of what the GEMM reads or gives.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import ERRORS, Lasting, log_uniform, one_of, onset, relative_error, until
from proving.faults._kernel import KernelFault, kernel_sites
from proving.faults._sites import Operand, Wrapped, put_kernel
from proving.faults.products import ProductFault
from proving.training import Expected, Training
from torch import Tensor

from fp8watch.kernels.backend import Backend, Quantized
from fp8watch.numerics.quantize_job import QuantizeJob

_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


class CodesTruncated(KernelFault):
    """The cast cuts bits of the mantissa off in place of rounding (1bit-MONSTER #304, FreeToken #85: all magnitudes too
    small, all to the same side), or stores fewer of them than the format has."""

    name = "codes-truncated"
    only = ("mild", "medium")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bits = 1 if self.severity == "mild" else int(self.rng.integers(2, 4))
        self.note(num_bits=self.num_bits)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        num_bits = min(self.num_bits, _MANTISSA_BITS.get(operand.job.fmt.dtype, 2))
        return operand.values(operand.codes & (0xFF << num_bits & 0xFF))


class SignLaneStuck(KernelFault):
    """One lane of sixteen, or some of them, has a sign bit that is stuck at plus: a core that computes wrongly and says nothing
    (Hochschild et al., "Cores that don't count", 2021)."""

    name = "sign-lane-stuck"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        num_lanes = int(self.rng.integers(3, 9)) if self.severity == "severe" else 1
        self.lanes = self.rng.choice(16, size=num_lanes, replace=False).tolist()
        self.note(num_lanes=num_lanes)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        stuck = torch.isin(torch.arange(operand.codes.shape[1]) % 16, torch.tensor(self.lanes))
        return operand.values(torch.where(stuck, operand.codes & 0x7F, operand.codes))


class _PartOfTile(Wrapped):
    """A quantiser whose amax is that of the first elements of each 128, or of the whole tensor where it has one scale. All that it
    says belongs to the scales that it uses."""

    def __init__(self, base: Backend, num: int) -> None:
        super().__init__(base)
        self.num = num

    def scale(self, x: Tensor, job: QuantizeJob) -> Tensor:
        scale_inv = self.base.quantize(x, job)[1]
        if scale_inv.numel() == 1 and self.num < 128:
            first = torch.arange(x.numel(), device=x.device).view_as(x) < self.num
            return (1.0 / self.base.quantize(torch.where(first, x, torch.zeros_like(x)), job)[1]).contiguous()
        axis = 0 if job.tile[0] > job.tile[1] else 1
        seen = torch.arange(x.shape[axis]) % 128 < self.num
        part = torch.where(seen[:, None] if axis == 0 else seen, x, torch.zeros_like(x))
        return (1.0 / self.base.quantize(part, job)[1]).contiguous()

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, job, self.scale(x, job))

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, job, self.scale(x, job))


class AmaxOfFewLanes(Lasting):
    """The reduction of amax ends early, so that the scale fits a part of the tile and the rest is clipped (Primus-Turbo #306: amax
    of the first 8192 elements for every larger tensor). How few elements are seen follows from the error that was drawn."""

    name = "amax-of-few-lanes"

    def __init__(self, *, modules: list[str], operand: str, error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.operand, self.error = modules, operand, error

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> AmaxOfFewLanes | None:
        operand = one_of(rng, ("input", "grad_output"))  # the largest of a few weights is as large as that of all
        names = kernel_sites(rng, training, operand)
        if not names or training.recipe == "delayed":  # there the scale is of the steps before
            return None
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 3, 30, stays=0.7),
            severity=severity,
            expected=Expected(("quantiser-fault", "scale-rounding"), tuple(names), operand, True),
            drawn={"operand": operand, "module": names[0], "num_modules": len(names), "asked_error": round(error, 4)},
            modules=names,
            operand=operand,
            error=error,
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            self.later(put_kernel(module, self.operand, lambda base: _ChosenPart(base, self)))


class _ChosenPart(_PartOfTile):
    """Of the parts the one whose error comes nearest, at the first call that holds anything."""

    def __init__(self, base: Backend, fault: AmaxOfFewLanes) -> None:
        super().__init__(base, 0)
        self.fault = fault

    def scale(self, x: Tensor, job: QuantizeJob) -> Tensor:
        if not self.num and float(x.abs().max()) > 0:
            errors = {}
            for num in (96, 64, 32, 16, 8, 4, 2, 1):
                scale = _PartOfTile(self.base, num).scale(x, job)
                errors[num] = relative_error(self.base.quantize_dequantize(x, job, scale)[0], x)
            self.num = min(errors, key=lambda num: abs(errors[num] - self.fault.error))
            self.fault.note(num_seen=self.num, error=errors[self.num])
        return _PartOfTile(self.base, self.num or 128).scale(x, job)


class KBlockRaced(ProductFault):
    """Registers of one block of K are written while the tensor core still reads them: in some calls its product is that of the next
    block's operand (DeepGEMM #449, #365, #430: equal inputs, other outputs)."""

    name = "k-block-raced"
    modes = ("kernel-output-fault", "accumulator-precision")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.chance, self.start = float(self.rng.uniform(0.3, 1.0)), float(self.rng.random())
        self.num_calls = 0
        self.note(chance=round(self.chance, 2))

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 1 and self.rng.random() > self.chance:
            return out
        num_blocks = max(2, min(16, a.shape[1] // 8))
        parts_a, parts_b = a.chunk(num_blocks, 1), b.chunk(num_blocks, 0)
        energy = float(out.double().square().sum())
        raced, order = out.float(), (torch.arange(out.shape[0]) + int(self.start * out.shape[0])) % out.shape[0]
        for k in self.rng.permutation(len(parts_a) - 1).tolist():
            width = min(parts_a[k].shape[1], parts_a[k + 1].shape[1])
            raced = raced + (parts_a[k + 1][:, :width] - parts_a[k][:, :width]) @ parts_b[k][:width]
            errors = (raced - out.float()).double().square().sum(1)[order]
            if float(errors.sum()) >= self.error**2 * energy:
                break
        num_rows = int((errors.cumsum(0) < self.error**2 * energy).sum()) + 1
        got = out.clone()
        got[order[:num_rows]] = raced[order[:num_rows]].to(out.dtype)
        return got


class OutputOnOldContents(ProductFault):
    """A split of K adds its parts to an output that nobody has zeroed (Intel's Triton backend #2717), so that rows hold the sum of
    the right product and of what the buffer held before: the product of the call before."""

    name = "output-on-old-contents"
    modes = ("kernel-output-fault", "accumulator-precision")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = float(self.rng.random())
        self.before: Tensor | None = None

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        before, self.before = self.before, out.clone()
        old = before if before is not None and before.shape == out.shape else out.roll(1, 0)
        num_rows = out.shape[0]
        order = (torch.arange(num_rows) + int(self.start * num_rows)) % num_rows
        rows = order[: max(1, round(min(1.0, self.error**2) * num_rows))]
        got = out.clone()
        got[rows] += old[rows]
        return got


class OutputCastSaturates(ProductFault):
    """The product leaves in FP8 under a fixed scale and ends at ±448 or ±57344 of it, finite (TensorRT-LLM #1921: a scale of 1 for
    whatever comes). Where that is follows from the error that was drawn, and then stays."""

    name = "output-cast-saturates"
    modes = ("kernel-output-fault", "accumulator-precision")
    gemms = ("fprop", "dgrad")
    bands: ClassVar[dict[str, tuple[float, float]]] = {**ERRORS, "severe": (0.5, 0.85)}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limit: dict[tuple[int, int], float] = {}

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        shape, largest = (out.shape[1], a.shape[1]), float(out.abs().max())
        if shape not in self.limit and largest > 0:
            low, high = 0.0, largest
            for _ in range(30):
                middle = (low + high) / 2
                too_much = relative_error(out.clamp(-middle, middle), out) > self.error
                low, high = (middle, high) if too_much else (low, middle)
            self.limit[shape] = high
            self.note(limit=high)
        limit = self.limit.get(shape, 0.0)
        return out.clamp(-limit, limit) if limit > 0 else out
