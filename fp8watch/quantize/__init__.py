"""Quantisation: what a user calls, and what it measures."""

from __future__ import annotations

from fp8watch.numerics.tile_stats import TileStats
from fp8watch.quantize.blockwise import BlockwiseQuantized, quantize_blockwise
from fp8watch.quantize.mxfp8 import MxQuantized, quantize_mxfp8
from fp8watch.quantize.per_tensor import DelayedScale, TensorQuantized, quantize_per_tensor

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
