"""Where a kernel is replaced by one that is wrong: the quantiser of one operand, and the three GEMMs of one Linear.

A fault in a kernel lies *below* the statistics: amax, scale and noise are computed from registers, and what is wrong is
what reaches memory. So the statistics are those of the sound kernel, and the GEMM reads something else. Whatever looks
at what the GEMM reads, or at what it gives, sees the fault; whatever looks at the operand alone does not.

The only file that knows the inside of fp8watch: what changes there is put right here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.kernels import emulated_gemm, reference
from fp8watch.kernels.backend import Backend, Quantized
from fp8watch.layers import custom_ops, fp8_linear
from fp8watch.layers.fp8_linear import SITE_KEY
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT
from fp8watch.quantize.site_quantizer import SiteQuantizer

OPERANDS = {"input": INPUT, "weight": WEIGHT, "grad_output": GRAD_OUTPUT}
GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass
class Operand:
    """One operand as a sound kernel leaves it in memory, before its GEMM."""

    x: Tensor  # [M, K] before the cast
    right: Tensor  # float32 [M, K]: what the codes stand for
    codes: Tensor  # uint8 [M, K]
    scale_inv: Tensor  # float32 [Mt, Kt]
    job: QuantizeJob
    columnwise: bool
    sound: Backend

    def values(self, codes: Tensor | None = None, scale_inv: Tensor | None = None) -> Tensor:
        """What other codes or other scales stand for: float32 [M, K]."""
        codes, scale_inv = self.codes if codes is None else codes, self.scale_inv if scale_inv is None else scale_inv
        rows, columns = codes.shape
        return codes.view(self.job.fmt.dtype).float() * self.spread(scale_inv)[:rows, :columns]

    def spread(self, per_tile: Tensor) -> Tensor:
        """One number a tile as one an element."""
        return per_element(per_tile, self.job.tile)


def per_element(per_tile: Tensor, tile: tuple[int, int]) -> Tensor:
    return per_tile.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)


Spoil = Callable[[Operand], Tensor]
"""What the GEMM reads in place of `Operand.right`."""


class Wrapped:
    """A backend around another, with the plain functions alone: what saves a read, or merges what it measures by itself,
    would go past what is changed here, so it is not had."""

    def __init__(self, base: Backend) -> None:
        self.base, self.NAME = base, base.NAME

    def probe(self, device: torch.device) -> str | None:
        return self.base.probe(device)

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, job, scale)

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, job, scale)

    def dequantize(self, data: Tensor, scale_inv: Tensor, tile_shape: tuple[int, int]) -> Tensor:
        return self.base.dequantize(data, scale_inv, tile_shape)


class WrongKernel(Wrapped):
    """A backend whose statistics are right, and whose operand is not."""

    def __init__(self, base: Backend, spoil: Spoil) -> None:
        super().__init__(base)
        self.spoil = spoil
        self._kept: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by the address of codes: those, and what is read in their place

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        codes, scale_inv, stats = self.base.quantize(x, job, scale)
        wrong = self.quantize_dequantize(x, replace(job, stats=False, heavy=False), scale)[0]
        spread = per_element(scale_inv, job.tile)[: x.shape[0], : x.shape[1]]
        as_codes = (wrong / spread).to(codes.dtype)
        if torch.equal((as_codes.float() * spread).nan_to_num(-1.0), wrong.nan_to_num(-1.0)):
            return as_codes, scale_inv, stats  # codes in memory that stand for it
        if len(self._kept) >= 64:  # micro-batches between forward and backward
            del self._kept[next(iter(self._kept))]
        self._kept[codes.data_ptr()] = codes, wrong
        return codes, scale_inv, stats

    def dequantize(self, data: Tensor, scale_inv: Tensor, tile_shape: tuple[int, int]) -> Tensor:
        kept = self._kept.get(data.data_ptr())
        return self.base.dequantize(data, scale_inv, tile_shape) if kept is None else kept[1]

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        right, scale_inv, stats = self.base.quantize_dequantize(x, job, scale)
        codes = self.base.quantize(x, replace(job, stats=False, heavy=False), scale)[0].view(torch.uint8)
        columnwise = job.tile[0] > job.tile[1] == 1
        wrong = self.spoil(Operand(x, right, codes, scale_inv, job, columnwise, self.base))
        return wrong.contiguous(), scale_inv, stats


class OtherJob(Wrapped):
    """A quantiser that does something else than it was asked: all that it says belongs to what it does."""

    def __init__(self, base: Backend, change: Callable[[Tensor, QuantizeJob], QuantizeJob]) -> None:
        super().__init__(base)
        self.change = change

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, self.change(x, job), scale)

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, self.change(x, job), scale)


class OtherScale(Wrapped):
    """A quantiser whose scales are not what its rule gives. Codes, scale_inv and statistics belong to the scales that it
    uses: this is a fault that the statistics see.

    Args:
        base: the sound one.
        change: (scale [Mt, Kt] float32, job) -> the scale that is used.
        unrounded: `change` is given FP8_MAX/amax as it is, also where scales are powers of two.
    """

    def __init__(
        self, base: Backend, change: Callable[[Tensor, QuantizeJob], Tensor], *, unrounded: bool = False
    ) -> None:
        super().__init__(base)
        self.change, self.unrounded = change, unrounded

    def _scale(self, x: Tensor, job: QuantizeJob) -> Tensor:
        power_2 = job.power_2_scale and not self.unrounded
        _, scale_inv, _ = self.base.quantize(x, replace(job, power_2_scale=power_2, stats=False, heavy=False))
        return self.change(1.0 / scale_inv, job).contiguous()

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, job, self._scale(x, job))

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, job, self._scale(x, job))


def quantizers(module: nn.Module, operand: str) -> list[SiteQuantizer]:
    """The quantisers of an operand: rowwise and columnwise, or the one that serves both."""
    plan, first = custom_ops.lookup(module.__dict__[SITE_KEY])
    rows = dict.fromkeys(plan.sites.row(first, OPERANDS[operand], c) for c in (False, True))
    return [plan.sites.quantizers[row] for row in rows]


def put_kernel(module: nn.Module, operand: str, make: Callable[[Backend], Backend]) -> Callable[[], None]:
    """Let another kernel quantise an operand of a Linear, in both directions; returns how to undo that."""
    plan, first = custom_ops.lookup(module.__dict__[SITE_KEY])
    rows = list(dict.fromkeys(plan.sites.row(first, OPERANDS[operand], c) for c in (False, True)))
    old = plan.sites.quantizers[rows[0]].backend
    _put(plan, rows, make(old))
    return lambda: _put(plan, rows, old)


def _put(plan: Any, rows: list[int], backend: Backend) -> None:
    for row in rows:
        quantizer = plan.sites.quantizers[row]
        quantizer.backend = backend
        plan.sites.replace(row, quantizer)  # forgets what was looked up


ChangeGemm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(output, a, b) -> output: a [rows, K] and b [K, columns] are the dequantised operands as they are multiplied."""

