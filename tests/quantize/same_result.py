"""What tests/quantize/test_agreement.py and others share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from quantize.slab_rows import assert_rows_equal, row_of

from fp8watch.numerics.tile_stats import TileStats


def assert_same(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Codes or values and scales bit by bit (of NaN there is one), statistics as said in `assert_rows_equal`."""
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        if ours.dtype == torch.float32:
            same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
        else:
            same = ours.view(torch.uint8) == theirs.view(torch.uint8)
        assert bool(same.all()), f"{int((~same).sum())} differ, first at {(~same).nonzero()[0].tolist()}"
    stats, judge = got[2], expected[2]
    assert (stats is None) == (judge is None)
    if judge is None:
        return
    assert torch.equal(stats.amax.view(torch.int32), judge.amax.view(torch.int32))
    assert torch.equal(stats.counts.long(), judge.counts)
    assert torch.equal(stats.flags(), judge.flags())
    row, other = row_of(stats, 3), row_of(judge, 3)
    if judge.tiles.heavy is not None and equally_noisy(judge) != 1:
        other["noise_tile"] = row["noise_tile"]
    # a subnormal error beside an amax of 448 is 0 in float32 units of the tile, and 1e-85 of the signal in float64
    for field, unit in (
        ("noise_energy", row["signal_energy"]),
        ("tile_noise_ratio_sum", 1.0),
        ("tile_noise_ratio_max", 1.0),
    ):
        if np.all(np.maximum(row[field], other[field]) < 1e-30 * unit):
            other[field], other["noise_tile"] = row[field], row["noise_tile"]
    assert_rows_equal(row, other)


def equally_noisy(stats: TileStats) -> int:
    """How many tiles are the noisiest but for the last bits of a sum."""
    ratio = stats.tiles.heavy.noise_ratio
    return int((ratio > ratio.max() * (1 - 1e-5)).sum())
