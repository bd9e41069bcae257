"""One operand through the Triton kernels and through their judges."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from quantize import oracle
from quantize.backends import compared, shared
from quantize.tolerances import SUMS, gain_tolerance

from fp8watch.kernels import reference, triton
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.record import FIELDS


def bits(x: torch.Tensor) -> np.ndarray:
    """Bits, with one NaN."""
    values = x.numpy() if x.dtype == torch.float32 else x.view(torch.uint8).numpy()
    return (
        np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32) if values.dtype == np.float32 else values
    )


def same(got: torch.Tensor, expected: torch.Tensor | np.ndarray, what: str) -> None:
    """Equal bit by bit; the first difference is named."""
    other = expected if isinstance(expected, torch.Tensor) else torch.from_numpy(expected)
    a, b = bits(got), bits(other)
    assert a.shape == b.shape, f"{what}: {a.shape}, expected {b.shape}"
    where = np.argwhere(a != b)
    assert not where.size, (
        f"{what}: {len(where)} differ, first at {where[0]}: {a[tuple(where[0])]:#x}, expected {b[tuple(where[0])]:#x}"
    )


def same_stats(got: TileStats, expected: TileStats) -> None:
    """The sketch, and what is said of each tile: counts, extremes and coordinates equal, sums within 1e-6."""
    same(got.amax, expected.amax, "amax")
    same(got.scale_inv, expected.scale_inv, "scale_inv of the statistics")
    assert torch.equal(got.counts.long(), expected.counts.long()), "counts per tile"
    assert torch.equal(got.flags(), expected.flags()), "flags"
    a, b = got.summary(), expected.summary()
    for f in FIELDS:
        if not compared(f, a["measured"], b["measured"]):
            continue
        if f.name == "measured":
            assert shared(a[f.name]) == shared(b[f.name])
        elif f.name == "gain_energy":
            assert abs(a[f.name] - b[f.name]) <= gain_tolerance(b), f"gain_energy {a[f.name]}, not {b[f.name]}"
        elif f.name in SUMS:
            np.testing.assert_allclose(a[f.name], b[f.name], rtol=1e-6, atol=1e-300, err_msg=f.name)
        elif f.name == "noise_tile" and b["tile_noise_ratio_max"] > 0:
            # two tiles may be equally bad but for the last bits of a sum
            assert expected.tiles is not None
            assert expected.tiles.heavy is not None
            ratio = expected.tiles.heavy.noise_ratio[tuple(a[f.name])]
            np.testing.assert_allclose(float(ratio), b["tile_noise_ratio_max"], rtol=1e-6, err_msg=f.name)
        else:
            np.testing.assert_array_equal(a[f.name], b[f.name], err_msg=f.name)


def check(
    x: torch.Tensor,
    tile: tuple[int, int],
    fmt: str,
    power_2: bool,
    eps: float,
    *,
    heavy: bool = True,
    scale: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Codes, scales, values and statistics equal the reference's."""
    how = (tile, FORMATS[fmt], power_2, eps)
    expected = reference.quantize(x, QuantizeJob(*how, heavy=heavy, **options), scale)
    codes, scale_inv, stats = triton.quantize(x, QuantizeJob(*how, heavy=heavy, **options), scale)
    same(codes, expected[0], "codes")
    same(scale_inv, expected[1], "scale_inv")
    assert codes.dtype == FORMATS[fmt].dtype
    assert codes.is_contiguous()
    assert stats is not None
    assert expected[2] is not None
    same_stats(stats, expected[2])
    values, scale_inv, none = triton.quantize_dequantize(x, QuantizeJob(*how, stats=False, **options), scale)
    same(values, reference.quantize_dequantize(x, QuantizeJob(*how, stats=False, **options), scale)[0], "values")
    same(scale_inv, expected[1], "scale_inv beside values")
    assert none is None
    same(triton.dequantize(codes, scale_inv, tile), values, "values of the codes")


def check_with_the_oracle(
    x: torch.Tensor, tile: tuple[int, int], fmt: str, power_2: bool, eps: float, dtype: str
) -> None:
    """Codes, scales and values equal those found by searching a table, one tile after the other."""
    expected = oracle.quantize(x.float().numpy(), tile, fmt, power_2, eps, dtype)
    codes, scale_inv, none = triton.quantize(x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, stats=False))
    assert none is None
    same(codes, expected.codes, "codes")
    same(scale_inv, expected.scale_inv, "scale_inv")
    values = triton.quantize_dequantize(x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, stats=False))[0]
    same(values, expected.dequantized, "values")