QUANTISE = ("quantize_dequantize", "quantize_for_backward")
"""Through which a Linear quantises its gradients, and its forward operands."""

_changes: dict[tuple[int, str], ChangeGemm] = {}
_sound: dict[str, Any] = {}
_running = 0


def change_gemm(module: nn.Module, gemm: str, change: ChangeGemm) -> Callable[[], None]:
    """From now on one GEMM of a Linear gives `change(...)`; returns how to undo that."""
    key = int(module.__dict__[SITE_KEY]), gemm
    if not _sound:
        _watch_gemms()
    _changes[key] = change

    def undo() -> None:
        _changes.pop(key, None)
        if not _changes:
            for name, function in _sound.items():
                setattr(fp8_linear if name in QUANTISE else emulated_gemm, name, function)
            _sound.clear()

    return undo


def _watch_gemms() -> None:
    """A GEMM belongs to the Linear whose operand was quantised last: both happen in one call of its forward or backward."""
    _sound.update({name: getattr(emulated_gemm, name) for name in GEMMS})
    fprop, dgrad, wgrad = (_sound[name] for name in GEMMS)
    _sound.update({name: getattr(fp8_linear, name) for name in QUANTISE})

    def noting(quantize: Any) -> Any:
        def noted(x: Tensor, site: Tensor, *args: Any, **kwargs: Any) -> Any:
            global _running
            _running = int(site)
            return quantize(x, site, *args, **kwargs)

        return noted

    def changed(gemm: str, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        change = _changes.get((_running, gemm))
        return out if change is None else change(out, a, b).to(out.dtype).contiguous()

    for name in QUANTISE:
        setattr(fp8_linear, name, noting(_sound[name]))
    emulated_gemm.fprop = lambda x, w, bias, dtype: changed("fprop", fprop(x, w, bias, dtype), x, w.t())
    emulated_gemm.dgrad = lambda g, w, dtype: changed("dgrad", dgrad(g, w, dtype), g, w)
    emulated_gemm.wgrad = lambda g, x, dtype: changed("wgrad", wgrad(g, x, dtype), g.t(), x)


def tile_amax(x: Tensor, job: QuantizeJob) -> Tensor:
    """Largest magnitude of each tile: float32 [Mt, Kt]."""
    return reference.tiled(x.detach().float(), job.tile).abs().amax((1, 3))
