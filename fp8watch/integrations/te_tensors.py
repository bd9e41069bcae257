"""Reads Transformer Engine's quantised tensors as codes and scale_inv; no layout of theirs leaves this file.

Shapes:     a quantised tensor -> codes [M, K] uint8, scale_inv [Mt, Kt] float32     Thread: training, and autograd's

Tensors are recognised by their attributes, which are those of versions 2.8 to 2.20; nothing of Transformer Engine is
imported. What cannot be read has a reason, and whoever asked is given it. Scale tensors are padded to multiples of 4 (of
128 and 4 for mxfp8) and the padding is not initialised, so it is cut off by shape:
    blockwise 1×128   rowwise scale_inv [Kt, ~M], columnwise [Mt, ~K] beside codes [K, M]
    blockwise 128×128 rowwise scale_inv [Mt, ~Kt], columnwise [Kt, ~Mt] beside codes [K, M]
    per tensor        one scale_inv, codes in `_data`, transposed ones in `_transpose`
    mxfp8             E8M0 bytes, rowwise [~M, ~Kt], columnwise [~Mt, ~K]; from 2.12 on in the order of the tensor
                      cores: tiles of 128×4 (of the transpose, if columnwise), each in memory as 32×4×4
    hybrid, debug     two tensors, one a direction; each of them is one of the above
    nvfp4             see te_nvfp4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8watch.integrations.te_nvfp4 import BLOCK, decoded, is_nvfp4, parts_of
from fp8watch.numerics.formats import E2M1, FORMATS, Fp8Format

_ABSENT = "it holds no codes of the direction that is multiplied"
_PARTS = (("rowwise_gemm_tensor", "columnwise_gemm_tensor"), ("rowwise_sub_storage", "columnwise_sub_storage"))
"""Attributes of a tensor in debug mode, and of a hybrid one, that hold one direction each."""


@dataclass(frozen=True)
class QuantizedView:
    """One direction of a quantised tensor, in the operand's own rows × columns."""

    codes: torch.Tensor  # uint8 [M, K]; of E2M1 0 to 15
    scale_inv: torch.Tensor  # float32 [Mt, Kt]
    tile: tuple[int, int]
    fmt: Fp8Format

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the operand."""
        return self.codes.shape[0], self.codes.shape[1]

    def values(self) -> torch.Tensor:
        """Decoded values before scale_inv: float32 [M, K]."""
        if self.fmt is E2M1:
            return decoded(self.codes)
        return self.codes.contiguous().view(self.fmt.dtype).to(torch.float32)


def is_quantized(tensor: object) -> bool:
    """Whether Transformer Engine stores this tensor as codes; includes parameters under `--fp8-param-gather`."""
    return hasattr(tensor, "_rowwise_data") or (hasattr(tensor, "_scale_inv") and hasattr(tensor, "_data"))


def view_of(tensor: Any, columnwise: bool) -> QuantizedView | None:
    """Codes and scales that a GEMM reads in that direction; None when missing or in another layout."""
    got = read(tensor, columnwise)
    return None if isinstance(got, str) else got


def read(tensor: Any, columnwise: bool) -> QuantizedView | str:
    """Codes and scales that a GEMM reads in that direction, or the reason why they cannot be read."""
    tensor = direction_of(tensor, columnwise)
    if is_nvfp4(tensor):
        return _nvfp4(tensor, columnwise)
    if not hasattr(tensor, "_fp8_dtype"):
        if isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point and tensor.element_size() > 1:
            return "not in FP8: the module ran outside autocast, or its recipe leaves it in high precision"
        return "its codes lie in a way that is not known"
    if torch.version.hip is not None and _is_fnuz(tensor):
        return "AMD's fnuz formats are not read here"
    fmt = _format(tensor)
    if fmt is None:
        return f"format {tensor._fp8_dtype!r} is not known"
    if hasattr(tensor, "_scale_inv"):
        return _per_tensor(tensor, fmt)
    name = "_columnwise" if columnwise else "_rowwise"
    data, scale_inv = getattr(tensor, f"{name}_data", None), getattr(tensor, f"{name}_scale_inv", None)
    if data is None or scale_inv is None:
        return _ABSENT
    if scale_inv.dtype == torch.uint8:
        return _mxfp8(tensor, _flat(data), scale_inv, columnwise, fmt)
    return _blockwise(tensor, data, scale_inv, columnwise, fmt)


def direction_of(tensor: Any, columnwise: bool) -> Any:
    """Tensor of one direction: a part of a hybrid or debug tensor; else the tensor itself."""
    for rowwise_name, columnwise_name in _PARTS:
        name = columnwise_name if columnwise else rowwise_name
        if hasattr(tensor, name):
            part = getattr(tensor, name)
            return part if part is None else direction_of(part, columnwise)
    return tensor


def is_per_tensor(tensor: Any, columnwise: bool) -> bool:
    """Whether one scale is that of all codes, so that both directions have the same."""
    return hasattr(direction_of(tensor, columnwise), "_scale_inv")


def _format(tensor: Any) -> Fp8Format | None:
    """Format by name: the enumeration is a C++ one before 2.17, and later an IntEnum, whose str() is a number."""
    kind = tensor._fp8_dtype
    name = str(getattr(kind, "name", kind)).upper()
    return next((fmt for key, fmt in FORMATS.items() if key in name), None)


def _is_fnuz(tensor: Any) -> bool:
    """Whether codes on a ROCm device are those of E4M3 and E5M2 fnuz, which have the names of the others: on gfx94x."""
    held = (getattr(tensor, name, None) for name in ("_data", "_transpose", "_rowwise_data", "_columnwise_data"))
    index = next((data.device.index for data in held if data is not None), None)
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return str(getattr(properties, "gcnArchName", "")).startswith("gfx94")


def _flat(data: torch.Tensor) -> torch.Tensor:
    return data.reshape(-1, data.shape[-1]).view(torch.uint8)


def _per_tensor(tensor: Any, fmt: Fp8Format) -> QuantizedView | str:
    """Both directions have the same codes: use whichever copy exists."""
    data = getattr(tensor, "_data", None)
    if data is not None:
        codes = _flat(data)
    else:
        transpose = getattr(tensor, "_transpose", None)
        if transpose is None or getattr(tensor, "_transpose_invalid", False):
            return _ABSENT
        codes = transpose.reshape(transpose.shape[0], -1).view(torch.uint8).t()
    if tensor._scale_inv.numel() != 1:
        return f"it has {tensor._scale_inv.numel()} scales, where one is known"
    scale_inv = tensor._scale_inv.detach().float().reshape(1, 1)
    return QuantizedView(codes, scale_inv, (codes.shape[0], codes.shape[1]), fmt)


def _blockwise(
    tensor: Any, data: torch.Tensor, scale_inv: torch.Tensor, columnwise: bool, fmt: Fp8Format
) -> QuantizedView | str:
    if "COMPACT" in str(getattr(tensor, "_data_format", "")).upper():
        return "its scales lie as they are communicated, in versions before 2.10"  # not read by any GEMM
    codes = data.reshape(data.shape[0], -1).view(torch.uint8).t() if columnwise else _flat(data)
    rows, columns = codes.shape
    mt, kt = -(-rows // 128), -(-columns // 128)
    if getattr(tensor, "_is_2D_scaled", False):
        tiles = scale_inv.t()[:mt, :kt] if columnwise else scale_inv[:mt, :kt]
        expected, tile = (mt, kt), (128, 128)
    elif columnwise:
        tiles, expected, tile = scale_inv[:mt, :columns], (mt, columns), (128, 1)
    else:
        tiles, expected, tile = scale_inv.t()[:rows, :kt], (rows, kt), (1, 128)
    if tuple(tiles.shape) != expected:
        return _misfit(codes, scale_inv, tile)
    return QuantizedView(codes, tiles.contiguous(), tile, fmt)


def _mxfp8(
    tensor: Any, codes: torch.Tensor, scale_inv: torch.Tensor, columnwise: bool, fmt: Fp8Format
) -> QuantizedView | str:
    rows, columns = codes.shape
    shape, tile = ((-(-rows // 32), columns), (32, 1)) if columnwise else ((rows, -(-columns // 32)), (1, 32))
    bytes_ = scale_inv
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        long, short = scale_inv.shape[::-1] if columnwise else scale_inv.shape
        if long % 128 or short % 4:
            return _misfit(codes, scale_inv, tile)
        bytes_ = scale_inv.reshape(long // 128, short // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(long, short)
        bytes_ = bytes_.t() if columnwise else bytes_
    bits = bytes_[: shape[0], : shape[1]].to(torch.int32)
    if tuple(bits.shape) != shape:
        return _misfit(codes, scale_inv, tile)
    # E8M0: 2^(byte − 127); byte 0 is a float32 subnormal, byte 255 NaN
    value = (bits << 23).where(bits > 0, 1 << 22).where(bits < 255, 0x7FC00000).view(torch.float32)
    return QuantizedView(codes, value.contiguous(), tile, fmt)


def _nvfp4(tensor: Any, columnwise: bool) -> QuantizedView | str:
    parts = parts_of(tensor, columnwise)
    if isinstance(parts, str):
        return parts
    codes, scale_inv, _ = parts
    return QuantizedView(codes, scale_inv, (BLOCK, 1) if columnwise else (1, BLOCK), E2M1)


def _misfit(codes: torch.Tensor, scale_inv: torch.Tensor, tile: tuple[int, int]) -> str:
    return f"{list(scale_inv.shape)} scales do not fit {list(codes.shape)} codes in tiles of {tile[0]}×{tile[1]}"
