"""A field that a backend does not fill is absent; one that some fill is there where every call has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from quantize.backends import each_backend
from quantize.operands import operand
from quantize.slab_rows import assert_rows_equal, row_of

from fp8watch.kernels import Backend, reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.row_fold import groups_of
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.sketch.slab import Slab
from fp8watch_agent import record
from fp8watch_agent.record import LATER, ROW, Measured, empty_rows, merge_rows

NEW = ("num_made_up", "made_up_max")
GROUP = int(Measured["MADE_UP"])


def stats_of(backend: Backend, seed: int = 0) -> TileStats:
    stats = backend.quantize(operand("normal", "float32", (4, 200), seed), QuantizeJob((1, 128), FORMATS["E4M3"]))[2]
    assert stats is not None
    return stats


def filled(stats: TileStats, count: int, largest: float) -> TileStats:
    """As a backend that knows the field would leave them."""
    assert stats.tiles is not None
    later = {**stats.tiles.later, "num_made_up": torch.tensor(count), "made_up_max": torch.tensor(largest)}
    return replace(stats, measured=stats.measured | groups_of(later), tiles=stats.tiles._replace(later=later))


def test_the_field_is_in_the_table_and_behind_what_kernels_write_in_one_piece() -> None:
    assert ROW.fields is not None
    known = [f for f in record.FIELDS if not f.group & LATER]
    ends = [ROW.fields[f.name][1] + int(f.dtype[2:]) * f.size for f in known]
    assert min(ROW.fields[name][1] for name in NEW) >= max(ends)
    assert ROW.itemsize % 8 == 0
    assert np.concatenate([empty_rows(1), empty_rows(2)]).dtype == ROW  # numpy drops padding without a name
    for f in record.FIELDS:
        assert ROW.fields[f.name][1] % int(f.dtype[2:]) == 0, f.name


@each_backend
def test_a_backend_that_does_not_know_it_does_not_claim_it(backend: Backend) -> None:
    stats = stats_of(backend)
    summary = stats.summary()
    assert not (stats.measured | summary["measured"]) & GROUP
    assert summary["num_made_up"] == summary["made_up_max"] == 0
    assert (summary["num_elements"], summary["num_tiles"], summary["num_calls"]) == (800, 8, 1)


@each_backend
def test_what_one_call_of_a_record_lacks_is_absent(backend: Backend) -> None:
    """Whichever comes first, and however often the field is measured beside it."""
    for order in ([1, 0], [0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]):
        slab, twin = Slab(1), empty_rows(1)
        for call, knows in enumerate(order):
            stats = filled(stats_of(reference, call), 5, 1.5) if knows else stats_of(backend, call)
            slab.accumulate(0, stats, call)
            merge_rows(twin, row_of(stats, call))
        assert_rows_equal(slab.copy_rows(), twin)
        assert int(twin["measured"][0]) & (GROUP | 127) == 127, order


def test_what_every_call_measured_is_there() -> None:
    slab, twin = Slab(1), empty_rows(1)
    for call, (count, largest) in enumerate(((5, 1.5), (7, 0.5))):
        stats = filled(stats_of(reference, call), count, largest)
        slab.accumulate(0, stats, call)
        merge_rows(twin, row_of(stats, call))
    slab.keep_hash(0, torch.tensor(9))  # no call: it takes nothing away
    (row,) = slab.copy_rows()
    assert (row["num_made_up"], row["made_up_max"]) == (12, 1.5)
    assert row["measured"] & GROUP
    assert twin["measured"][0] & GROUP


def test_a_call_that_is_judged_by_its_codes_alone_does_not_fill_it() -> None:
    stats = replace(filled(stats_of(reference), 5, 1.5), measured=int(Measured.COUNTS))
    assert stats.summary()["num_made_up"] == 0
