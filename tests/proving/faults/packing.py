"""Codes that are all there, and that the other side takes apart otherwise than they were put together: two in one register, bytes of another type.

Scales and statistics are sound; the GEMM reads something else. Severity is the relative error of what it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from proving.faults._base import one_of
from proving.faults._kernel import KernelFault
from proving.faults._sites import Operand
from torch import Tensor


class PairsSwapped(KernelFault):
    """A conversion packs two numbers into 16 bits, the second in front (nvFuser #4711: `cvt.rn.satfinite.e4m3x2` takes them the other way
    round), so that neighbours change places, two by two. Nothing is lost, and no amax, scale or norm of a row is another."""

    name = "pairs-swapped"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drawn.pop("race")
        self.race = False  # a matter of the code and not of the moment

    def swapped(self, codes: Tensor, columnwise: bool) -> Tensor:
        """Each two that lie side by side in memory, along K of the GEMM."""
        if columnwise:
            return self.swapped(codes.t(), False).t()
        whole = codes.shape[1] // 2 * 2
        pairs = codes[:, :whole].unflatten(1, (-1, 2)).flip(-1).flatten(1)
        return torch.cat((pairs, codes[:, whole:]), 1)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        return operand.values(self.swapped(operand.codes, operand.columnwise))


class CodesReadAsIntegers(KernelFault):
    """The type gets lost on the way, and the bytes of FP8 are taken for whole numbers, with a sign or without, and multiplied by the same
    scales (aiter #3332: a device that is in no table falls back to `uint8`; DLPack #156: FP8 travels as `int8`). Of E4M3 small numbers
    become nearly as large as the largest, of E5M2 all become small; nothing is NaN. In some rows, as many as make the error."""

    name = "codes-read-as-integers"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.signed = one_of(self.rng, (True, False))
        self.note(read_as="int8" if self.signed else "uint8")

    def integers(self, codes: Tensor) -> Tensor:
        """Bytes [M, K] as whole numbers: float32."""
        return codes.contiguous().view(torch.int8 if self.signed else torch.uint8).float()

    def wrong(self, name: str, operand: Operand) -> Tensor:
        rows, columns = operand.codes.shape
        return self.integers(operand.codes) * operand.spread(operand.scale_inv)[:rows, :columns]
