"""Calls of the Triton backend enter the slab as records merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantize.operands import operand
from quantize.slab_rows import assert_rows_equal

from fp8watch.kernels import backend, reference, triton
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import empty_rows, merge_rows

CALLS = (
    ("zeros", True, 1.0), ("normal", True, 1.0), ("nan-and-inf", False, 1.0), ("inf", True, float("nan")),
    ("outliers", True, 3.0), ("normal", False, 1.0), ("nan", True, 1.0), ("wide", True, float("inf")),
)  # fmt: skip


@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (4, 200)])
def test_accumulating_is_merging_records(tile: tuple[int, int]) -> None:
    slab, other = Slab(4), Slab(4)
    expected = empty_rows(1)
    for order, (kind, heavy, factor) in enumerate(CALLS):
        x = operand(kind, "float32", (4, 200), order)
        scale = None
        if factor != 1.0:
            scale = reference.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], True, 0.0))[2].tiles.scale * factor
        stats = triton.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], True, 1e-30, heavy=heavy), scale)[2]
        same = reference.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], True, 1e-30, heavy=heavy), scale)[2]
        slab.accumulate(1, stats, order + 10)
        other.accumulate(1, same, order + 10)
        alone = Slab(1)
        alone.accumulate(0, stats, order + 10)
        merge_rows(expected, alone.copy_rows())
    rows = slab.copy_rows()
    assert_rows_equal(rows[1:2], expected)
    whole = other.copy_rows()[1:2]
    whole["noise_tile"] = rows[1:2]["noise_tile"]  # two tiles may be equally bad but for the last bits of a sum
    assert_rows_equal(rows[1:2], whole)
    assert_rows_equal(rows[[0, 2, 3]], empty_rows(3))  # the neighbours were not touched


def test_the_same_operand_gives_the_same_bytes() -> None:
    x = operand("wide", "bfloat16", (300, 300))
    rows = []
    for _ in range(2):
        slab = Slab(1)
        slab.accumulate(0, triton.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[2], 0)
        rows.append(slab.copy_rows().tobytes())
    assert rows[0] == rows[1]


def test_coordinates_are_those_of_the_first_of_equals() -> None:
    x = torch.ones(300, 300)
    x[1, 128:256] = 2.0
    x[200, :128] = -2.0
    summary = triton.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[2].summary()
    assert summary["worst_tile"].tolist() == [1, 1]
    assert np.array_equal(summary["first_nonfinite"], [-1, -1, -1])


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("kind", ["nan-and-inf", "wide"])
def test_both_directions_at_once_are_one_after_the_other(kind: str, heavy: bool, small_geometry: None) -> None:
    x, job = operand(kind, "float32", (300, 200), 5), QuantizeJob((1, 128), FORMATS["E4M3"], heavy=heavy)
    together, apart = Slab(4), Slab(4)
    for order in (3, 8):
        measured = triton.measure_both(x, job)
        assert together.accumulate_both((1, 3), measured, order)
        for row, call, stats in zip((1, 3), (order, order + 1), measured, strict=True):
            apart.accumulate(row, stats, call)
    assert together.copy_rows().tobytes() == apart.copy_rows().tobytes()
    assert np.count_nonzero(together.copy_rows()["num_calls"] == 2) == 2


def test_what_was_not_read_together_is_merged_by_itself() -> None:
    x, slab = operand("normal", "float32", (4, 200), 0), Slab(2)
    job = QuantizeJob((1, 128), FORMATS["E4M3"])
    assert not slab.accumulate_both((0, 1), (triton.measure(x, job), triton.measure(x, job.transposed())), 0)
    assert not slab.accumulate_both((0,), (triton.measure(x, job),), 0)
    assert not slab.accumulate_both((0, 1), backend.measure_both(reference, x, job), 0)
    assert slab.copy_rows().tobytes() == empty_rows(2).tobytes()


def test_what_is_on_another_device_than_the_rows_is_refused_before_a_kernel_is_launched() -> None:
    x, slab = operand("normal", "float32", (4, 200)), Slab(1)
    stats = triton.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[2]
    stats.folded.lines = stats.folded.lines.to("meta")
    with pytest.raises(ValueError, match="measured on meta, rows on cpu: must be one device"):
        slab.accumulate(0, stats, 0)
