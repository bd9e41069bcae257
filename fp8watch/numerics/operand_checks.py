"""What an operand must be before it is quantised. Each refusal says the value, the rule and the remedy."""

from __future__ import annotations

import math

import torch

OPERAND_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SHAPES = ((1, 128), (128, 128))
_FLOAT32_MAX = torch.finfo(torch.float32).max
DOUBLE_SUBNORMAL = 5e-324
"""Times 1 it is 0 where this thread flushes subnormal numbers."""


def check_operand(x: torch.Tensor) -> None:
    """Refuse what is not a dense, non-empty 2-D tensor of float32, bfloat16 or float16.

    Raises:
        TypeError: not a tensor, or of another dtype.
        ValueError: another number of dimensions, no elements, no data, or a sparse layout.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}: must be a torch.Tensor; use torch.as_tensor(x)")
    if x.dtype not in OPERAND_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}: must be float32, bfloat16 or float16; cast it first, e.g. x.float()")
    if x.dim() != 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: must be 2-D [M, K]; fold the leading dimensions, e.g. x.reshape(-1, K)"
        )
    if x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: must have at least one row and column; skip empty operands")
    if x.layout != torch.strided:
        raise ValueError(f"x has layout {x.layout}: must be dense; use x.to_dense()")
    if x.is_meta:
        raise ValueError("x is on device meta: it has a shape but no values; materialise it on a device first")


def check_denormals(x: torch.Tensor) -> None:
    """Refuse to compute on the CPU while this thread flushes subnormal numbers to zero.

    A scale_inv below 2^-126 would silently become 0, and the tile with it.

    Raises:
        RuntimeError: torch.set_flush_denormal(True) is in force.
    """
    # The processor mode is one for float and double, so Python's own arithmetic shows it, for 30 ns.
    if x.is_cpu and DOUBLE_SUBNORMAL * 1.0 == 0.0:
        raise RuntimeError(
            "subnormal numbers are flushed to zero in this thread: blockwise scales need them (a scale_inv may be as "
            "small as 2^-127); call torch.set_flush_denormal(False)"
        )


def check_tile_shape(tile_shape: tuple[int, int]) -> tuple[int, int]:
    """Return the tile shape as two positive integers.

    Raises:
        ValueError: anything else.
    """
    try:
        rows, columns = (int(n) for n in tile_shape)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise ValueError(f"tile_shape={tile_shape!r}: must be (rows, columns), both at least 1; e.g. (1, 128)")
    return rows, columns


def check_block_shape(block_shape: tuple[int, int]) -> tuple[int, int]:
    """Return the block shape if the blockwise recipe has it.

    Raises:
        ValueError: anything but (1, 128) and (128, 128).
    """
    shape = tuple(block_shape) if isinstance(block_shape, (tuple, list)) else ()
    if shape not in BLOCK_SHAPES:
        raise ValueError(
            f"block_shape={block_shape!r}: must be (1, 128) for activations and gradients or (128, 128) for weights; "
            "for tiles along the rows quantise the transpose"
        )
    return int(shape[0]), int(shape[1])


def check_eps(eps: float, name: str = "amax_epsilon") -> float:
    """Return eps as a float.

    Raises:
        ValueError: negative, NaN, or not representable in float32.
    """
    value = float(eps)
    if math.isnan(value) or not 0.0 <= value <= _FLOAT32_MAX:
        raise ValueError(f"{name}={eps!r}: must be a finite number, 0 or more; 0 switches it off, 1e-12 is usual")
    return value


def check_scale(scale: torch.Tensor, num_tiles: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    """Return a given scale if it fits the operand.

    Raises:
        TypeError: not a float32 tensor.
        ValueError: another shape than one value a tile, or on another device than the operand.
    """
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise TypeError(f"scale is {got}: must be a float32 tensor, one value a tile")
    if tuple(scale.shape) != num_tiles:
        raise ValueError(f"scale has shape {tuple(scale.shape)}: must be {num_tiles}, one value a tile of the operand")
    if scale.device != x.device:
        raise ValueError(f"scale is on {scale.device}, the operand on {x.device}: move the scale there")
    return scale
