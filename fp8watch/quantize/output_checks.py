"""What a look at an output found: of a probed module, and of a GEMM held against its shadow.

Shapes:     one output -> a few numbers     Thread: training, and autograd's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class ProbeNumbers:
    """What a probe saw of an output on the CPU, as numbers."""

    num_elements: int
    amax: float
    num_nan: int = 0
    num_inf: int = 0
    first: tuple[int, int] = (-1, -1)
    energy: float | None = None


class GemmCheck(NamedTuple):
    """One GEMM against its shadow: 0-d tensors on the output's device."""

    error: Tensor  # float32: RMS(output − shadow) / RMS(shadow); 0 where both are 0, NaN left out
    gain: Tensor  # float32: Σ output·shadow / Σ shadow²; 1 is right
    num_nonfinite: Tensor  # int64: NaN and ±Inf in the sampled rows of the output
