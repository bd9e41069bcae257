"""Codes that are all there, and that the other side takes apart otherwise than they were put together: two in one register, bytes of another type.

Scales and statistics are sound; the GEMM reads something else. Severity is the relative error of what it reads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from proving.faults._base import one_of
from proving.faults._kernel import KernelFault, Key
from proving.faults._sites import Operand
from torch import Tensor

_VECTOR = 16
"""Numbers that one thread converts at once."""


class _Vectors(KernelFault):
    """Which of the vectors of 16 that lie side by side in memory are wrong: always the same ones, as many as make the error."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drawn.pop("race")
        self.race = False  # a matter of the code and not of the moment

    def mixed(self, key: Key, right: Tensor, wrong: Tensor) -> Tensor:
        if key[1]:  # columnwise copies lie in memory as their transpose
            return self._mixed(key, right.t(), wrong.t()).t()
        return self._mixed(key, right, wrong)

    def _mixed(self, key: Key, right: Tensor, wrong: Tensor) -> Tensor:
        num_rows, num_vectors = right.shape[0], right.shape[1] // _VECTOR
        energy = float(right.double().square().sum())
        if not (num_vectors and energy > 0 and math.isfinite(energy)):
            return right
        whole = num_vectors * _VECTOR
        errors = (wrong - right)[:, :whole].double().square().unflatten(1, (-1, _VECTOR)).sum(2).flatten()
        order = (torch.arange(len(errors)) + int(self.start * len(errors))) % len(errors)
        if key not in self.share:
            num = int((errors[order].cumsum(0) < self.error**2 * energy).sum()) + 1
            self.share[key] = min(1.0, num / len(errors))
        hit = torch.zeros(len(errors), dtype=torch.bool)
        hit[order[: max(1, round(self.share[key] * len(errors)))]] = True
        of_elements = hit.view(num_rows, num_vectors).repeat_interleave(_VECTOR, 1)
        chosen = torch.where(of_elements, wrong[:, :whole], right[:, :whole])
        return torch.cat((chosen, right[:, whole:]), 1)


class PairsSwapped(_Vectors):
    """A conversion packs two numbers into 16 bits, the second in front (nvFuser #4711: `cvt.rn.satfinite.e4m3x2` takes them the other way
    round), so that neighbours change places, two by two. Nothing is lost, and no amax, scale or norm of a row is another."""

    name = "pairs-swapped"

    def swapped(self, codes: Tensor, columnwise: bool) -> Tensor:
        """Each two that lie side by side in memory, along K of the GEMM."""
        if columnwise:
            return self.swapped(codes.t(), False).t()
        whole = codes.shape[1] // 2 * 2
        pairs = codes[:, :whole].unflatten(1, (-1, 2)).flip(-1).flatten(1)
        return torch.cat((pairs, codes[:, whole:]), 1)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        return operand.values(self.swapped(operand.codes, operand.columnwise))


class CodesReadAsIntegers(_Vectors):
    """The type gets lost on the way, and the bytes of FP8 are taken for whole numbers, with a sign or without, and multiplied by the same
    scales (aiter #3332: a device that is in no table falls back to `uint8`; DLPack #156: FP8 travels as `int8`). Of E4M3 small numbers
    become nearly as large as the largest, of E5M2 all become small; nothing is NaN."""

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
