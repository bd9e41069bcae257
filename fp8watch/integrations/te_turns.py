"""Transformer Engine's modules in their turn: codes held against operands, products against codes.

Shapes:     codes and scales of a GEMM, its output [M, N] -> fields of slab rows     Thread: training, and autograd's

As of our own Linears (`fp8watch.observer.canary`), from what passes `general_gemm`. Left out are products into which more
goes than two operands and a bias: fused activations, gradients added to what was there, outputs that are quantised or
sent to other ranks, and 4-bit codes. Of experts each product is looked at, also the weight gradient of one without tokens,
which is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fp8watch.integrations.te_products import Product
from fp8watch.integrations.te_tensors import QuantizedView, read
from fp8watch.numerics.formats import E2M1
from fp8watch.observer.canary import Canary
from fp8watch.quantize.output_checks import GemmCheck
from fp8watch.quantize.rounding_bound import check_codes
from fp8watch.quantize.self_consistency import QuantiserCheck, Reads, check_quantiser
from fp8watch.recipe import OperandRecipe
from fp8watch.sketch.slab import Slab

Check = Callable[[Tensor, QuantizedView, QuantizedView, "Tensor | None", int], GemmCheck]
"""(output, left [M, K], right [N, K], bias, phase) -> what it is off by."""

_MORE = ("gelu", "accumulate", "quantization_params", "ub", "extra_output", "bulk_overlap")
_TILES = {"blockwise": ((1, 128), (128, 128)), "mxfp8": ((1, 32),)}


@dataclass
class TeTurns:
    """Checks of the modules of one attach.

    Args:
        canary: whose turn it is.
        slab: whose rows take what is found.
        check: holds a product against float64.
        observing: whether anything is.
        met: told of a row whose operand has no elements, and of its shape: the site may never have had any.
    """

    canary: Canary
    slab: Slab
    check: Check
    observing: Callable[[], bool]
    met: Callable[[int, tuple[int, int]], object] = lambda row, shape: None

    @property
    def any(self) -> bool:
        """Whether any module has its turn."""
        return bool(self.canary.turn)

    def has(self, first: int) -> bool:
        """Whether the module with this first row has its turn."""
        return first in self.canary.turn and self.observing()

    def operand(
        self, row: int, x: Tensor, view: QuantizedView, recipe: str, power_2: bool, eps: float, what: str = "operand"
    ) -> None:
        """Hold what a GEMM reads of an operand against the operand; a scale with a history is not known here."""
        if recipe in ("delayed", "nvfp4") or not self.canary.takes(row, what):
            return
        tile = {(128, 1): (1, 128), (32, 1): (1, 32)}.get(view.tile, view.tile)
        tiles = _TILES.get(recipe, (None,))
        if recipe in _TILES and tile not in tiles:
            return
        mx = recipe == "mxfp8"
        spec = OperandRecipe(
            None if recipe == "current" else tile, view.fmt.name, power_2 or mx, 0.0 if mx else eps, "mx" if mx else "current"
        )  # fmt: skip
        began = perf_counter()
        reads = Reads(view.codes.view(view.fmt.dtype), view.scale_inv, view.tile)
        near = None if recipe == "current" else self.slab.tile_to_look_at(row)
        self.slab.accumulate_quantiser(row, check_quantiser(x, reads, spec, None, near, self.canary.phase))
        if (lost := check_codes(x, reads, spec, self.canary.phase)) is not None:
            self.slab.accumulate_quantiser(row, lost)
        self.canary.spent_s += perf_counter() - began

    def copies(self, row: int, rowwise: QuantizedView, columnwise: QuantizedView) -> None:
        """Hold the transposed copy of a weight in 128×128 blocks, which dgrad reads, against the one that fprop reads."""
        if rowwise.tile != (128, 128) or columnwise.tile != (128, 128) or not self.canary.takes(row, "copies"):
            return
        began = perf_counter()
        other = rowwise.codes != columnwise.codes
        scales = rowwise.scale_inv != columnwise.scale_inv
        nothing = torch.zeros((), dtype=torch.int64, device=other.device)
        first = other.flatten().to(torch.uint8).argmax()
        at = torch.stack((first // other.shape[1], first % other.shape[1])) // 128
        self.slab.accumulate_quantiser(
            row,
            QuantiserCheck(
                torch.stack((nothing, other.sum())),
                torch.stack((nothing + scales.numel(), nothing, scales.sum())).to(torch.int32),
                at.to(torch.int32).masked_fill(~other.any(), -1),
            ),
        )
        self.canary.spent_s += perf_counter() - began

    def gemm(self, first: int, products: Sequence[Product], layout: str, how: Mapping[str, Any]) -> None:
        """Hold products against what they read.

        Args:
            first: row of the module.
            products: of one call (te_products).
            layout: TN, NN or NT.
            how: further arguments of the call.
        """
        if not self.has(first) or any(_given(how.get(name)) for name in _MORE):
            return
        for row, a, b, output, bias in products:
            right, left = read(a, layout != "TN"), read(b, layout == "NT")
            if isinstance(left, str) or isinstance(right, str) or E2M1 in (left.fmt, right.fmt):
                continue
            if layout == "NT":  # wgrad: gradᵀ · input
                left, right = _turned(left), _turned(right)
            elif layout == "NN":
                right = _turned(right)
            if self.canary.takes(row, "wgrad" if layout == "NT" else "GEMM"):
                began = perf_counter()
                self.slab.accumulate_gemm(row, self.check(output, left, right, bias, self.canary.phase))
                if not left.codes.numel():  # an expert without tokens
                    self.met(row, (left.shape[1], left.shape[0]))
                    self.slab.note_empty(row)
                self.canary.spent_s += perf_counter() - began


def _given(value: Any) -> bool:
    """Whether an argument of a product asks for something; of experts there is one for each."""
    if isinstance(value, list | tuple):
        return any(_given(v) for v in value)
    return value is not None and value is not False


def _turned(view: QuantizedView) -> QuantizedView:
    """The transpose."""
    return QuantizedView(view.codes.t(), view.scale_inv.t(), (view.tile[1], view.tile[0]), view.fmt)
