"""Values on the grid of a small floating-point format, for formats that training is asked about and this library does not compute in.

Shapes:     any -> the same, float32
Thread:     any

Each grid is sign, exponent and mantissa with subnormals. Rounding is to the nearest, ties to even, and what lies beyond the
largest number becomes that number; with random numbers it is stochastic: up with the probability of the distance from below.

Sources: E2M1 (NVFP4's elements): OCP Microscaling Formats v1.0. E5M6: DeepSeek-V3's technical report (arXiv 2412.19437,
section 3.3.3) names the format for cached inputs of the Linear behind attention and no more; here its largest exponent is that
of FP16, whose first six bits of mantissa it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """One format."""

    name: str
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number
    max_finite: float
    saturation_midpoint: float  # at or above it a value would round past max_finite

    def round(self, x: Tensor, uniform: Tensor | None = None) -> Tensor:
        """The nearest numbers of the format, or stochastically rounded ones; NaN stays.

        Args:
            x: float32.
            uniform: of x's shape, in [0, 1).
        """
        step = self._step(x)
        scaled = x / step  # a division by a power of two: exact
        whole = torch.round(scaled) if uniform is None else torch.floor(scaled + uniform)
        return (whole * step).clamp(-self.max_finite, self.max_finite)

    def _step(self, x: Tensor) -> Tensor:
        """Distance of neighbours where x lies: a power of two."""
        finite = torch.nan_to_num(x, nan=0.0, posinf=self.max_finite, neginf=-self.max_finite)
        exponent = torch.frexp(finite.clamp(-self.max_finite, self.max_finite)).exponent - 1
        exponent = exponent.masked_fill(finite == 0, self.min_exponent).clamp(min=self.min_exponent)
        return torch.ldexp(torch.ones_like(finite), exponent - self.mantissa_bits)


E2M1 = Grid("E2M1", 1, 0, 6.0, 7.0)
E5M6 = Grid("E5M6", 6, -14, 65024.0, 65280.0)
E4M3 = Grid("E4M3", 3, -6, 448.0, 464.0)
E5M2 = Grid("E5M2", 2, -14, 57344.0, 61440.0)
GRIDS = {grid.name: grid for grid in (E2M1, E5M6, E4M3, E5M2)}
