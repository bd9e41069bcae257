"""Quantisation: what a user calls, and what it measures."""

from __future__ import annotations

from fp8watch.quantize.blockwise import BlockwiseQuantized, quantize_blockwise
from fp8watch.quantize.mxfp8 import MxQuantized, quantize_mxfp8
from fp8watch.quantize.per_tensor import DelayedScale, TensorQuantized, quantize_per_tensor
from fp8watch.quantize.stats import TileStats

__all__ = [
    "BlockwiseQuantized",
    "DelayedScale",
    "MxQuantized",
    "TensorQuantized",
    "TileStats",
    "quantize_blockwise",
    "quantize_mxfp8",
    "quantize_per_tensor",
]
