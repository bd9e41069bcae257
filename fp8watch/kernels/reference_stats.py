"""What the reference backend counts while it quantises.

Shapes:     operand and codes [Mt, bm, Kt, bk] -> TileStats [Mt, Kt]     Thread: training

There are two ways through. The plain one is for what training is made of: finite elements and scales computed
just now. The careful one, for everything else and for devices that cannot be asked without waiting, masks what is
not finite. Both give the same numbers where both apply. On a CPU most of the time goes into starting operations on
small tensors, so the plain way leaves out every one whose result `Kind` already tells.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from fp8watch.numerics.formats import Fp8Format
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.row_fold import groups_of, histogram
from fp8watch.numerics.tile_stats import HEAVY, INF, LIGHT, Heavy, Invariant, PerTile, TileStats
from fp8watch_agent.record import NUM_DEPTH_BUCKETS

_EXACT_FLOAT32_COUNT = 1 << 24
_FP32_SCALE_SLACK = 4 * 2.0**-23  # 4 float32 ulps of 1


class Kind(Enum):
    """What is known of an operand before it is measured, so that what cannot be need not be looked for."""

    ORDINARY = "finite elements, no tile zero or clamped, scales computed just now"
    FINITE = "finite elements, scales computed just now"
    ANY = "anything"


class Operand(NamedTuple):
    """One operand on its way through the quantiser. A `_t` tensor is [Mt, bm, Kt, bk], the others [Mt, Kt]."""

    kind: Kind
    x_t: torch.Tensor
    magnitude_t: torch.Tensor  # |x|
    rounded_t: torch.Tensor  # |codes' values|
    dequantized_t: torch.Tensor | None  # None: energies, moments and depth are not wanted
    amax: torch.Tensor  # NaN ignored
    scale: torch.Tensor
    scale_inv: torch.Tensor
    quotient: torch.Tensor  # FP8_MAX / max(amax, eps)
    saturated: torch.Tensor | None  # [Mt, Kt]; None: nothing can saturate


def saturated(y_t: torch.Tensor, magnitude_t: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Count real clips per tile, from the products before they are clamped."""
    return ((y_t >= fmt.saturation_midpoint) & (magnitude_t < INF)).sum((1, 3))


def measure(operand: Operand, shape: tuple[int, int], job: QuantizeJob) -> TileStats:
    """Collect the statistics of one operand [M, K] of that shape, as the job quantised it."""
    magnitude_t, amax = operand.magnitude_t, operand.amax
    first: torch.Tensor | None = None
    if operand.kind is not Kind.ANY:
        finite_t, finite_amax = None, amax
        counts = _plain_counts(operand)
    else:
        assert operand.saturated is not None
        finite_t = magnitude_t < INF
        magnitude_t = magnitude_t.where(finite_t, 0.0)
        finite_amax = magnitude_t.amax((1, 3))
        counts = _careful_counts(operand, operand.saturated, finite_t)
        first = _first_nonfinite(finite_t)
    ratio = (amax * operand.scale).div_(torch.full_like(amax, job.fmt.max_finite))
    # For scales computed just now from ordinary tiles the invariant is trivially true.
    invariant = None if operand.kind is Kind.ORDINARY else _invariant(operand, ratio, job)
    heavy = None
    if operand.dequantized_t is not None:
        heavy = _heavy(operand, magnitude_t, operand.dequantized_t, finite_t, finite_amax, counts[0])
    later = {} if heavy is None or heavy.gain is None else {"gain_energy": heavy.gain}
    tiles = PerTile(amax, operand.scale, ratio, invariant, counts, first, heavy, later)
    return TileStats(
        shape,
        job.tile,
        job.power_2_scale,
        job.eps,
        operand.scale_inv,
        int(LIGHT if heavy is None else LIGHT | HEAVY) | groups_of(tiles.later),
        tiles,
    )


def _plain_counts(operand: Operand) -> torch.Tensor:
    """Non-zero and underflow by two sums of signs: comparing and adding booleans costs four times as much."""
    num_per_tile = operand.x_t.shape[1] * operand.x_t.shape[3]
    exact = torch.float32 if num_per_tile <= _EXACT_FLOAT32_COUNT else torch.float64
    counts = torch.zeros((5, *operand.amax.shape), dtype=torch.int64, device=operand.amax.device)
    nonzero = operand.magnitude_t.sign().sum((1, 3), dtype=exact)
    counts[0] = nonzero
    if operand.saturated is not None:
        counts[1] = operand.saturated
    counts[2] = nonzero - operand.rounded_t.sign().sum((1, 3), dtype=exact)
    return counts


def _careful_counts(operand: Operand, num_saturated: torch.Tensor, finite_t: torch.Tensor) -> torch.Tensor:
    nonzero_t = operand.magnitude_t != 0
    nan_t = operand.magnitude_t.isnan()
    return torch.stack(
        (
            nonzero_t.sum((1, 3)),
            num_saturated,
            (nonzero_t & (operand.rounded_t == 0)).sum((1, 3)),
            nan_t.sum((1, 3)),
            (~(finite_t | nan_t)).sum((1, 3)),
        )
    )


