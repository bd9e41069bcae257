"""The Triton backend: quantise and measure in one read of the operand, on the GPU; in Triton's interpreter on the CPU.

Upstream:   fp8watch.kernels.registry     Downstream: fp8watch.kernels.triton_launch
Shapes:     x [M, K] -> codes or values [M, K], scale_inv [Mt, Kt], TileStats     Thread: training, and autograd's

One launch quantises and leaves the partial sketch of each program in a workspace, a second one, made when the slab
takes the call, folds the lines straight into the slab's row. Nothing is read back to the host.

State of this file: equal to the reference bit by bit in the interpreter, and compiled for sm_80, sm_90 and sm_100; not
run on a GPU yet. `make test-gpu` is what shows the rest.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fp8watch.kernels import reference
from fp8watch.kernels.registry import Quantized
from fp8watch.numerics.formats import Fp8Format
from fp8watch.numerics.operand_checks import check_denormals, check_operand, check_tile_shape

if TYPE_CHECKING:
    from fp8watch.kernels.triton_launch import How
    from fp8watch.numerics.tile_stats import TileStats

NAME = "triton"

HARDWARE_CAST = False
"""Whether codes come from the cast instruction (sm_89 and later) in place of integer arithmetic."""

_module: ModuleType | None = None
_failure = ""


def _load() -> ModuleType | None:
    """The kernels' launcher, or None with the reason in `_failure`: importing Triton may fail in any way."""
    global _module, _failure
    if _module is None and not _failure:
        try:
            from fp8watch.kernels import triton_launch

            _module = triton_launch
        except Exception as error:  # noqa: BLE001 - a driver, a cache folder, a compiler: all reasons to pass it over
            _failure = f"{type(error).__name__}: {error}"
    return _module


