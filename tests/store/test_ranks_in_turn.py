"""Ranks take full statistics in turn: what is read over ranks is what the rank says that measured it."""

from __future__ import annotations

import numpy as np
import pytest
from store.kit import UP, Feed

from fp8watch_agent.record import Measured
from fp8watch_server.store import queries

STEPS = list(range(32))
LIGHT = int(Measured.COUNTS | Measured.AMAX)
FULL = LIGHT | int(Measured.ENERGIES | Measured.MOMENTS)
TILES, ZERO, ELEMENTS = 8, 2, 1024


def of_rank(rank: int) -> dict[str, object]:
    """One of four steps is full on each rank; noise is 30 dB below the signal, and kurtosis 3."""
    full = np.array(STEPS) % 4 == rank
    size = ELEMENTS * (1 + rank)  # ranks need not see the same number of elements
    return {
        "measured": np.where(full, FULL, LIGHT), "num_elements": size, "num_tiles": TILES * (1 + rank),
        "num_zero_tiles": ZERO * (1 + rank), "num_nonzero": size, "amax_max": 3.0,
        "tile_noise_ratio_sum": np.where(full, (TILES - ZERO) * (1 + rank) * 1e-3, 0.0),
        "signal_energy": np.where(full, size * 1.0, 0.0), "noise_energy": np.where(full, size * 1e-3, 0.0),
        "moment2": np.where(full, size * 1.0, 0.0), "moment4": np.where(full, size * 3.0, 0.0),
    }  # fmt: skip


@pytest.mark.parametrize("compacted", [False, True])
def test_a_ratio_over_ranks_is_that_of_the_ranks_that_measured(feed: Feed, compacted: bool) -> None:
    feed.sites = [UP]
    for rank in range(4):
        feed.send(feed.agent(rank=rank), STEPS, fields=of_rank(rank))
    if compacted:
        feed.compact(everything=True)
    with feed.engine.connect() as conn:
        for name, want in (("tile_sqnr_db", 30.0), ("sqnr_db", 30.0), ("kurtosis", 3.0)):
            got = queries.series(conn, "run-1", UP.id, name, points=1000)["values"]
            assert got == pytest.approx([want] * len(STEPS), rel=1e-4), name
        energies = queries.series(conn, "run-1", UP.id, "signal_energy", points=1000)["values"]
        assert energies == pytest.approx([ELEMENTS * 10.0] * len(STEPS), rel=1e-4)  # as if all four had measured it
        one = queries.series(conn, "run-1", UP.id, "signal_energy", points=1000, rank=1)["values"]
        assert [v for v in one if v is not None] == [ELEMENTS * 2.0] * 8
