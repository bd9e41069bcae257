"""Kernels that break their contract as those of public reports did, each behind what the quantiser counts.

A fault is a function (codes or dequantised values [M, K], scale_inv [Mt, Kt] or None) -> the same, wrong. `break_site`
puts it on one site: between the kernel and the GEMM, where its statistics see nothing of it.
"""

from __future__ import annotations

import torch

from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT
from fp8watch.quantize.site_quantizer import SiteQuantizer

OPERANDS = {"input": INPUT, "weight": WEIGHT, "grad_output": GRAD_OUTPUT}


def _bytes(data):
    return data.view(torch.uint8) if data.dtype.itemsize == 1 else data


def zeroed(data, scale_inv):
    """Codes of gradients all zero (Transformer Engine 3281)."""
    return torch.zeros_like(_bytes(data)).view(data.dtype), scale_inv


def elsewhere(data, scale_inv):
    """Codes written to the wrong place: each row 16 columns further (torchao 4900)."""
    return _bytes(data).roll(16, 1).view(data.dtype), scale_inv


def garbage(data, scale_inv):
    """A copy that nobody wrote: what another tensor left there (torchao 4652)."""
    g = torch.Generator().manual_seed(1)
    if data.dtype.itemsize == 1:
        return torch.randint(0, 120, data.shape, dtype=torch.uint8, generator=g).view(data.dtype), scale_inv
    return torch.randn(data.shape, generator=g) * data.abs().mean(), scale_inv


def powers_of_two(data, scale_inv):
    """FP32 scales read as the powers of two below them (sglang 39193, transformers 47030)."""
    if scale_inv is None:
        raise NotImplementedError("of dequantised values: see `wrong_power`")
    return data, torch.exp2(torch.floor(torch.log2(scale_inv)))


def stale_scales(data, scale_inv):
    """The last scales lie behind padding: others are read (Transformer Engine 3070)."""
    wrong = scale_inv.clone()
    wrong.view(-1)[-1] = 1.0
    return data, wrong


def break_site(watch, fqn, operand, columnwise, fault, *, dequantised=None):
    """Put a fault on one site of a watch. `dequantised`: what the fault makes of dequantised values, where it differs."""
    plan = watch._plan
    first = next(i for i, s in enumerate(watch._table) if s.fqn == fqn)
    row = plan.sites.row(first, OPERANDS[operand], columnwise)
    old = plan.sites.quantizers[row]

    class Broken(type(old)):
        def __call__(self, x_MK, *, stats, heavy):
            if dequantised is not None:
                return dequantised(self, x_MK), SiteQuantizer.__call__(self, x_MK, stats=stats, heavy=heavy)[1]
            out, measured = super().__call__(x_MK, stats=stats, heavy=heavy)
            return fault(out, None)[0], measured

        def codes(self, x_MK, *, stats, heavy):
            (data, scale_inv), measured = super().codes(x_MK, stats=stats, heavy=heavy)
            return fault(data, scale_inv), measured

    made = Broken(old.spec, old.columnwise, old.backend)
    plan.sites.replace(row, made)


def break_dequantisation(watch, fqn, operand, columnwise, fault, *, backward=True):
    """Codes and scales of one site are right in memory; what is made of them for the emulated GEMM is not: of all, or of
    that in forward alone."""
    plan = watch._plan
    first = next(i for i, s in enumerate(watch._table) if s.fqn == fqn)
    row = plan.sites.row(first, OPERANDS[operand], columnwise)
    old = plan.sites.quantizers[row]

    class Broken:
        NAME = old.backend.NAME
        probe, quantize = staticmethod(old.backend.probe), staticmethod(old.backend.quantize)
        quantize_dequantize = staticmethod(old.backend.quantize_dequantize)

        @staticmethod
        def dequantize(data, scale_inv, tile):
            right = old.backend.dequantize(data, scale_inv, tile)
            return fault(right, None)[0] if backward or torch._C._current_graph_task_id() == -1 else right

    plan.sites.replace(row, type(old)(old.spec, old.columnwise, Broken()))


def by_codes(fault, dtype=torch.float8_e4m3fn):
    """What a fault of codes and scales makes of dequantised values: quantise, break, dequantise."""

    def run(quantizer, x_MK):
        data, scale_inv, _ = quantizer.backend.quantize(x_MK, quantizer.job(x_MK, stats=False, heavy=False))
        return quantizer.backend.dequantize(*fault(data, scale_inv), quantizer.tile_for(tuple(x_MK.shape)))

    return run
