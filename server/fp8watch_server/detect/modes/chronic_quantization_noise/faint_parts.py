"""What is nothing beside the largest: how many tiles of an operand, and how many elements of its tiles.

Shapes:     amax_hist and depth_hist of R sites [R, buckets] -> shares [R]
Thread:     detect worker

A tile 2^30 times smaller than the largest is below the last bit that float32 has of a sum with it, and so is an element beside the
largest of its tile: what quantising loses of those, the result does not hear of. Counted by octaves, where all statistics were
measured; that they are what is lost is not measured, only whether they are enough for it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import AMAX_BUCKET_OFFSET, NUM_AMAX_BUCKETS, Measured
from fp8watch_server.detect.cross_rank_step import CrossRankStep, Floats
from fp8watch_server.detect.finding import Evidence
from fp8watch_server.detect.step_view import Mask

FAINT_OCTAVES = 30
COUNT_ERROR = 0.045
"""By so much, as a share, a count of a histogram may be off on the wire."""
_FEET = math.log2(1.75) + np.arange(NUM_AMAX_BUCKETS) - AMAX_BUCKET_OFFSET
_FEET[:2] = math.inf, -math.inf
"""log2 of the smallest amax in each bucket; bucket 0 holds what is zero."""


def has_faint_tiles(now: CrossRankStep) -> Mask:
    """Sites whose smallest tile is one. [S]"""
    with np.errstate(invalid="ignore"):
        return np.asarray(now.log2_amin < now.log2_amax - FAINT_OCTAVES)


class FaintParts:
    """The faint tiles and elements of some sites in one step.

    Args:
        now: the step.
        rows: of sites whose energies were measured, [R].
    """

    def __init__(self, now: CrossRankStep, rows: npt.NDArray[np.int64]) -> None:
        self._now, self.rows = now, rows
        if not len(rows):
            return
        limit = now.log2_amax[rows] - FAINT_OCTAVES
        num = np.where(limit[:, None] > _FEET, now.histogram("amax_hist", rows), 0).sum(axis=1)
        zero = np.nan_to_num(now.beside("num_zero_tiles", Measured.ENERGIES))
        tiles = (now.beside("num_tiles", Measured.ENERGIES) - zero)[rows]
        depth = now.histogram("depth_hist", rows)
        most = np.minimum(num * (1.0 + COUNT_ERROR), tiles)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._tiles = num / tiles  # share
            self._elements = np.nan_to_num(depth[:, FAINT_OCTAVES:].sum(axis=1) / depth.sum(axis=1))  # share
            rest = (now.column("tile_noise_ratio_sum")[rows] - most) / (tiles - most)
            # of the others, had each of those lost all that it holds
            self._others_db = np.where(rest > 0, -10.0 * np.log10(rest), np.inf)

    def explain(self, band: Floats, most: float) -> Mask:
        """Whether they are enough: with all that faint tiles hold lost, the others are inside their band, and of elements that are not faint
        no more become zero than that. [R]

        Args:
            band: of the tile SQNR in dB, [S].
            most: share of the elements that may become zero.
        """
        if not len(self.rows):
            return np.zeros(0, dtype=np.bool_)
        flushed = self._now.underflow[self.rows] > most + (self._tiles + self._elements) * (1.0 + COUNT_ERROR)
        return np.asarray((self._tiles + self._elements > 0) & (self._others_db >= band[self.rows]) & ~flushed)

    def evidence(self, row: int) -> list[Evidence]:
        """What was counted of a site; nothing of one that has none."""
        told: list[Evidence] = []
        for i in np.flatnonzero(self.rows == row):
            of, step = {"faint_tiles": self._tiles[i], "faint_elements": self._elements[i]}, self._now.step
            told += [Evidence(name, round(float(share), 3), None, "share", step) for name, share in of.items()]
        return told
