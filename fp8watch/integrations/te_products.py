"""The products of one call of a GEMM of Transformer Engine, each with the row of the operand that it is told at.

Shapes:     codes and scales of a GEMM, what it returned -> per product (row, A, B, output [M, N], bias)
Thread:     training, and autograd's

Most modules multiply once a call. `GroupedLinear` multiplies for all of its experts: fprop and dgrad write rows of one tensor,
in the order of the experts, wgrad writes a tensor for each. Products of grouped tensors, one call for all experts from 2.17
on, do not pass here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8watch.integrations.te_frames import Frame
from fp8watch.integrations.te_modules import name_of
from fp8watch.integrations.te_tensors import is_per_tensor

_TOLD_AT = {"TN": ("input", "rowwise"), "NN": ("grad_output", "rowwise"), "NT": ("grad_output", "columnwise")}
"""Layout -> operand and direction of the row that a product belongs to: fprop, dgrad, wgrad."""


class Product(NamedTuple):
    """One product."""

    row: int
    a: Any  # the tensors that were multiplied
    b: Any
    output: Tensor  # [M, N], of a floating type that is not FP8
    bias: Tensor | None


def products_of(
    frame: Frame,
    rows: Mapping[tuple[str, str, str], int],
    a: Any,
    b: Any,
    layout: str,
    how: Mapping[str, Any],
    out: Any,
) -> list[Product]:
    """The products of one call; those that are not plain tensors, or have no row, are left out.

    Args:
        frame: call of the module, which has counted this product.
        rows: (name, operand, direction) -> row.
        a, b: what was multiplied: tensors, or a list of them for each.
        layout: TN, NN or NT.
        how: further arguments.
        out: what was returned.
    """
    if layout not in _TOLD_AT:
        return []
    te, bias = frame.te, how.get("bias") if layout == "TN" else None
    made = out[0] if isinstance(out, tuple | list) else out
    if te.kind == "GroupedLinear":
        if not isinstance(a, list | tuple) or not isinstance(b, list | tuple):
            return []
        biases = bias if how.get("use_bias") and isinstance(bias, list | tuple) else [None] * len(a)
        each = _of_experts(made if isinstance(made, list | tuple) else out, b)
        found = [(name_of(te, i), *four) for i, four in enumerate(zip(a, b, each, biases, strict=True))]
    else:
        number = frame.num_products.get(layout, 1) - 1
        index = number if layout == "TN" else te.num_gemms - 1 - number
        found = [(name_of(te, index), a, b, made, bias)]
    products = []
    for name, left, right, output, added in found:
        operand, direction = _TOLD_AT[layout]
        if direction == "columnwise" and is_per_tensor(right, True):
            direction = "rowwise"  # the row of both
        row = rows.get((name, operand, direction))
        if row is None or type(output) not in (Tensor, torch.nn.Parameter) or not output.numel():
            continue
        if output.is_floating_point() and output.dtype.itemsize > 1:
            added = added if isinstance(added, Tensor) and added.numel() else None
            products.append(Product(row, left, right, output.detach().reshape(-1, output.shape[-1]), added))
    return products


def _of_experts(made: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
    """The output of each expert: a tensor of its own, or rows of one tensor."""
    if len(made) == len(b) > 1:
        return made
    counts = [math.prod(tuple(t.shape if isinstance(t, Tensor) else t.size())[:-1]) for t in b]
    whole = made[0].reshape(-1, made[0].shape[-1])
    if sum(counts) == len(whole):
        return list(whole.split(counts))
    return made if len(made) == len(b) else [None] * len(b)
