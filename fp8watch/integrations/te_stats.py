"""Statistics of an operand that Transformer Engine quantised: exact from operand and codes, or derived from codes
alone.

Shapes:     codes [M, K], scale_inv [Mt, Kt], operand [M, K] or none -> TileStats     Thread: training

Nothing is quantised a second time: the codes are those that the GEMM reads. Where the operand can be seen everything is
exact. From codes alone NaN is known (it has a code), an amax to within 6.25 % (the largest code times scale_inv), an Inf
not at all: it was stored as the largest finite code. A tile of scale_inv 1 that holds that code is *suspect*: it may
honestly hold 448, or hide an Inf. 4-bit codes do not tell NaN either: counts are absent then.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8watch.integrations.te_tensors import QuantizedView
from fp8watch.kernels import reference, reference_stats
from fp8watch.numerics.formats import E2M1
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.record import Measured

DERIVED = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO | Measured.CODES)


def exact(x: torch.Tensor, view: QuantizedView, power_2: bool, eps: float, *, bound: bool, heavy: bool) -> TileStats:
    """Full statistics from the operand and its codes.

    Args:
        x: [M, K] float32, bfloat16 or float16: the operand before the cast.
        view: its codes and scales.
        power_2, eps: how its quantiser makes scales.
        bound: whether the scale comes from this operand, so that the scale invariant holds.
        heavy: whether to measure energies, moments and the depth histogram too.
    """
    return _measure(x.detach().to(torch.float32), view, power_2, eps, x.dtype, bound=bound, heavy=heavy)


def derived(view: QuantizedView, power_2: bool, eps: float, *, bound: bool) -> TileStats:
    """Statistics from codes and scales alone. Saturation, underflow and Inf are absent (`Measured.CODES`).

    The invariant is judged on the largest code: in [224, 448] of E4M3 with power-of-two scales, 448 with others.
    """
    values = view.values()
    x = values * _wide(view.scale_inv, view)
    stats = _measure(x, view, power_2, eps, torch.float32, bound=False, heavy=False)
    tiles = stats.tiles
    assert tiles is not None
    assert tiles.invariant is not None
    ratio = _tile_codes(view).abs().nan_to_num(0.0).amax((1, 3)) / view.fmt.max_finite
    counts = tiles.counts.clone()
    counts[1].zero_()
    counts[2].zero_()
    counts[4].zero_()
    invariant = tiles.invariant
    if bound:
        broken = invariant.included & (ratio < (0.5 if power_2 else 1.0))
        distance = 1.0 / ratio
        invariant = invariant._replace(
            off_scale=invariant.off_scale | broken,
            badness=torch.maximum(invariant.badness, distance.where(broken, 0.0)),
        )
    measured = DERIVED & ~Measured.COUNTS if view.fmt is E2M1 else DERIVED
    return replace(
        stats, measured=int(measured), tiles=tiles._replace(counts=counts, scale_ratio=ratio, invariant=invariant)
    )


def num_suspect(view: QuantizedView) -> torch.Tensor:
    """Tiles of scale_inv 1 that hold the largest finite code: int32 [], on the device."""
    largest = _tile_codes(view).abs().nan_to_num(0.0).amax((1, 3))
    return ((view.scale_inv == 1.0) & (largest == view.fmt.max_finite)).sum(dtype=torch.int32)


def _wide(per_tile: torch.Tensor, view: QuantizedView) -> torch.Tensor:
    (rows, columns), (bm, bk) = view.shape, view.tile
    return per_tile.repeat_interleave(bm, 0)[:rows].repeat_interleave(bk, 1)[:, :columns]


def _tile_codes(view: QuantizedView) -> torch.Tensor:
    return reference.tiled(view.values(), view.tile)


def _measure(
    x: torch.Tensor, view: QuantizedView, power_2: bool, eps: float, dtype: torch.dtype, *, bound: bool, heavy: bool
) -> TileStats:
    """The reference measurement, applied to given codes."""
    x_t, codes_t = reference.tiled(x, view.tile), _tile_codes(view)
    magnitude_t = x_t.abs()
    amax = magnitude_t.nan_to_num(0.0, posinf=float("inf")).amax((1, 3))
    job = QuantizeJob(view.tile, view.fmt, power_2, eps, invariant=bound)
    _, quotient = reference.tile_scale(amax, job, dtype)
    scale = torch.ones_like(view.scale_inv).div_(view.scale_inv)
    y_t = magnitude_t * reference.spread(scale)
    operand = reference_stats.Operand(
        reference_stats.Kind.ANY,
        x_t,
        magnitude_t,
        codes_t.abs(),
        codes_t * reference.spread(view.scale_inv) if heavy else None,
        amax,
        scale,
        view.scale_inv,
        quotient,
        reference_stats.saturated(y_t, magnitude_t, view.fmt),
    )
    return reference_stats.measure(operand, view.shape, job)
