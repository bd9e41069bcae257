"""One fault of a quantiser, as hypotheses are tried on it: a window of the operand, what is read there, and what is right.

Shapes:     operand [M, K] -> a window [m, k] of at most about WINDOW elements
Thread:     training, and autograd's; nothing here reads a value back to the host

The window begins at a multiple of 128 rows and columns, at the tile that was found, so that tiles of every recipe are whole in
it. A small operand is its own window. A hypothesis says what would be read if it held; it is counted by the elements
that are wrong and would be read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fp8watch.kernels.reference import round_to_grid
from fp8watch.numerics.formats import Fp8Format, fp8_format
from fp8watch.quantize.self_consistency import Reads, recipe_scale
from fp8watch.recipe import OperandRecipe
from fp8watch_agent.fault_names import SHARE

WINDOW = 1 << 18
EDGE = 128
_SAME = 2.0**-12  # relative: what dequantisation rounds; numbers of a format are 2^-3 apart
Tile = tuple[int, int]


@dataclass(frozen=True)
class Guess:
    """What one hypothesis says."""

    kind: str
    numbers: dict[str, Tensor | float]  # each a number, or [] on the operand's device; `share` among them

    @property
    def share(self) -> Tensor:
        """Of what was wrong: [] float32."""
        found = self.numbers[SHARE]
        assert isinstance(found, Tensor)
        return found


@dataclass(frozen=True)
class Case:
    """A fault.

    Args:
        x: [M, K] the operand, float32, bfloat16 or float16.
        reads: what the GEMM is handed.
        spec: how the recipe quantises the operand.
        at: [2] integers, the tile that was found; not there (−1): the first one.
        scale: [1, 1] that multiplies before the cast where it has a history; None: the amax gives it.
        before: scale_inv [Mt, Kt] of the step before, where it is known.
        update: how far one update of the optimizer moves a weight, mean over mean of magnitudes, []; None: not known, or no weight.
    """

    x: Tensor
    reads: Reads
    spec: OperandRecipe
    at: Tensor
    scale: Tensor | None = None
    before: Tensor | None = None
    update: Tensor | None = None

    @property
    def fmt(self) -> Fp8Format:
        """Of the recipe."""
        return fp8_format(self.spec.format)

    @cached_property
    def whole(self) -> bool:
        """Whether the window is all of the operand."""
        return self.x.numel() <= WINDOW

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """Rows [m] and columns [k] of the window."""
        shape = int(self.x.shape[0]), int(self.x.shape[1])
        if self.whole:
            num = shape
        else:
            columns = min(-(-shape[1] // EDGE) * EDGE, WINDOW // EDGE)
            num = (max(EDGE, WINDOW // columns // EDGE * EDGE), columns)
        found = []
        for axis in (0, 1):
            size, length = shape[axis], min(num[axis], shape[axis])
            last = -(-(size - length) // EDGE) * EDGE  # the edge of the operand may cut it short
            begin = (self.at[axis].clamp_min(0) * self.reads.tile[axis]).div(EDGE, rounding_mode="floor") * EDGE
            index = begin.clamp_max(last) + torch.arange(length, device=self.x.device)
            found.append(index.clamp_max(size - 1).to(torch.int64))
        return found[0], found[1]

    def part(self, full: Tensor) -> Tensor:
        """The window of something as large as the operand."""
        if self.whole:
            return full
        rows, columns = self.index
        data = full.view(torch.uint8) if full.dtype.itemsize == 1 else full
        return data.index_select(0, rows).index_select(1, columns).view(full.dtype)

    def of_tiles(self, per_tile: Tensor, tile: Tile) -> Tensor:
        """A number of each tile of the operand [Mt, Kt], for each element of the window."""
        rows, columns = self.index
        return per_tile.index_select(0, rows // tile[0]).index_select(1, columns // tile[1])

    @cached_property
    def x_mk(self) -> Tensor:
        """The operand, float32."""
        return self.part(self.x.detach()).to(torch.float32)

    @cached_property
    def codes(self) -> Tensor | None:
        """Codes as they are read, of the format's dtype; None where values are."""
        return None if self.reads.scale_inv is None else self.part(self.reads.data.detach())

    @cached_property
    def inverse(self) -> Tensor | None:
        """scale_inv as it is read, of each element; None where values are read."""
        if self.reads.scale_inv is None:
            return None
        return self.of_tiles(self.reads.scale_inv.detach().to(torch.float32), self.reads.tile)

    @cached_property
    def read(self) -> Tensor:
        """What the GEMM reads, as values."""
        if self.codes is None or self.inverse is None:
            return self.part(self.reads.data.detach()).to(torch.float32)
        return self.codes.to(torch.float32) * self.inverse

    def amax(self, tile: Tile) -> Tensor:
        """Of the tile that each element lies in; a side of −1 is as long as the operand."""
        rows, columns = self.index
        x, (bm, bk) = self.x.detach(), tile
        if bm < 0 and bk < 0:
            return x.abs().amax().to(torch.float32).expand(len(rows), len(columns))
        if bm < 0:
            x = x if self.whole else x.index_select(1, columns)
            return x.abs().amax(0, keepdim=True).to(torch.float32).expand(len(rows), len(columns))
        if bk < 0:
            x = x if self.whole else x.index_select(0, rows)
            return x.abs().amax(1, keepdim=True).to(torch.float32).expand(len(rows), len(columns))
        size = self.x_mk.abs()
        m, k = size.shape
        padded = torch.nn.functional.pad(size, (0, -k % bk, 0, -m % bm))
        tiles = padded.view(padded.shape[0] // bm, bm, padded.shape[1] // bk, bk).amax((1, 3))
        return tiles.repeat_interleave(bm, 0).repeat_interleave(bk, 1)[:m, :k]

    def scale_of(self, amax: Tensor, spec: OperandRecipe | None = None) -> Tensor:
        """The scale that amax gives by a recipe; 1 where there is nothing to scale."""
        spec = self.spec if spec is None else spec
        scale = recipe_scale(amax, spec, fp8_format(spec.format))
        return scale.where((amax > 0) & scale.isfinite(), 1.0)

    @cached_property
    def side(self) -> Tile:
        """Tile of the recipe, −1 for a side as long as the operand."""
        (bm, bk), (m, k) = self.reads.tile, self.x.shape
        if self.spec.tile is None:
            return -1, -1
        return (-1, bk) if bm == m and bm > EDGE else (bm, -1) if bk == k and bk > EDGE else (bm, bk)

    @cached_property
    def right_scale(self) -> Tensor:
        """What multiplies before the cast by the recipe, of each element."""
        if self.scale is not None:
            return self.scale.reshape(1, 1).to(torch.float32).expand(self.x_mk.shape)
        return self.scale_of(self.amax(self.side))

    def quantised(self, scale: Tensor, fmt: Fp8Format | None = None) -> Tensor:
        """Codes of the window under a scale of each element, as numbers of the format."""
        fmt = self.fmt if fmt is None else fmt
        y = (self.x_mk.abs() * scale).clamp(max=fmt.max_finite)
        return torch.copysign(round_to_grid(y, fmt), self.x_mk)

    @cached_property
    def right_code(self) -> Tensor:
        """Codes by the recipe, as numbers."""
        return self.quantised(self.right_scale)

    @cached_property
    def right_inverse(self) -> Tensor:
        """scale_inv by the recipe, of each element."""
        return 1.0 / self.right_scale

    @cached_property
    def right(self) -> Tensor:
        """What the GEMM ought to read."""
        return self.right_code * self.right_inverse

    @cached_property
    def judged(self) -> Tensor:
        """Elements whose value is finite, where their right code is: bool."""
        return self.x_mk.isfinite() & self.right.isfinite()

    def same(self, expected: Tensor) -> Tensor:
        """Elements that are read as expected: bool."""
        near = (self.read - expected).abs() <= expected.abs() * _SAME
        return near | (self.read == expected) | (self.read.isnan() & expected.isnan())

    @cached_property
    def wrong(self) -> Tensor:
        """Elements that are not read as they ought to be: bool."""
        return self.judged & ~self.same(self.right)

    @cached_property
    def num_wrong(self) -> Tensor:
        """How many."""
        return self.wrong.sum()

    def explained(self, expected: Tensor, *, everywhere: bool = False) -> Tensor:
        """The share of wrong elements that are read as expected. [] float32

        Args:
            expected: what would be read if the hypothesis held.
            everywhere: it is one of all of the operand, so that what is right must be as expected too.
        """
        same = self.same(expected)
        share = (same & self.wrong).sum() / self.num_wrong.clamp_min(1)
        if everywhere:
            share = torch.minimum(share, (same & self.judged).sum() / self.judged.sum().clamp_min(1))
        return share.to(torch.float32)
