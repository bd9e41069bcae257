"""Merging calls in a slab row is merging records, and parts merge to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantize.backends import each_backend, scale_of
from quantize.operands import KINDS, operand
from quantize.slab_rows import assert_rows_equal, row_of
from torch.utils._python_dispatch import TorchDispatchMode

from fp8watch.integrations.te_nvfp4 import VALUES, decoded
from fp8watch.kernels import Backend, reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import ROW, empty_rows, merge_rows

kinds = st.sampled_from(sorted(KINDS))


def measure(x: torch.Tensor, heavy: bool = True, factor: float = 1.0, backend: Backend = reference) -> TileStats:
    scale = None
    if factor != 1.0:
        scale = scale_of(x, (1, 128), FORMATS["E4M3"], True) * factor
    stats = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 1e-30, heavy=heavy), scale)[2]
    assert stats is not None
    return stats


@each_backend
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(kinds, st.booleans(), st.sampled_from([1.0, 0.25, 3.0, float("inf")]), st.integers(0, 99)),
        min_size=1,
        max_size=5,
    )
)
def test_accumulating_is_merging_records(backend: Backend, calls: list[tuple[str, bool, float, int]]) -> None:
    slab = Slab(3)
    expected = empty_rows(1)
    for order, (kind, heavy, factor, seed) in enumerate(calls):
        stats = measure(operand(kind, "float32", (4, 200), seed), heavy, factor, backend)
        slab.accumulate(1, stats, order + 10)
        merge_rows(expected, row_of(stats, order + 10))
    rows = slab.copy_rows()
    assert_rows_equal(rows[1:2], expected)
    assert_rows_equal(rows[[0, 2]], empty_rows(2))  # the neighbours were not touched


@each_backend
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.tuples(kinds, st.integers(0, 99)), min_size=1, max_size=4))
def test_parts_merge_to_the_whole(backend: Backend, parts: list[tuple[str, int]]) -> None:
    num_rows = 3
    operands = [operand(kind, "float32", (num_rows, 200), seed) for kind, seed in parts]
    slab = Slab(1)
    for call, x in enumerate(operands):
        slab.accumulate(0, measure(x, backend=backend), call)
    got = slab.copy_rows()
    whole = measure(torch.cat(operands))
    expected = row_of(measure(torch.cat(operands), backend=backend), 0)
    # coordinates of a part count from the part's first row
    for name in ("worst_tile", "noise_tile", "off_scale_tile"):
        if expected[name][0, 0] >= 0:
            expected[name][0, 0] %= num_rows
    first = expected["first_nonfinite"][0]
    if first[0] >= 0:
        first[2], first[0] = divmod(int(first[0]), num_rows)
    expected["num_calls"] = len(parts)
    assert whole.tiles is not None
    ratio = whole.tiles.heavy.noise_ratio
    if int((ratio > ratio.max() * (1 - 1e-6)).sum()) != 1:  # equally bad but for the last bits of a sum
        expected["noise_tile"] = got["noise_tile"]
    assert_rows_equal(got, expected)


@each_backend
def test_coordinates_are_those_of_the_first_of_equals(backend: Backend) -> None:
    x = torch.ones(3, 256)
    x[1, 128:] = 2.0
    x[2, :128] = -2.0
    slab = Slab(1)
    slab.accumulate(0, measure(x, backend=backend), 0)
    slab.accumulate(0, measure(x.flip(0), backend=backend), 1)
    assert slab.copy_rows()["worst_tile"].tolist() == [[1, 1]]


@each_backend
def test_the_worst_off_scale_tile_is_named(backend: Backend) -> None:
    x = torch.ones(4, 256)
    scale = torch.full((4, 2), 256.0)
    scale[1, 0], scale[2, 1], scale[3, 0] = 512.0, 16.0, 1024.0  # ratios 1.14, 0.036, 2.3; healthy 0.57
    stats = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0), scale)[2]
    summary = stats.summary()
    assert summary["num_off_scale_tiles"] == 3
    assert summary["off_scale_tile"].tolist() == [2, 1]
    scale[3, 1] = float("nan")  # nothing is worse than a scale that is no number
    stats = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0), scale)[2]
    assert stats.summary()["off_scale_tile"].tolist() == [3, 1]


@each_backend
def test_the_address_stays_and_clear_restores_the_defaults(backend: Backend) -> None:
    slab = Slab(5)
    address = slab.buffer.data_ptr()
    assert slab.buffer.shape == (5, ROW.itemsize)
    for row in range(5):
        slab.accumulate(row, measure(operand("nan-and-inf", "float32", (4, 200)), backend=backend), row)
    before = slab.copy_rows()
    slab.clear()
    assert slab.buffer.data_ptr() == address
    assert slab.copy_rows().tobytes() == empty_rows(5).tobytes()
    assert before["order"].tolist() == [0, 1, 2, 3, 4]  # a copy, not a view


@each_backend
def test_a_row_outside_the_slab_is_refused(backend: Backend) -> None:
    slab = Slab(2)
    for row in (-1, 2):
        with pytest.raises(ValueError, match=f"row={row}: must be 0 … 1"):
            slab.accumulate(row, measure(torch.ones(1, 1), backend=backend), 0)
    with pytest.raises(ValueError, match="capacity=0"):
        Slab(0)


class FromTheHost(TorchDispatchMode):
    """Notes each tensor that is made of numbers of the host: on a device it is copied there, and the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_made += func._schema.name == "aten::lift_fresh"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["normal", "zeros", "nan-and-inf"])
@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128)])
def test_no_number_is_copied_to_the_device(kind: str, tile: tuple[int, int]) -> None:
    stats = reference.quantize(operand(kind, "float32", (5, 331), 0), QuantizeJob(tile, FORMATS["E4M3"], True, 0.0))[2]
    slab, host = Slab(1), FromTheHost()
    with host:
        slab.accumulate(0, stats, 0)
    assert host.num_made == 0


def test_four_bit_codes_are_decoded_on_the_device() -> None:
    codes, host = torch.arange(16, dtype=torch.uint8), FromTheHost()
    with host:
        values = decoded(codes)
    assert host.num_made == 0
    expected = torch.tensor([*VALUES, *(-v for v in VALUES)])
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))  # −0 too
