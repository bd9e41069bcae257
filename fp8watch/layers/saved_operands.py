"""Forward operands of a Linear: values for the GEMM that runs now, codes and scales for the one in backward.

Shapes:     operand [M, K] -> values [M, K] float32, codes [M, K] uint8, scale_inv [Mt, Kt]
Thread:     training, and autograd's

What a forward keeps is a byte an element and its scales, less than the operand itself in bfloat16. Dequantised again in
backward it has the bits that it would have had.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8watch.layers.custom_ops import is_eager, lookup, quantize_dequantize, run_operand, runs_now
from fp8watch.layers.host_op import host_op
from fp8watch.layers.operand_check import hold_kept
from fp8watch.layers.vmap_rules import one_by_one
from fp8watch.numerics.formats import number_format
from fp8watch.quantize.self_consistency import Reads


def _quantize_for_backward(
    x: Tensor, site: Tensor, operand: int, count: bool, now: bool, later: bool, bm: int, bk: int
) -> tuple[Tensor, Tensor, Tensor]:
    outs = run_operand(x, site, operand, count, now, later, codes=False, later=True)
    nothing, no_scale = x.new_empty((0,), dtype=torch.uint8), x.new_empty((0,), dtype=torch.float32)
    if not outs or isinstance(outs[-1], Tensor):  # no tiles, a warm-up, or nothing for backward
        return outs[0] if outs else x.to(torch.float32, copy=True), nothing, no_scale
    values, kept = (outs[0], outs[-1]) if len(outs) == 2 else outs[0] if now else (no_scale.clone(), outs[0])
    return values, kept[0].view(torch.uint8), kept[1]


quantize_for_backward_op = host_op("fp8watch::quantize_for_backward", _quantize_for_backward)


@quantize_for_backward_op.register_fake
def _(
    x: Tensor, site: Tensor, operand: int, count: bool, now: bool, later: bool, bm: int, bk: int
) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    tiles = (1 if bm < 0 else -(-m // bm), 1 if bk < 0 else -(-k // bk))
    return (
        x.new_empty(x.shape if now else (0,), dtype=torch.float32),
        x.new_empty(x.shape if later else (0,), dtype=torch.uint8),
        x.new_empty(tiles if later else (0,), dtype=torch.float32),
    )


def quantize_for_backward(
    x: Tensor, site: Tensor, operand: int, *, count: bool, now: bool, later: bool, tile: tuple[int, int], warms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What the GEMMs read of a forward operand: values for the one that runs now, and what is to be kept for the one in
    backward, with its scale_inv. What is not asked for is empty.

    In a warm-up there are no codes, and the operand is kept in float32; in a graph that was compiled for a recipe with a
    warm-up it always is.

    Args:
        x: [M, K].
        site: see `fp8watch.layers.custom_ops`.
        operand: INPUT or WEIGHT.
        count: whether the call enters the statistics.
        now: a GEMM reads it rowwise.
        later: a GEMM of backward will read its other copy.
        tile: of that copy, rows × columns of the operand, −1 for all of them; in graphs it gives the shapes.
        warms: the recipe has a warm-up.
    """
    if warms and torch.compiler.is_compiling():
        row, column = quantize_dequantize(x, site, operand, count=count, rowwise=now, columnwise=later)
        return row, column, x.new_empty((0,), dtype=torch.float32)
    quantized = _quantize_for_backward if runs_now(x) else quantize_for_backward_op
    values, kept, scale_inv = quantized(x, site, operand, count, now, later, *tile)
    if later and not torch.compiler.is_compiling() and not kept.numel():
        return values, values, scale_inv
    return values, kept, scale_inv


def _dequantize_kept(codes: Tensor, scale_inv: Tensor, site: Tensor, operand: int) -> Tensor:
    plan, first = lookup(site)
    row = plan.sites.row(first, operand, True)
    quantizer = plan.sites.quantizers[row]
    tile = quantizer.tile_for((codes.shape[0], codes.shape[1]))
    kept = Reads(codes.view(number_format(quantizer.spec.format).dtype), scale_inv, tile)
    values = quantizer.backend.dequantize(kept.data, scale_inv, tile)
    if plan.canary.reads_rows and (plan.step.sample.full[row] or plan.stopwatch is not None):
        plan.guard.run("rows", hold_kept, plan, row, quantizer, kept, values)
    return values


dequantize_kept_op = host_op("fp8watch::dequantize_kept", _dequantize_kept)
dequantize_kept_op.register_vmap(one_by_one(dequantize_kept_op))


@dequantize_kept_op.register_fake
def _(codes: Tensor, scale_inv: Tensor, site: Tensor, operand: int) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


def dequantize_kept(kept: Tensor, scale_inv: Tensor, site: Tensor, operand: int) -> Tensor:
    """What `quantize_for_backward` had kept, as values float32 [M, K]."""
    if kept.dtype != torch.uint8:
        return kept
    if is_eager(kept):
        return _dequantize_kept(kept, scale_inv, site, operand)
    values: Tensor = dequantize_kept_op(kept, scale_inv, site, operand)
    return values


torch.fx.node.has_side_effect(torch.ops.fp8watch.quantize_for_backward.default)
