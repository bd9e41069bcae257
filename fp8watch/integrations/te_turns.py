"""Transformer Engine's modules in their turn: codes held against operands, products against codes.

Shapes:     codes and scales of a GEMM, its output [M, N] -> fields of slab rows     Thread: training, and autograd's

As of our own Linears (`fp8watch.observer.canary`), from what passes `general_gemm`. Left out are products into which more
goes than two operands and a bias: fused activations, gradients added to what was there, outputs that are quantised or
sent to other ranks, grouped products, and 4-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fp8watch.integrations.te_tensors import QuantizedView, read
from fp8watch.numerics.formats import E2M1
from fp8watch.observer.canary import Canary
from fp8watch.quantize.output_checks import GemmCheck
from fp8watch.quantize.self_consistency import Reads, check_quantiser
from fp8watch.recipe import OperandRecipe
from fp8watch.sketch.slab import Slab

Check = Callable[[Tensor, QuantizedView, QuantizedView, "Tensor | None", int], GemmCheck]
"""(output, left [M, K], right [N, K], bias, phase) -> what it is off by."""

_READS = {  # layout -> (operand of A, of B, columnwise of A, of B)
    "TN": ("weight", "input", False, False),
    "NN": ("weight", "grad_output", True, False),
    "NT": ("input", "grad_output", True, True),
}
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
    """

    canary: Canary
    slab: Slab
    check: Check
    observing: Callable[[], bool]

    @property
    def any(self) -> bool:
        """Whether any module has its turn."""
        return bool(self.canary.turn)

    def has(self, first: int) -> bool:
        """Whether the module with this first row has its turn."""
        return first in self.canary.turn and self.observing()

    def operand(self, row: int, x: Tensor, view: QuantizedView, recipe: str, power_2: bool, eps: float) -> None:
        """Hold what a GEMM reads of an operand against the operand; a scale with a history is not known here."""
        if recipe in ("delayed", "nvfp4") or not self.canary.takes(row, "operand"):
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
        self.canary.spent_s += perf_counter() - began

    def gemm(
        self, frame: Any, rows: Mapping[tuple[str, str, str], int], first: int, a: Any, b: Any, layout: str,
        how: Mapping[str, Any], out: Any,
    ) -> None:  # fmt: skip
        """Hold a product against what it reads.

        Args:
            frame: call of the module, which has counted this product.
            rows: (name, operand, direction) -> row.
            first: row of the module.
            a, b: the tensors that were multiplied.
            layout: TN, NN or NT.
            how: further arguments of the product.
            out: what it returned.
        """
        product = out[0] if isinstance(out, tuple | list) else out
        if not self.has(first) or layout not in _READS or frame.te.kind == "GroupedLinear" or frame.again:
            return
        if type(product) not in (Tensor, torch.nn.Parameter) or not product.is_floating_point() or not product.numel():
            return
        if product.dtype.itemsize == 1 or any(how.get(name) is not None and how[name] is not False for name in _MORE):
            return
        number = frame.num_products.get(layout, 1) - 1
        index = number if layout == "TN" else frame.te.num_gemms - 1 - number
        name = f"{frame.te.fqn}.fc{index + 1}" if frame.te.kind == "LayerNormMLP" else frame.te.fqn
        _, operand, of_a, of_b = _READS[layout]
        row = rows.get((name, operand, "columnwise" if of_b else "rowwise"))
        right, left = read(a, of_a), read(b, of_b)
        if row is None or isinstance(left, str) or isinstance(right, str) or E2M1 in (left.fmt, right.fmt):
            return
        if layout == "NT":  # wgrad: gradᵀ · input
            left, right = _turned(left), _turned(right)
        elif layout == "NN":
            right = _turned(right)
        if not self.canary.takes(row, "wgrad" if layout == "NT" else "GEMM"):
            return
        began = perf_counter()
        bias = how.get("bias") if layout == "TN" else None
        bias = bias if isinstance(bias, Tensor) and bias.numel() else None
        flat = product.detach().reshape(-1, product.shape[-1])
        self.slab.accumulate_gemm(row, self.check(flat, left, right, bias, self.canary.phase))
        self.canary.spent_s += perf_counter() - began


def _turned(view: QuantizedView) -> QuantizedView:
    """The transpose."""
    return QuantizedView(view.codes.t(), view.scale_inv.t(), (view.tile[1], view.tile[0]), view.fmt)
