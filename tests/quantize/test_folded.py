"""A row that was folded by a kernel enters the slab as the tiles themselves would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantize.operands import operand
from quantize.test_slab import assert_rows_equal

from fp8watch.formats import FORMATS
from fp8watch.kernels import reference
from fp8watch.quantize.stats import MARKS, Folded, TileStats
from fp8watch.slab import Slab
from fp8watch.tiles import tile_map_of
from fp8watch_agent.record import ROW


def measure(kind: str, heavy: bool) -> TileStats:
    x = operand(kind, "float32", (4, 200))
    stats = reference.quantize(x, (1, 128), FORMATS["E4M3"], True, 1e-30, heavy=heavy)[2]
    assert stats is not None
    return stats


def folded(stats: TileStats) -> TileStats:
    """The same statistics as a kernel hands them over."""
    slab = Slab(1)
    slab.accumulate(0, stats, 0)
    row = slab.copy_rows()
    row["order"], row["first_nonfinite"][:, 2] = -1, -1
    marks = torch.zeros((*stats.amax.shape, 8), dtype=torch.uint8)
    for i, name in enumerate(MARKS):
        marks[..., i] = stats.flags() if name == "flags" else getattr(stats, name)
    made = Folded(torch.from_numpy(row.view(np.uint8).reshape(ROW.itemsize)), marks)
    return TileStats(
        stats.shape, stats.tile_shape, stats.power_2_scale, stats.eps, stats.amax, stats.scale_inv, stats.measured,
        folded=made,
    )  # fmt: skip


@pytest.mark.parametrize("heavy", [True, False])
def test_a_folded_row_merges_as_its_tiles_do(heavy: bool) -> None:
    slabs = Slab(2), Slab(2)
    for order, kind in enumerate(("normal", "nan-and-inf", "zeros", "inf", "outliers")):
        stats = measure(kind, heavy)
        slabs[0].accumulate(1, stats, order)
        slabs[1].accumulate(1, folded(stats), order)
    assert_rows_equal(slabs[1].copy_rows(), slabs[0].copy_rows())


def test_a_backend_merges_with_a_function_of_its_own() -> None:
    calls = []
    made = folded(measure("normal", True))
    assert made.folded is not None
    merge = made.folded._replace(merge=lambda *args: calls.append(args))
    own = TileStats(
        *(getattr(made, n) for n in TileStats.__dataclass_fields__ if n not in ("tiles", "folded")), None, merge
    )
    slab = Slab(2)
    slab.accumulate(1, own, 7)
    assert [(c[0].data_ptr(), c[1], c[3]) for c in calls] == [(slab.buffer.data_ptr(), 1, 7)]
    with pytest.raises(ValueError, match="row=2"):
        slab.accumulate(2, own, 7)


@pytest.mark.parametrize("kind", ["normal", "nan-and-inf"])
def test_what_is_said_of_a_tile_is_the_same(kind: str) -> None:
    plain = measure(kind, True)
    compact = folded(plain)
    assert torch.equal(compact.counts.long(), plain.counts)
    assert torch.equal(compact.flags(), plain.flags())
    assert torch.equal(compact.off_scale, plain.off_scale)
    one, other = tile_map_of(1, 2, plain), tile_map_of(1, 2, compact)
    for name in ("amax", "scale_inv", "flags", "num_nonfinite", "num_underflow"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
