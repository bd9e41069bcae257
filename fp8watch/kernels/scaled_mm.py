"""The three GEMMs of a Linear by torch._scaled_mm: block-scaled FP8 products of cuBLASLt, on Hopper.

Shapes:     codes and scale_inv of two operands -> product     Thread: training, and autograd's

Operands stay codes with their scale_inv: one byte an element until backward. cuBLASLt accumulates each 128-wide slice of
the contraction by itself and multiplies by both scales; `use_fast_accum` stays off, it would keep 14 bits only.

What the product asks for (a: [M, K] row-major, b: [K, N] column-major; checked in torch 2.8 to 2.13):
    1×128 scales of a         float32 [M, K/128], strides (1, M)
    1×128 scales of b         float32 [K/128, N], strides (N, 1)
    128×128 scales of b       float32 [K/128, N/128], strides (1, K/128), and K/128 a multiple of 4: torch lets other
                              numbers pass, cuBLASLt reads them with padding that is not there, and the product is wrong
    formats                   not E5M2 by E5M2
The contraction is therefore padded with zeros to whole blocks, in fours for 128×128 scales; where it is a multiple of
512, as in most models, nothing is copied.

State of this file: layouts and arithmetic tested on the CPU against an emulation of these rules, and shapes against
torch's own checks. On an H200 (torch 2.11, CUDA 13.0) products are those of the codes within 1.3e-4 in float32.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

NAME = "scaled_mm"
BLOCK = 128
TILES = ((1, BLOCK), (BLOCK, BLOCK), (1, BLOCK))
"""Of input, weight and grad_output: what `fprop`, `dgrad` and `wgrad` multiply."""
MULTIPLE = 16  # rows and columns of the product, and the contraction: padded with zeros
_BLOCKS_AT_ONCE = 4  # 128×128 scales lie in lines of 16 bytes
_CUBLASLT = 120900
NO_GROUPS = "torch's scaled_grouped_mm has no 1×128 by 128×128 scales up to 2.13, and is not used from there on"
"""Why experts are not multiplied as codes: what it has are one scale a row (Hopper) and tiles of 32 and 16 (Blackwell)."""
_OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class Codes(NamedTuple):
    """One quantised operand, as `fp8watch.kernels.triton` and `reference` return it.

    Any strides of `data` are right; those that are named below need no copy.
    """

    data: torch.Tensor  # an FP8 dtype: [M, K]
    scale_inv: torch.Tensor  # float32 [ceil(M/bm), ceil(K/bk)]


def probe(device: torch.device) -> str | None:
    """Return why these GEMMs cannot run on the device, or None when they can."""
    if device.type != "cuda":
        return f"serves cuda tensors, not {device.type}"
    if not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no torch._scaled_mm: 2.8 or later is needed"
    if torch.version.hip is not None:
        return "ROCm: 1×128 and 128×128 scales are cuBLASLt's"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if _torch_version() < (2, 8):
        return f"torch {torch.__version__} does not know 1×128 and 128×128 scales: 2.8 or later is needed"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"sm_{major}{minor}: cuBLASLt has 1×128 and 128×128 scales on sm_90 (Hopper) only"
    version = _cublaslt_version()
    if version < _CUBLASLT:
        return f"cuBLASLt {version // 10000}.{version // 100 % 100}: 12.9 or later is needed, of a torch built for CUDA 12.9"
    return None


def refuses(input_format: str, weight_format: str, grad_format: str, dtype: torch.dtype) -> str | None:
    """Return why a Linear cannot be computed here, or None: to be asked once, when it is taken over."""
    pairs = {
        "fprop": (input_format, weight_format),
        "dgrad": (grad_format, weight_format),
        "wgrad": (grad_format, input_format),
    }
    for gemm, formats in pairs.items():
        if formats == ("E5M2", "E5M2"):
            return f"{gemm} would multiply E5M2 by E5M2, which cuBLASLt does not have; use HYBRID or E4M3"
    if dtype not in _OUT_DTYPES:
        return f"results of {dtype}: float32, bfloat16 or float16 needed"
    return None


def fprop(input: Codes, weight: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return input · weightᵀ + bias as [M, N] of dtype.

    Args:
        input: [M, K] in tiles 1×128, row-major.
        weight: [N, K] in blocks 128×128, row-major.
        bias: [N] or None. With one, the product leaves in float32, the bias is added there, and the cast comes last.
        dtype: float32, bfloat16 or float16.
    """
    product = _mm(input, weight, block_b=True, dtype=dtype if bias is None else torch.float32)
    return product if bias is None else (product + bias.to(torch.float32)).to(dtype)


