"""The three GEMMs of experts, emulated: for each group of rows those of a Linear, see `emulated_gemm`.

Shapes:     rows of all groups, and the weight of each -> rows, or a gradient for each weight     Thread: training

    GEMM    reads (tiles: blockwise)                                          gives
    fprop   input rowwise 1×128, each weight in blocks of its own             y [S, N]
    dgrad   grad_output rowwise 1×128, the same weights                       grad of input [S, K]
    wgrad   grad_output and input columnwise, each group in tiles of its own  grad of weights [E, N, K]

A group without rows costs nothing, and its weight has a gradient of zero. Rows of no group are zero, and are not computed.
Legend: S rows, E groups, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8watch.kernels import emulated_gemm

Ranges = Sequence[tuple[int, int]]
"""Of each group: its first row, and the row after its last."""

WeightOf = Callable[[int], Tensor]
"""Number of a group -> its dequantised weight [N, K] float32, made where it is needed."""


def fprop(input_SK: Tensor, weight_of: WeightOf, groups: Ranges, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return input · weightᵀ of each group as `shape` [S, N] of dtype.

    Args:
        input_SK: float32, dequantised; rows behind the last group need not be there.
        weight_of: of each group that has rows.
        groups: one behind the other.
        shape: of the result, rows of no group included.
        dtype: of the result.
    """
    y = torch.zeros(shape, dtype=dtype, device=input_SK.device)
    for expert, (start, end) in enumerate(groups):
        if start < end:
            y[start:end] = emulated_gemm.fprop(input_SK[start:end], weight_of(expert), None, dtype)
    return y


def dgrad(grad_SN: Tensor, weight_of: WeightOf, groups: Ranges, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return grad_output · weight of each group as `shape` [S, K] of dtype. Arguments as for `fprop`."""
    dx = torch.zeros(shape, dtype=dtype, device=grad_SN.device)
    for expert, (start, end) in enumerate(groups):
        if start < end:
            dx[start:end] = emulated_gemm.dgrad(grad_SN[start:end], weight_of(expert), dtype)
    return dx


def wgrad(grad: Tensor, input: Tensor, groups: Ranges, dtype: torch.dtype) -> Tensor:
    """Return grad_outputᵀ · input of each group as [E, N, K] of dtype.

    Args:
        grad: columnwise copy float32, each group padded to whole tiles.
        input: likewise.
        groups: rows of each in both, without padding.
        dtype: of the result.
    """
    dw = torch.zeros((len(groups), grad.shape[1], input.shape[1]), dtype=dtype, device=grad.device)
    for expert, (start, end) in enumerate(groups):
        if start < end:
            dw[expert] = emulated_gemm.wgrad(grad[start:end], input[start:end], dtype)
    return dw
