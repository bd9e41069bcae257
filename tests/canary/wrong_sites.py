"""Faults of which the cause is known, on one site or one GEMM of the small model."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8watch.kernels import emulated_gemm


def with_eps(eps):
    """Values of a site that is quantised with another eps: for `break_site(dequantised=...)`."""

    def run(quantizer, x_MK):
        job = quantizer._jobs_for(quantizer.tile_for(tuple(x_MK.shape)))[0]
        return quantizer.backend.quantize_dequantize(x_MK, replace(job, eps=eps), None)[0]

    return run


def swizzled(data, scale_inv):
    """Scales of all tiles, each at another place."""
    order = torch.randperm(scale_inv.numel(), generator=torch.Generator().manual_seed(2))
    return data, scale_inv.flatten()[order].view_as(scale_inv)


def stale_dgrad(monkeypatch, shape, updates, calls=0):
    """dgrad of the Linear whose weight has this shape reads it as it was so many updates before, from a call on."""
    right, kept = emulated_gemm.dgrad, []

    def dgrad(grad, weight, dtype):
        if tuple(weight.shape) == shape:
            kept.append(weight.clone())
            if len(kept) > calls:
                weight = kept[max(0, len(kept) - 1 - updates)]
        return right(grad, weight, dtype)

    monkeypatch.setattr(emulated_gemm, "dgrad", dgrad)
