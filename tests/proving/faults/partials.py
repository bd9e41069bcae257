"""Parts of a product that are put together wrongly: sums that are reduced in FP8, accumulators that begin with the tile before, tiles that
are overwritten before they have been stored, one operand of wgrad that is rotated while the other is not.

Severity is the relative error of what the GEMM reads or gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from proving.faults._base import one_of, relative_error
from proving.faults._kernel import KernelFault, Key
from proving.faults._sites import Operand
from proving.faults.products import ProductFault
from torch import Tensor

_TILE, _ROTATED = 8, 16
_MOST_OCTAVES = 36


class PartialSumsInFp8(ProductFault):
    """A row-parallel product is summed over the ranks in FP8 (ColossalAI #5920: accuracy falls, #5921; vLLM #39783): each part is cast with
    a scale that leaves room for the sum, and for more than that. How much follows from the error that was drawn."""

    name = "partial-sums-in-fp8"
    modes = ("kernel-output-fault", "accumulator-precision")
    gemms = ("fprop", "dgrad")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_ranks = one_of(self.rng, (2, 4, 8))
        self.format = one_of(self.rng, (torch.float8_e4m3fn, torch.float8_e5m2))
        self.octaves: dict[tuple[int, int], int] = {}
        self.note(num_ranks=self.num_ranks, format=str(self.format).removeprefix("torch."))

    def reduced(self, parts: list[Tensor], octaves: int) -> Tensor:
        """The sum of the parts as they are on the wire."""
        largest = torch.finfo(self.format).max
        amax = torch.stack([part.abs().max() for part in parts]).max().clamp_min(1e-30)
        scale = largest / amax * 2.0**-octaves
        return (
            torch.stack([(part * scale).clamp(-largest, largest).to(self.format).float() for part in parts]).sum(0)
            / scale
        )

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        parts = [x @ y for x, y in zip(a.chunk(self.num_ranks, 1), b.chunk(self.num_ranks, 0), strict=True)]
        whole, key = torch.stack(parts).sum(0), (out.shape[1], a.shape[1])
        bias = out.float() - whole
        if key not in self.octaves and float(out.abs().max()) > 0:
            errors = [relative_error(self.reduced(parts, octaves) + bias, out) for octaves in range(_MOST_OCTAVES)]
            self.octaves[key] = min(range(_MOST_OCTAVES), key=lambda octaves: abs(errors[octaves] - self.error))
            self.note(octaves=self.octaves[key])
        return self.reduced(parts, self.octaves.get(key, 0)) + bias


class _TilesOfOutput(ProductFault):
    """Some tiles of 8 × 8 of a product hold something else, as many as make the error; always the same ones."""

    modes = ("kernel-output-fault", "accumulator-precision")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = float(self.rng.random())
        self.chosen: dict[tuple[int, ...], Tensor] = {}

    def filled(self, out: Tensor, tiles: Tensor, a: Tensor) -> Tensor:
        """What the tiles [rows / 8, columns / 8, 8, 8] would be if all were wrong."""
        raise NotImplementedError

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        num_rows, num_columns = (n // _TILE * _TILE for n in out.shape)
        energy = float(out.double().square().sum())
        if not num_rows or not num_columns or not energy > 0:
            return out
        got = out.clone()
        view = got[:num_rows, :num_columns].unflatten(0, (-1, _TILE)).unflatten(2, (-1, _TILE)).transpose(1, 2)
        wrong = self.filled(out, view, a)
        if (key := tuple(out.shape)) not in self.chosen:
            errors, enough = (wrong - view).double().square().sum((2, 3)).flatten(), self.error**2 * energy
            order = (torch.arange(len(errors)) + int(self.start * len(errors))) % len(errors)
            spared = errors[order] > 2 * enough  # a tile that alone is worse than was drawn
            if self.severity != "severe" and not spared.all():
                order = order[~spared]
            self.chosen[key] = order[: int((errors[order].cumsum(0) < enough).sum()) + 1]
            self.note(num_tiles=len(self.chosen[key]))
        hit = torch.zeros(view.shape[:2], dtype=torch.bool).flatten()
        hit[self.chosen[key]] = True
        view.copy_(torch.where(hit.view(*view.shape[:2], 1, 1), wrong.to(out.dtype), view.clone()))
        return got


class AccumulatorOfTileBefore(_TilesOfOutput):
    """A kernel that works on one tile after another does not clear its accumulators, so that a tile holds the product of the one before as
    well (tilelang #2617: `clear_accum` is ignored; ThunderKittens #141)."""

    name = "accumulator-of-tile-before"

    def filled(self, out: Tensor, tiles: Tensor, a: Tensor) -> Tensor:
        return tiles + tiles.flatten(0, 1).roll(1, 0).view_as(tiles)


class StoreRacedByLoad(_TilesOfOutput):
    """One tile of shared memory holds an operand first and the product afterwards, and the next operand is loaded before the product has been
    stored (uccl's mKernel #18: for large shapes alone): what is stored is the operand. Not in every call."""

    name = "store-raced-by-load"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.chance, self.num_calls = float(self.rng.uniform(0.4, 1.0)), 0
        self.note(chance=round(self.chance, 2))

    def filled(self, out: Tensor, tiles: Tensor, a: Tensor) -> Tensor:
        rows, columns = len(tiles) * _TILE, tiles.shape[1] * _TILE
        operand = a[:rows].repeat(1, -(-columns // a.shape[1]))[:, :columns]
        return operand.unflatten(0, (-1, _TILE)).unflatten(2, (-1, _TILE)).transpose(1, 2)

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 1 and self.rng.random() > self.chance:
            return out
        return super().wrong(out, a, b)


class RotatedInOneOperand(KernelFault):
    """wgrad's operands are to be rotated by one random Hadamard matrix of 16 tokens each, which cancels in the product; one of the two is, the
    other is not (Primus-Turbo #414: a recipe for each direction; Transformer Engine #3300: shapes that the fused kernel does not take).
    How many groups of tokens follows from the error that was drawn."""

    name = "rotated-in-one-operand"
    operands = ("input", "grad_output")
    directions = ((True,),)
    modes = ("quantiser-fault", "kernel-output-fault")
    only = ("medium", "severe")  # of one group of a small batch the error is no less

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drawn.pop("race")
        one = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        matrix = one
        while len(matrix) < _ROTATED:
            matrix = torch.kron(matrix, one)
        signs = torch.from_numpy(self.rng.choice([-1.0, 1.0], _ROTATED)).float()
        self.rotation = matrix * signs / _ROTATED**0.5
        self.num_groups: dict[Key, int] = {}

    def rotated(self, x: Tensor) -> Tensor:
        """Groups of 16 rows, each mixed; what remains of them stays."""
        whole = len(x) // _ROTATED * _ROTATED
        groups = torch.einsum("ij,gjk->gik", self.rotation, x[:whole].float().unflatten(0, (-1, _ROTATED)))
        return torch.cat((groups.flatten(0, 1), x[whole:].float()))

    def spoil(self, name: str, operand: Operand) -> Tensor:
        key, right = (name, operand.columnwise), operand.right
        energy, num = float(right.double().square().sum()), len(right) // _ROTATED
        if not operand.columnwise or not num or not energy > 0:
            return right
        job = replace(operand.job, stats=False, heavy=False)
        wrong = operand.sound.quantize_dequantize(self.rotated(operand.x), job)[0]
        first = int(self.start * num)
        order = torch.cat(
            [torch.arange(g * _ROTATED, (g + 1) * _ROTATED) for g in [(first + i) % num for i in range(num)]]
        )
        if key not in self.num_groups:
            errors = (wrong - right).double().square().sum(1)[order].view(num, -1).sum(1).cumsum(0)
            self.num_groups[key] = min(num, int((errors < self.error**2 * energy).sum()) + 1)
            self.note(num_groups=self.num_groups[key], of=num)
        rows, out = order[: self.num_groups[key] * _ROTATED], right.clone()
        out[rows] = wrong[rows]
        self.note(error=relative_error(out, right), at=f"{name} {tuple(out.shape)}")
        return out
