"""`quantize_blockwise`: one tensor in FP8 blocks, with what was lost on the way.

Shapes:     x [M, K] -> data [M, K], scale_inv [Mt, Kt]     Thread: any
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8watch.kernels.backend import Backend
from fp8watch.kernels.registry import resolve
from fp8watch.numerics.formats import Fp8Format
from fp8watch.numerics.operand_checks import check_block_shape, check_denormals, check_operand
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.numerics.tile_stats import TileStats


@dataclass(frozen=True)
class BlockwiseQuantized:
    """A tensor in FP8 blocks."""

    data: torch.Tensor  # torch.float8_*: [M, K]
    scale_inv: torch.Tensor  # float32 [ceil(M/bm), ceil(K/bk)]
    stats: TileStats
    block_shape: tuple[int, int]
    format: Fp8Format
    backend: str
    _dequantizer: Backend

    def dequantize(self) -> torch.Tensor:
        """Return what the codes stand for: float32 [M, K]."""
        return self._dequantizer.dequantize(self.data, self.scale_inv, self.block_shape)


def quantize_blockwise(
    x: torch.Tensor,
    block_shape: tuple[int, int] = (1, 128),
    fp8_format: str = "E4M3",
    power_2_scale: bool = True,
    amax_epsilon: float = 0.0,
    backend: str | None = None,
) -> BlockwiseQuantized:
    """Quantise a tensor as Transformer Engine's Float8BlockScaling does, bit by bit, and measure it.

    Args:
        x: [M, K] float32, bfloat16 or float16; any strides. Not differentiated.
        block_shape: (1, 128) along K, or (128, 128). Blocks at the edges may be cut.
        fp8_format: "E4M3" or "E5M2".
        power_2_scale: scales are powers of two, rounded down; else float32.
        amax_epsilon: an amax below is raised to it.
        backend: a name of `fp8watch.kernels.BACKEND_NAMES`, or None for the fastest that can serve x's device.

    Returns:
        Codes, scale_inv, statistics per block, and `dequantize()`.

    Raises:
        TypeError: x is not a tensor of one of the three dtypes.
        ValueError: x is not 2-D or is empty or on device meta, or another argument is none of the above.
        RuntimeError: subnormal numbers are flushed to zero in this thread (CPU).
    """
    check_operand(x)
    check_denormals(x)
    job = quantize_jobs(check_block_shape(block_shape), fp8_format, bool(power_2_scale), float(amax_epsilon))[-1]
    chosen = resolve(backend, x.device)
    data, scale_inv, stats = chosen.quantize(x, job)
    assert stats is not None
    return BlockwiseQuantized(data, scale_inv, stats, job.tile, job.fmt, chosen.NAME, chosen)
