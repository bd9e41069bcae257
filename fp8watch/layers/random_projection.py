"""Rows of what a GEMM made, held against its operands at the price of three matrix-vector products.

Shapes:     output [M, N], operands [M, K] and [K, N] -> error and gain of its rows
Thread:     training, and autograd's

With signs r drawn once, output·r must be a·(b·r) whatever the GEMM: R. Freivalds, "Probabilistic machines can use less
running time", IFIP Congress 1977; in use against corrupted hardware since Huang and Abraham, IEEE Trans. Comput. C-33,
1984. Of an output that is off by e the mean of ‖e·r‖² over signs is ‖e‖², so the result estimates the same error and
gain as a shadow does (`fp8watch.layers.shadow_gemm`), of many rows and all columns. It is rougher: what the output's
dtype rounds is in it, so an error below `ROUNDINGS` of that is none; finer ones are for the module's turn.

Few rows that nobody wrote are a small error of all rows, as that of a narrow accumulator is. So the row that is furthest off
is multiplied out: where little was found (on the CPU), one that is wholly wrong is the error. And rows that are nearly one vector
may all lie at right angles to the signs, so that what rounding took is much beside what is left of them: where the row that is
furthest off is right, there is no error.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fp8watch.kernels import cpu
from fp8watch.quantize.output_checks import GemmCheck

ROUNDINGS = 8.0
WHOLLY_WRONG = 0.5
"""Error of a row that is something else: the narrowest accumulator loses a tenth of that."""
AN_ACCUMULATORS = 0.1
"""Error of all rows below which a narrow accumulator might have made it."""
LEAST_ERROR = 1e-3
"""Of a float32 output: what float32 sums of products lose is five orders below the operands' quantisation."""

_CANCELLED = 2.0**-22  # of ‖a‖²·‖b‖²: where products cancel, what float32 loses is no error


@lru_cache(maxsize=256)
def signs(num: int, device: torch.device) -> Tensor:
    """±1 float32 [num], the same in each call: the generators belong to training."""
    drawn = np.random.default_rng(num).integers(0, 2, num, dtype=np.int8) * 2 - 1
    return torch.from_numpy(drawn.astype(np.float32)).to(device, non_blocking=True)


@torch.no_grad()
def check_product(
    output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, rows: slice = slice(None)
) -> GemmCheck | None:
    """Hold rows of a GEMM's output against a·b + bias.

    Args:
        output: [M, N] as the GEMM gave it, any floating dtype.
        a: [M, K] float32, what the GEMM reads.
        b: [K, N] float32, what the GEMM reads.
        bias: [N] or None.
        rows: of the output.

    Returns:
        Error and gain as of a shadow; both those of a right output where the error is what the output's dtype rounds. Rows
        with something that is not finite enter neither. None: on the CPU, where nothing is wrong.
    """
    r = signs(output.shape[1], output.device)
    allowed = max(ROUNDINGS * torch.finfo(output.dtype).eps / 2, LEAST_ERROR)
    if output.is_cpu and cpu.product_holds(output, a, b, bias, r, slice(*rows.indices(output.shape[0])), allowed):
        return None
    of_b = b @ r
    right = (a @ of_b)[rows] if a.stride(0) == 1 else a[rows] @ of_b  # rows of a transposed one are a copy
    if bias is not None:
        right = right + bias.to(torch.float32) @ r
    got = output[rows].to(torch.float32) @ r
    wrong = got - right
    if (
        wrong.is_cpu
        and float(wrong.dot(wrong)) <= allowed**2 * (size := float(right.dot(right)))
        and 0 < size < math.inf
    ):
        return None  # all of it is finite, and what is held below finds less
    both = right.isfinite() & got.isfinite()
    right, got = right.where(both, 0.0), got.where(both, 0.0)
    wrong = got - right
    norms = torch.linalg.vector_norm(a[rows]) * torch.linalg.vector_norm(of_b)  # the second is about ‖b‖
    energy = torch.maximum(right.square().sum(), norms.nan_to_num(0.0, 0.0).square() * _CANCELLED)
    # below its normal numbers a dtype loses as much of a small element as of any: float16 does so from 6e-5 on
    info = torch.finfo(output.dtype)
    least = ROUNDINGS * info.smallest_normal * info.eps / 2 / allowed
    energy = energy.clamp_min(least**2 * right.numel() * output.shape[1])
    error = torch.linalg.vector_norm(wrong) / energy.sqrt()
    fine = (error <= allowed) | (energy == 0)
    if fine.is_cpu and bool(fine):
        return None
    worst = _worst_row(output[rows], a[rows], b, bias, wrong, right)
    fine |= worst <= allowed
    if fine.is_cpu and bool(fine):
        return None
    if fine.is_cpu and float(error) < AN_ACCUMULATORS and WHOLLY_WRONG < float(worst) < math.inf:
        error = torch.maximum(error, worst)
    gain = 1 + (wrong * right).sum() / energy
    nothing = torch.zeros((), dtype=torch.int64, device=output.device)
    return GemmCheck(error.masked_fill(fine, 0.0).float(), gain.masked_fill(fine, 1.0).float(), nothing)


def _worst_row(output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, wrong: Tensor, right: Tensor) -> Tensor:
    """Error of the row that is furthest off, of all its columns; NaN or Inf where it is not finite."""
    at = wrong.abs().argmax().reshape(1)
    exact = a.index_select(0, at) @ b
    exact = exact if bias is None else exact + bias.to(torch.float32)
    size = torch.maximum(torch.linalg.vector_norm(exact), right.square().mean().sqrt() / 8)  # of a row of ordinary size
    off: Tensor = torch.linalg.vector_norm(output.index_select(0, at).to(torch.float32) - exact) / size
    return off
