"""What a format does to one operand, in numbers that are the same for every format.

Shapes:     x [M, K], what the codes stand for [M, K] -> a few sums
Thread:     the caller's

Definitions are those of the sketch, with one difference: a tile is 1×128 along the contraction whatever the format's own tile
is, so that formats can be laid side by side. Sums are of finite elements, float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128


@dataclass
class OperandCosts:
    """Sums over the calls of one site."""

    num_elements: int = 0
    num_nonzero: int = 0
    num_underflow: int = 0
    num_saturated: int = 0
    signal_energy: float = 0.0
    noise_energy: float = 0.0
    gain_energy: float = 0.0
    tile_noise_ratio_sum: float = 0.0
    num_tiles: int = 0  # with something in them
    tile_noise_ratio_max: float = 0.0

    def add(self, x_MK: Tensor, values_MK: Tensor, num_saturated: int, *, columnwise: bool) -> None:
        """Add one call. `columnwise`: tiles run along M."""
        x, values = x_MK.detach().double(), values_MK.detach().double()
        if columnwise:
            x, values = x.t(), values.t()
        finite = torch.isfinite(x)
        nonzero = (x != 0) & finite
        x = x.where(finite, 0.0)
        error = (values - x).where(finite, 0.0)
        self.num_elements += x.numel()
        self.num_nonzero += int(nonzero.sum())
        self.num_underflow += int((nonzero & (values == 0)).sum())
        self.num_saturated += num_saturated
        self.gain_energy += float((x * error).sum())
        signal, noise = _tiles(x.square()), _tiles(error.square())
        self.signal_energy += float(signal.sum())
        self.noise_energy += float(noise.sum())
        some = signal > 0
        ratio = noise[some] / signal[some]
        self.num_tiles += int(some.sum())
        if ratio.numel():
            self.tile_noise_ratio_sum += float(ratio.sum())
            self.tile_noise_ratio_max = max(self.tile_noise_ratio_max, float(ratio.max()))

    @property
    def sqnr_db(self) -> float | None:
        """Of the tensor: Σx² over Σ(x − x̂)², in dB; Inf without noise, None without a signal."""
        return _db(self.noise_energy, self.signal_energy)

    @property
    def tile_sqnr_db(self) -> float | None:
        """Of the tiles: the mean of noise over signal, in dB."""
        return _db(self.tile_noise_ratio_sum, float(self.num_tiles))

    @property
    def underflow(self) -> float | None:
        """Share of the elements that are not zero and become zero."""
        return self.num_underflow / self.num_nonzero if self.num_nonzero else None

    @property
    def saturated(self) -> float | None:
        """Share of the elements that are clipped."""
        return self.num_saturated / self.num_elements if self.num_elements else None

    @property
    def gain(self) -> float | None:
        """Σ x·x̂ / Σ x²: 1 where the operand keeps its length."""
        return 1 + self.gain_energy / self.signal_energy if self.signal_energy > 0 else None


def _tiles(x: Tensor) -> Tensor:
    """Sums of 1×TILE tiles: [M, ceil(K/TILE)]."""
    padded = F.pad(x, (0, -x.shape[1] % TILE))
    return padded.reshape(len(x), padded.shape[1] // TILE, TILE).sum(2)


def _db(noise: float, signal: float) -> float | None:
    if signal <= 0 or math.isnan(noise):
        return None
    if noise == 0:
        return math.inf
    return -math.inf if math.isinf(noise) else 10 * math.log10(signal / noise)