def _first_nonfinite(finite_t: torch.Tensor) -> torch.Tensor:
    """(row, column) of the first element that is not finite, row by row, or (−1, −1): int32 [2]."""
    _, _, kt, bk = finite_t.shape
    nonfinite = (~finite_t).view(torch.uint8).view(-1)
    index = nonfinite.argmax()
    place = torch.stack((index.div(kt * bk, rounding_mode="floor"), index.remainder(kt * bk)))
    return place.masked_fill_(nonfinite.amax() == 0, -1).to(torch.int32)


def _invariant(operand: Operand, ratio: torch.Tensor, job: QuantizeJob) -> Invariant:
    """The tiles that the scale invariant is meant for, those that break it, and how badly."""
    amax, quotient, scale_inv = operand.amax, operand.quotient, operand.scale_inv
    # 1/scale is positive and finite exactly where scale is positive, finite and has a usable reciprocal
    usable = (scale_inv > 0) & (scale_inv < INF)
    # quotient Inf: a zero tile, or the scale was clamped to the input type; 0: a sentinel tile
    included = usable & (quotient < INF) & (quotient > 0)
    if job.eps > 0:
        included &= amax >= job.eps
    if job.power_2_scale:
        within, low = (ratio > 0.5) & (ratio <= 1.0), 0.5
    else:
        within, low = (ratio >= 1 - _FP32_SCALE_SLACK) & (ratio <= 1 + _FP32_SCALE_SLACK), 1.0
    off_scale = ~usable | (included & ~within) if job.invariant else ~usable
    distance = torch.maximum(ratio, low / ratio).masked_fill_(~usable, INF)
    return Invariant(included, off_scale, distance.where(off_scale, 0.0))


def _heavy(
    operand: Operand,
    magnitude_t: torch.Tensor,
    dequantized_t: torch.Tensor,
    finite_t: torch.Tensor | None,
    finite_amax: torch.Tensor,
    num_nonzero: torch.Tensor,
) -> Heavy:
    """Energies, moments and depth, computed in units of a power of two near each tile's own amax.

    In those units squares and fourth powers neither underflow nor overflow float32, and the multiplication is
    exact. `magnitude_t` is 0 where the element is not finite.
    """
    # 2^−e for amax = m·2^e, kept between 2^−126 and 2^127
    unit_bits = (254 - (finite_amax.view(torch.int32) >> 23)).clamp_(1, 254) << 23
    unit = unit_bits.view(torch.float32)
    unit_t = unit[:, None, :, None]
    scaled_t = magnitude_t * unit_t
    scaled_amax = operand.amax * unit  # 1 … 2, Inf for a sentinel tile
    if finite_t is None:
        total = num_nonzero.sum()
    else:
        total = ((magnitude_t > 0) & (operand.amax < INF)[:, None, :, None]).sum()
    if operand.kind is not Kind.ORDINARY:
        scaled_amax.masked_fill_(operand.amax == 0, INF)  # nothing is infinitely deep
    depth_hist = _depth_hist(scaled_t, scaled_amax, total)

    error_t = operand.x_t - dequantized_t
    if finite_t is not None:
        # a given scale may be anything, and the error with it: float64 holds its square
        error_t = error_t.where(finite_t & (dequantized_t.abs() < INF), 0.0).double()
        scaled_t = scaled_t.double()
    error_t.mul_(unit_t)
    shortfall = (torch.copysign(scaled_t, operand.x_t) * error_t).sum((1, 3))
    noise = error_t.mul_(error_t).sum((1, 3))
    square_t = scaled_t.mul_(scaled_t)
    signal = square_t.sum((1, 3))
    fourth = square_t.mul_(square_t).sum((1, 3))
    signal, noise, fourth, shortfall = torch.stack((signal, noise, fourth, shortfall)).double()
    ratio = noise / signal
    per_unit, per_amax = torch.stack((unit, scaled_amax)).double().square_().reciprocal_()
    terms = torch.stack((signal * per_unit, noise * per_unit, ratio, signal * per_amax, fourth * per_amax.square()))
    gain = (shortfall * per_unit).sum().neg_()
    if operand.kind is not Kind.ORDINARY:  # nothing over nothing is nothing
        ratio.masked_fill_(signal == 0, 0.0)
        terms[2:].masked_fill_(signal == 0, 0.0)
    return Heavy(terms.sum((1, 2)), ratio, depth_hist, gain)


def _depth_hist(scaled_t: torch.Tensor, scaled_amax: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Octaves of amax/|x| over finite, non-zero x of tiles whose amax is finite: int64 [32].

    For two positive normal numbers the difference of their bits, shifted by the mantissa, is the floor of the
    binary logarithm of their quotient. Zeros land in the last bucket, which is therefore told from the total.
    """
    last = NUM_DEPTH_BUCKETS - 1
    bits_t = scaled_amax.view(torch.int32)[:, None, :, None] - scaled_t.view(torch.int32)
    hist = histogram(bits_t.bitwise_right_shift_(23).clamp_(max=last), NUM_DEPTH_BUCKETS)
    hist[last] = total - hist[:last].sum()
    return hist
