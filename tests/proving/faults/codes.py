"""Codes that a kernel wrote wrongly, with the right scales: amax and scale are sound, and the GEMM reads something else.

The largest class of complaints of 2026 is not instability but kernels that break their contract. Each of these leaves
the statistics of the quantiser as they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.faults._base import log_uniform, one_of
from proving.faults._kernel import KernelFault
from proving.faults._sites import Operand
from proving.training import Training
from torch import Tensor

_NAN = 0x7F


class CodesZeroed(KernelFault):
    """The codes of gradients are 0 (Transformer Engine #3281: stochastic rounding on sm_120 wrote nothing but zeros)."""

    name = "codes-zeroed"
    operands = ("grad_output", "grad_output", "input")

    def wrong(self, name: str, operand: Operand) -> Tensor:
        return torch.zeros_like(operand.right)


class CodesMisplaced(KernelFault):
    """Codes land some rows or columns away from where they belong, their scales do not (torchao #4900: a block's store
    takes the offset of its neighbour)."""

    name = "codes-misplaced"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.axis = int(self.rng.integers(2))
        self.by = int(2 ** self.rng.integers(0, 8)) * one_of(self.rng, (-1, 1))
        self.note(axis=self.axis, by=self.by)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        by = self.by % operand.codes.shape[self.axis] or 1
        return operand.values(operand.codes.roll(by, self.axis))


class CodesUnwritten(KernelFault):
    """The kernel leaves the last blocks of its grid out: the buffer still holds the codes of the call before, and the
    scales are new."""

    name = "codes-unwritten"

    def wrong(self, name: str, operand: Operand) -> Tensor:
        before = self.before.get((name, operand.columnwise))
        if before is None or before.codes.shape != operand.codes.shape:
            return operand.values(operand.codes.flip(0))  # the buffer of another tensor
        return operand.values(before.codes)


class CodesGarbage(KernelFault):
    """A miscompiled store leaves bytes that nobody wrote among the codes (torchao #4652), none of them a NaN."""

    name = "codes-garbage"

    def wrong(self, name: str, operand: Operand) -> Tensor:
        bytes_ = torch.from_numpy(self.rng.integers(0, 0x7F, size=tuple(operand.codes.shape), dtype=np.uint8))
        sign = torch.from_numpy(self.rng.integers(0, 2, size=tuple(operand.codes.shape), dtype=np.uint8)) << 7
        garbage = operand.values(bytes_ | sign)
        return torch.where(garbage.isfinite(), garbage, operand.right)  # E5M2 has more of them

    def mixed(self, key: tuple[str, bool], right: Tensor, wrong: Tensor) -> Tensor:
        """Single elements, a share of them that makes the error."""
        error, energy = float((wrong - right).square().sum()), float(right.square().sum())
        if not energy > 0 or not error > 0:
            return right
        share = self.share.setdefault(key, min(1.0, self.error**2 * energy / error))
        hit = torch.from_numpy(self.rng.random(tuple(right.shape)) < share)
        return torch.where(hit, wrong, right)


class CodesNan(KernelFault):
    """Some codes are NaN where the operand is finite: the kernel casts without clamping first, or takes lanes beyond the
    edge of a ragged tile (Transformer Engine #3484, vLLM #53680)."""

    name = "codes-nan"
    only = ("severe",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num = round(log_uniform(self.rng, 1, 64))
        self.note(num_codes=self.num)

    def spoil(self, name: str, operand: Operand) -> Tensor:
        if operand.columnwise not in self.columnwise:
            return operand.right
        out = operand.right.clone()
        edge = out.view(-1)[-min(out.numel(), 128) :]  # the last, ragged part
        edge[torch.from_numpy(self.rng.choice(edge.numel(), size=min(self.num, edge.numel()), replace=False))] = (
            torch.nan
        )
        self.note(error=float("inf"))
        return out


class CodesOfFnuz(KernelFault):
    """Codes of one of the two E4M3 formats are read as the other: everything comes out ½ or 2 times as large (weights
    made for `e4m3fn` and read as AMD's `e4m3fnuz`, or the other way round)."""

    name = "codes-of-fnuz"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gain = 2.0 if self.error > 0.5 else 0.5
        self.note(gain=self.gain)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KernelFault | None:
        return None if training.recipe == "delayed" else super().draw(rng, training, severity)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        return operand.right * self.gain