def _launch() -> Any:
    got = _load()
    if got is None:
        raise RuntimeError(
            f"backend='triton' cannot be used: triton cannot be imported ({_failure}); pip install triton"
        )
    return got


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set when they were imported."""
    got = _load()
    return got is not None and bool(got.INTERPRETED)


def probe(device: torch.device) -> str | None:
    """Return why this backend cannot serve the device, or None when it can."""
    if device.type not in ("cuda", "cpu"):
        return f"serves cuda tensors, not {device.type}"
    if device.type == "cpu" and _module is None and os.environ.get("TRITON_INTERPRET") != "1":
        return "serves cuda tensors, not cpu; only in Triton's interpreter, with TRITON_INTERPRET=1 set before Python starts"
    if _load() is None:
        return f"triton cannot be imported ({_failure}); pip install triton"
    if device.type == "cpu":
        late = "triton was imported before TRITON_INTERPRET=1 was set: set it before Python starts"
        return None if interpreted() else f"serves cuda tensors, not cpu; {late}"
    if interpreted():
        return "TRITON_INTERPRET=1 is set: kernels are interpreted on the CPU; unset it before Python starts"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None:
        return "ROCm: the fnuz formats of AMD's processors are not supported"
    return None


def quantize(
    x: torch.Tensor,
    tile_shape: tuple[int, int],
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    scale: torch.Tensor | None = None,
    guard: bool = True,
    invariant: bool = True,
    stats: bool = True,
    heavy: bool = True,
) -> Quantized:
    """As `fp8watch.kernels.reference.quantize`, whose bits it gives.

    Tiles of powers of two up to 128 × 128 and tiles as large as the operand have kernels; other shapes are computed
    by the reference, on the same device.
    """
    how = _how(fmt, power_2_scale, eps, guard, invariant, stats, heavy, dequantize=False)
    return _quantize(x, tile_shape, scale, how)


def quantize_dequantize(
    x: torch.Tensor,
    tile_shape: tuple[int, int],
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    scale: torch.Tensor | None = None,
    guard: bool = True,
    invariant: bool = True,
    stats: bool = True,
    heavy: bool = True,
) -> Quantized:
    """As `quantize`, with what the codes stand for (float32) in place of the codes."""
    how = _how(fmt, power_2_scale, eps, guard, invariant, stats, heavy, dequantize=True)
    return _quantize(x, tile_shape, scale, how)


def quantize_both(
    x: torch.Tensor,
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    length: int = 128,
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    stats: bool = True,
    heavy: bool = True,
    transposed: bool = False,
) -> tuple[Quantized, Quantized]:
    """Both directions of one operand from one read: as `quantize` with tiles (1, length) and (length, 1).

    With `transposed` the columnwise codes lie in memory as [K, M], as a GEMM over M reads them; the tensor that is
    returned is [M, K] all the same, with strides (1, M).
    """
    how = _how(fmt, power_2_scale, eps, True, True, stats, heavy, dequantize=False)
    return _both(x, length, scale, how, transposed)


def quantize_dequantize_both(
    x: torch.Tensor,
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    length: int = 128,
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    stats: bool = True,
    heavy: bool = True,
) -> tuple[Quantized, Quantized]:
    """As `quantize_both`, with what the codes stand for (float32) in place of the codes."""
    how = _how(fmt, power_2_scale, eps, True, True, stats, heavy, dequantize=True)
    return _both(x, length, scale, how, transposed=False)


def measure(
    x: torch.Tensor,
    tile_shape: tuple[int, int],
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    scale: torch.Tensor | None = None,
    invariant: bool = True,
    heavy: bool = True,
) -> TileStats:
    """As `fp8watch.kernels.registry.measure`: reads the operand, and writes nothing of its size."""
    how = replace(_how(fmt, power_2_scale, eps, True, invariant, True, heavy, dequantize=False), alone=True)
    stats = _quantize(x, tile_shape, scale, how)[2]
    assert stats is not None
    return stats


def measure_both(
    x: torch.Tensor,
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    length: int = 128,
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    heavy: bool = True,
) -> tuple[TileStats, TileStats]:
    """As `fp8watch.kernels.registry.measure_both`, from one read of the operand."""
    how = replace(_how(fmt, power_2_scale, eps, True, True, True, heavy, dequantize=False), alone=True)
    rowwise, columnwise = (stats for *_, stats in _both(x, length, scale, how, transposed=False))
    assert rowwise is not None
    assert columnwise is not None
    return rowwise, columnwise


dequantize = reference.dequantize


def _how(
    fmt: Fp8Format, power_2: bool, eps: float, guard: bool, invariant: bool, stats: bool, heavy: bool, *, dequantize: bool
) -> How:  # fmt: skip
    hardware = HARDWARE_CAST and not interpreted()
    return _launch().How(fmt, bool(power_2), float(eps), guard, invariant, stats, heavy, dequantize, hardware)  # type: ignore[no-any-return]


def _check(x: torch.Tensor) -> torch.Tensor:
    check_operand(x)
    check_denormals(x)
    return x.detach()


def _quantize(x: torch.Tensor, tile_shape: tuple[int, int], scale: torch.Tensor | None, how: How) -> Quantized:
    tile = check_tile_shape(tile_shape)
    x = _check(x)
    whole = not _launch().has_kernel(tile)
    if whole and (tile[0] < x.shape[0] or tile[1] < x.shape[1]):
        plain = reference.quantize_dequantize if how.dequantize else reference.quantize
        return plain(
            x, tile, how.fmt, how.power_2, how.eps,
            scale=scale, guard=how.guard, invariant=how.invariant, stats=how.stats, heavy=how.heavy,
        )  # fmt: skip
    got: Quantized = _launch().quantize(x, tile, scale, how, whole=whole)
    return got


def _both(
    x: torch.Tensor, length: int, scale: tuple[torch.Tensor, torch.Tensor] | None, how: How, transposed: bool
) -> tuple[Quantized, Quantized]:
    got: tuple[Quantized, Quantized] = _launch().both(_check(x), length, scale, how, transposed=transposed)
    return got
