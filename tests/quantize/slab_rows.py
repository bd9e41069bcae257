"""What tests/quantize/test_slab.py and others share."""

from __future__ import annotations

import numpy as np
from quantize.backends import compared, shared
from quantize.tolerances import gain_tolerance

from fp8watch.numerics.tile_stats import TileStats
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import FIELDS

SUMS = {"signal_energy", "noise_energy", "tile_noise_ratio_sum", "moment2", "moment4", "tile_noise_ratio_max"}


def row_of(stats: TileStats, call_order: int) -> np.ndarray:
    slab = Slab(1)
    slab.accumulate(0, stats, call_order)
    return slab.copy_rows()


def assert_rows_equal(got: np.ndarray, expected: np.ndarray) -> None:
    for f in FIELDS:
        if not compared(f, *got["measured"].tolist(), *expected["measured"].tolist()):
            continue
        if f.name == "measured":
            np.testing.assert_array_equal(shared(got[f.name]), shared(expected[f.name]))
        elif f.name == "gain_energy":
            off = np.abs(got[f.name] - expected[f.name])
            assert np.all(off <= gain_tolerance(expected)), (got[f.name], expected[f.name])
        elif f.name in SUMS:
            np.testing.assert_allclose(got[f.name], expected[f.name], rtol=1e-6, err_msg=f.name)
        else:
            np.testing.assert_array_equal(got[f.name], expected[f.name], err_msg=f.name)
