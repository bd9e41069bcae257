"""Scales that the GEMM reads wrongly, beside codes that are right.

The quantiser's amax and scale are sound: the bytes go astray between the quantiser and the product, where layouts,
paddings and formats of scales differ from kernel to kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import one_of
from proving.faults._kernel import KernelFault
from proving.faults._sites import Operand
from proving.training import Training
from torch import Tensor

from fp8watch.recipe.build import blockwise


class ScalesAsExponents(KernelFault):
    """The run has FP32 scales, and the GEMM reads their exponents alone (sglang #39193; transformers #47030: rounded up
    without quantising anew: 8.5 dB, gain +31 %)."""

    name = "scales-as-exponents"
    modes = ("quantiser-fault", "scale-rounding")
    needs_recipe = "blockwise with FP32 scales"
    prepares = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.up = bool(self.rng.random() < 0.5)
        self.note(rounded="up" if self.up else "to the nearest")

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KernelFault | None:
        return super().draw(rng, training, severity) if training.recipe in (None, "blockwise") else None

    def before_attach(self, t: Training) -> None:
        t.recipe = blockwise(power_2_scale=False)  # type: ignore[assignment]  # attach takes recipes too

    def wrong(self, name: str, operand: Operand) -> Tensor:
        octaves = operand.scale_inv.log2()
        return operand.values(scale_inv=torch.exp2(octaves.ceil() if self.up else octaves.round()))


class ScalesStale(KernelFault):
    """The GEMM reads the scales of the call before: their copy into its layout was not waited for."""

    name = "scales-stale"
    operands = ("input", "grad_output")  # those of a weight are the same in hundreds of calls

    def wrong(self, name: str, operand: Operand) -> Tensor:
        before = self.before.get((name, operand.columnwise))
        if before is None or before.scale_inv.shape != operand.scale_inv.shape:
            return operand.values(scale_inv=operand.scale_inv.flip(0))  # whatever was in the buffer
        return operand.values(scale_inv=before.scale_inv)


class ScalesPadded(KernelFault):
    """Rows are scaled by the padding of the scale buffer (Transformer Engine #3070, gpt-oss): 0, 1, or what an
    uninitialised byte says."""

    name = "scales-padded"
    modes = ("quantiser-fault", "kernel-output-fault")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.padding = one_of(self.rng, (0.0, 1.0, float("nan"))) if self.severity == "severe" else 0.0
        self.note(padding=str(self.padding))

    def wrong(self, name: str, operand: Operand) -> Tensor:
        return operand.values(scale_inv=torch.full_like(operand.scale_inv, self.padding))


class ScalesSwizzled(KernelFault):
    """Scales lie in the order of the tensor cores, 32 × 4 within 128 rows, and are read row by row, or the other way
    round (MSLK, DeepGEMM: layout `[k/128][m/128][32][4][4]`)."""

    name = "scales-swizzled"
    operands = ("input", "grad_output")

    def wrong(self, name: str, operand: Operand) -> Tensor:
        axis = 1 if operand.columnwise else 0
        n = operand.scale_inv.shape[axis]
        i = torch.arange(n)
        inside = i % 128
        order = i - inside + (inside % 32) * 4 + inside // 32
        return operand.values(scale_inv=operand.scale_inv.index_select(axis, order % n))


class ScaleOfOtherFormat(KernelFault):
    """The scale is that of E5M2, the codes are E4M3, so that what the GEMM reads is 2^-7 of what it should be; or the
    exponent is off by a smaller bias (Transformer Engine #3342: gradients 2^-7)."""

    name = "scale-of-other-format"
    operands = ("grad_output", "grad_output", "input")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.octaves = -7 if self.rng.random() < 0.5 else int(one_of(self.rng, (-8, -4, -2, -1, 1)))
        self.note(octaves=self.octaves)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        return operand.right * 2.0**self.octaves
