"""Statistics that a kernel folded itself are merged by it, and read tile by tile like any other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from quantize.operands import operand

from fp8watch.kernels import reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.sketch.slab import Slab
from fp8watch.sketch.tile_map import tile_map_of


class Recorded(NamedTuple):
    amax: torch.Tensor
    counts: torch.Tensor
    flags: torch.Tensor
    calls: list[tuple[int, int, int]]

    def merge_into(self, buffer: torch.Tensor, row: int, call_order: int) -> None:
        self.calls.append((buffer.data_ptr(), row, call_order))


def pair(kind: str) -> tuple[TileStats, TileStats]:
    """The statistics of one operand as torch leaves them, and as a kernel does: in bytes."""
    x = operand(kind, "float32", (4, 200))
    plain = reference.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 1e-30))[2]
    assert plain is not None
    shared = (plain.shape, plain.tile_shape, True, 1e-30, plain.scale_inv, plain.measured)
    return plain, TileStats(*shared, folded=Recorded(plain.amax, plain.counts.to(torch.uint8), plain.flags(), []))


def test_the_slab_leaves_the_merging_to_it() -> None:
    stats = pair("normal")[1]
    slab = Slab(2)
    slab.accumulate(1, stats, 7)
    assert isinstance(stats.folded, Recorded)
    assert stats.folded.calls == [(slab.buffer.data_ptr(), 1, 7)]
    with pytest.raises(ValueError, match="row=2"):
        slab.accumulate(2, stats, 7)


@pytest.mark.parametrize("kind", ["normal", "nan-and-inf", "zeros"])
def test_what_is_said_of_a_tile_is_the_same(kind: str) -> None:
    plain, compact = pair(kind)
    assert torch.equal(compact.counts.long(), plain.counts)
    assert torch.equal(compact.num_nonfinite.long(), plain.num_nonfinite)
    assert torch.equal(compact.flags(), plain.flags())
    assert torch.equal(compact.off_scale, plain.off_scale)
    one, other = tile_map_of(1, 2, plain), tile_map_of(1, 2, compact)
    for name in ("amax", "scale_inv", "flags", "num_nonfinite", "num_underflow"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
