"""Quantisation: what a user calls, and what it measures."""

from __future__ import annotations

from fp8watch.quantize.blockwise import BlockwiseQuantized, quantize_blockwise
from fp8watch.quantize.stats import TileStats

__all__ = ["BlockwiseQuantized", "TileStats", "quantize_blockwise"]
