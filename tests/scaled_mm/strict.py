"""torch._scaled_mm for 1×128 and 128×128 scales, on the CPU: every rule that torch and cuBLASLt have, then float64.

The rules are those of torch 2.8 to 2.13 (aten/src/ATen/native/cuda, Blas.cpp and ScaledBlas.cpp) and of cuBLASLt's
manual on layouts of scaling factors. Where versions differ, what all of them take is asked for.
"""

from __future__ import annotations

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def blocks(n: int) -> int:
    return -(-n // 128)


def _lies(scale: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int]) -> bool:
    return tuple(scale.shape) == shape and all(
        size <= 1 or got == wanted for size, got, wanted in zip(shape, scale.stride(), strides, strict=True)
    )


def _kind(t: torch.Tensor, scale: torch.Tensor) -> str | None:
    """How the scales of row-major t [rows, K] lie."""
    rows, length = t.shape
    if _lies(scale, (rows, blocks(length)), (1, rows)):
        return "1x128"
    if _lies(scale, (blocks(rows), blocks(length)), (blocks(length), 1)):
        assert blocks(length) % 4 == 0, f"{blocks(length)} blocks along the contraction: cuBLASLt would read padding"
        return "128x128"
    return None


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """[M, K] by [K, N]."""
    assert a.dtype in FP8, a.dtype
    assert b.dtype in FP8, b.dtype
    assert not (a.dtype == b.dtype == torch.float8_e5m2), "Multiplication of two Float8_e5m2 matrices is not supported"
    assert a.dim() == b.dim() == 2
    assert a.shape[1] == b.shape[0], f"{tuple(a.shape)} by {tuple(b.shape)}"
    assert a.stride(1) == 1, f"a must be row-major, has strides {a.stride()}"
    assert a.stride(0) > 1
    assert b.stride(0) == 1, f"b must be column-major, has strides {b.stride()}"
    assert b.stride(1) > 1
    assert a.shape[1] % 16 == 0, f"contraction of {a.shape[1]}"
    assert b.shape[1] % 16 == 0, f"{b.shape[1]} columns"
    assert a.shape[0] % 16 == 0, f"{a.shape[0]} rows: strides of the scales must be aligned to 16 bytes"
    assert a.data_ptr() % 16 == 0
    assert b.data_ptr() % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.dim() == scale_b.dim() == 2
    assert a.device == b.device == scale_a.device == scale_b.device
    kinds = _kind(a, scale_a), _kind(b.t(), scale_b.t())
    assert kinds in (("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")), (
        f"Invalid scaling configuration: {tuple(scale_a.shape)} {scale_a.stride()}, {tuple(scale_b.shape)} {scale_b.stride()}"
    )
    assert out_dtype in RESULTS
    assert bias is None, "an epilogue with 1×128 scales has not been seen to work"
    assert scale_result is None
    assert not use_fast_accum, "14 bits of accumulator are too few to train with"
    wide = [_wide(t, scale, kind) for t, scale, kind in ((a, scale_a, kinds[0]), (b.t(), scale_b.t(), kinds[1]))]
    return (wide[0] @ wide[1].t()).to(out_dtype)


def _wide(t: torch.Tensor, scale: torch.Tensor, kind: str | None) -> torch.Tensor:
    per_row = scale if kind == "1x128" else scale.repeat_interleave(128, 0)[: t.shape[0]]
    return t.double() * per_row.double().repeat_interleave(128, 1)[:, : t.shape[1]]