def dgrad(grad_output: Codes, weight: Codes, dtype: torch.dtype) -> torch.Tensor:
    """Return grad_output · weight as [M, K] of dtype.

    Args:
        grad_output: [M, N] in tiles 1×128, row-major.
        weight: [N, K] in blocks 128×128, as for fprop; with column-major codes it is not copied.
        dtype: float32, bfloat16 or float16.
    """
    return _mm(grad_output, Codes(weight.data.t(), weight.scale_inv.t()), block_b=True, dtype=dtype)


def wgrad(grad_output: Codes, input: Codes, dtype: torch.dtype) -> torch.Tensor:
    """Return grad_outputᵀ · input as [N, K] of dtype.

    Args:
        grad_output: [M, N] in tiles 128×1; column-major, as `triton.quantize_both(transposed=True)` leaves it.
        input: [M, K] in tiles 128×1; column-major.
        dtype: float32, bfloat16 or float16.
    """
    a = Codes(grad_output.data.t(), grad_output.scale_inv.t())
    return _mm(a, Codes(input.data.t(), input.scale_inv.t()), block_b=False, dtype=dtype)


def _mm(a: Codes, b: Codes, *, block_b: bool, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] with 1×128 scales by the transpose of b [N, K] with 1×128 or 128×128 scales: [M, N] of dtype.

    Raises:
        TypeError: a scale_inv is not float32, or a result dtype that the product does not have.
        ValueError: shapes that do not fit.
    """
    _check(a, b, block_b, dtype)
    rows, length = a.data.shape
    columns = b.data.shape[0]
    if rows == 0:
        return torch.empty((0, columns), dtype=dtype, device=a.data.device)
    step = BLOCK * (_BLOCKS_AT_ONCE if block_b else 1)
    padded = -(-length // step) * step
    pad_rows, pad_columns = -rows % MULTIPLE, -columns % MULTIPLE
    data_a, data_b = _padded(a.data, pad_rows, padded - length), _padded(b.data, pad_columns, padded - length)
    blocks = padded // BLOCK
    scale_a = _ones_around(a.scale_inv, pad_rows, blocks - a.scale_inv.shape[1])
    # a block has room for the padding of its rows
    scale_b = _ones_around(b.scale_inv, 0 if block_b else pad_columns, blocks - b.scale_inv.shape[1])
    if scale_a.stride(0) != 1 or scale_a.stride(1) != scale_a.shape[0]:
        scale_a = scale_a.t().contiguous().t()
    if block_b:
        scale_b = scale_b.contiguous().t()
    else:
        scale_b = scale_b.t().contiguous()
    out = torch._scaled_mm(
        data_a, data_b.t(), scale_a=scale_a, scale_b=scale_b, bias=None, out_dtype=dtype, use_fast_accum=False
    )
    out = out[:rows] if pad_rows else out
    return out[:, :columns].contiguous() if pad_columns else out


def _check(a: Codes, b: Codes, block_b: bool, dtype: torch.dtype) -> None:
    if dtype not in _OUT_DTYPES:
        raise TypeError(f"result dtype {dtype}: must be float32, bfloat16 or float16")
    (rows, length), (columns, other) = a.data.shape, b.data.shape
    if length != other:
        raise ValueError(f"contraction of {length} by {other} elements: must be equal")
    blocks = -(-length // BLOCK)
    expected_b = (-(-columns // BLOCK) if block_b else columns, blocks)
    for codes, expected in ((a, (rows, blocks)), (b, expected_b)):
        if codes.scale_inv.dtype != torch.float32:
            raise TypeError(f"scale_inv is {codes.scale_inv.dtype}: must be float32")
        if tuple(codes.scale_inv.shape) != expected:
            raise ValueError(
                f"scale_inv has shape {tuple(codes.scale_inv.shape)}: must be {expected}, one value a tile"
            )


def _bytes(data: torch.Tensor) -> torch.Tensor:
    """Codes as bytes: fewer operations know FP8."""
    return data.view(torch.uint8)


def _padded(data: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Row-major codes with zeros after the last row and column; the tensor itself where nothing is to be done."""
    if rows or columns:
        return F.pad(_bytes(data), (0, columns, 0, rows)).contiguous().view(data.dtype)
    if data.stride(1) == 1 and data.stride(0) >= max(data.shape[1], 2) and data.stride(0) % MULTIPLE == 0:
        return data
    return _bytes(data).contiguous().view(data.dtype)


def _ones_around(scale_inv: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales of the padding: any finite number, the codes there are 0."""
    return F.pad(scale_inv, (0, columns, 0, rows), value=1.0) if rows or columns else scale_inv


def _torch_version() -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split(".")[:2])


@lru_cache(maxsize=1)
def _cublaslt_version() -> int:
    """Version of the cuBLASLt that this process uses, e.g. 120901; of the one that torch was built for if it hides."""
    built = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    for name in (f"libcublasLt.so.{built[0]}", "libcublasLt.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(library.cublasLtGetVersion())
    return built[0] * 10000 + built[1] * 100
