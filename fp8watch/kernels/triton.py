"""The Triton backend: quantise and measure in one read of the operand, on the GPU; in Triton's interpreter on the CPU.

Shapes:     x [M, K] -> codes or values [M, K], scale_inv [Mt, Kt], TileStats     Thread: training, and autograd's

One launch quantises and leaves the partial sketch of each program in a workspace, a second one, made when the slab
takes the call, folds the lines straight into the slab's row. Nothing is read back to the host.

State of this file: equal to the reference bit by bit in the interpreter, and compiled for sm_80, sm_90 and sm_100. On an H200
`fp8watch check-gemm` passes and trainings ran; `make test-gpu` has not passed whole there yet.
"""

from __future__ import annotations

import os
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from fp8watch.kernels import reference
from fp8watch.kernels.backend import Quantized, Scales
from fp8watch.kernels.triton_job import How, Output
from fp8watch.numerics.operand_checks import check_denormals, check_operand
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats

NAME = "triton"

HARDWARE_CAST = False
"""Whether codes come from the cast instruction (sm_89 and later) in place of integer arithmetic."""

_served: dict[str, bool] = {}
"""Of types of devices whether kernels look at outputs there."""

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
    return _trial(str(device))


@lru_cache(maxsize=16)
def _trial(device: str) -> str | None:
    """Why a small kernel does not run there, or None: Triton needs a C compiler to launch any, which slim images lack, and a driver
    that knows its code."""
    try:
        _launch().try_out(torch.device(device))
    except Exception as error:  # noqa: BLE001 - whatever it is, it would come in the first forward
        return (
            f"a small kernel does not run there ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})"
        )
    return None


def quantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """As `fp8watch.kernels.reference.quantize`, whose bits it gives.

    Tiles of powers of two up to 128 × 128 and tiles as large as the operand have kernels; other shapes are computed
    by the reference, on the same device.
    """
    return _quantize(x, _how(job, Output.CODES), scale)


def quantize_dequantize(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
    """As `quantize`, with what the codes stand for (float32) in place of the codes."""
    return _quantize(x, _how(job, Output.VALUES), scale)


def quantize_both(
    x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None, *, transposed: bool = False
) -> tuple[Quantized, Quantized]:
    """Both directions of one operand from one read: as `quantize` with the tiles of the job, (1, length), and (length, 1).

    With `transposed` the columnwise codes lie in memory as [K, M], as a GEMM over M reads them; the tensor that is
    returned is [M, K] all the same, with strides (1, M).
    """
    return _both(x, _how(job, Output.CODES), scales, transposed=transposed)


def quantize_dequantize_both(
    x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None
) -> tuple[Quantized, Quantized]:
    """As `quantize_both`, with what the codes stand for (float32) in place of the codes."""
    return _both(x, _how(job, Output.VALUES), scales)


def measure(x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> TileStats:
    """As `fp8watch.kernels.backend.measure`: reads the operand, and writes nothing of its size."""
    stats = _quantize(x, _how(job, Output.NOTHING), scale)[2]
    assert stats is not None
    return stats


def measure_both(x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None) -> tuple[TileStats, TileStats]:
    """As `fp8watch.kernels.backend.measure_both`, from one read of the operand."""
    rowwise, columnwise = (stats for *_, stats in _both(x, _how(job, Output.NOTHING), scales))
    assert rowwise is not None
    assert columnwise is not None
    return rowwise, columnwise


dequantize = reference.dequantize


def look_into(y: torch.Tensor, buffer: torch.Tensor, row: int, call_order: int, *, energy: bool) -> bool:
    """Merge a look at an output [M, N] into `buffer[row]` on its device, as `fp8watch.sketch.slab.Slab.accumulate_probe` does
    on a CPU. False, and nothing done, where there are no kernels for it."""
    kernels = _look_kernels(y, buffer)
    if kernels is None:
        return False
    kernels.look_into(y, buffer, row, call_order, energy=energy)
    return True


def count_into(y: torch.Tensor, buffer: torch.Tensor, row: int, *, nan_only: bool) -> bool:
    """Add how many elements of a GEMM's output [..., N] are not finite to `buffer[row]` on its device. False, and nothing done,
    where there are no kernels for it."""
    y = y.reshape(-1, y.shape[-1]) if y.dim() > 2 and y.numel() else y
    kernels = _look_kernels(y, buffer)
    if kernels is None:
        return False
    kernels.count_into(y, buffer, row, nan_only=nan_only)
    return True


def _look_kernels(y: torch.Tensor, buffer: torch.Tensor) -> Any:
    """The kernels that look at outputs, where they serve this one."""
    if y.device.type not in _served:
        _served[y.device.type] = probe(y.device) is None
    if not _served[y.device.type]:
        return None
    from fp8watch.kernels import triton_look

    return triton_look if triton_look.serves(y, buffer) else None


def _how(job: QuantizeJob, output: Output) -> How:
    return How(job, output, HARDWARE_CAST and not interpreted())


def _check(x: torch.Tensor) -> torch.Tensor:
    check_operand(x)
    check_denormals(x)
    return x.detach()


def _quantize(x: torch.Tensor, how: How, scale: torch.Tensor | None) -> Quantized:
    x, tile = _check(x), how.job.tile
    whole = not _launch().has_kernel(tile)
    if whole and (tile[0] < x.shape[0] or tile[1] < x.shape[1]):
        plain = reference.quantize_dequantize if how.output is Output.VALUES else reference.quantize
        return plain(x, how.job, scale)
    got: Quantized = _launch().quantize(x, how, scale, whole=whole)
    return got


def _both(x: torch.Tensor, how: How, scales: Scales | None, *, transposed: bool = False) -> tuple[Quantized, Quantized]:
    got: tuple[Quantized, Quantized] = _launch().both(_check(x), how, scales, transposed=transposed)
    return got
