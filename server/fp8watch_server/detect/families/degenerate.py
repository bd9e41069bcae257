"""Tiles whose scale is no number to multiply with: mode 2, zero-tile-eps.

Shapes:     StepView -> the first record with a degenerate scale
Thread:     detect worker

A kernel without the zero guard divides FP8_MAX by an amax of 0 (or by one so small that the quotient is Inf): the
scale is Inf, scale_inv is 0, and 0·Inf makes NaN of the codes. The operand itself is finite, so no count of NaN points
at it; the scale does. Zero tiles alone are normal: in a causal model the query gradient of position 0 is exactly zero.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import Measured
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.step_view import BatchColumns, Mask, StepView


def degenerate(columns: BatchColumns) -> Mask:
    """Records with a scale_inv that is 0, negative, Inf or NaN. [N]

    Where the ratio was measured too, its count of off-scale tiles must agree: one broken extreme is not enough.
    """
    scale = columns.has(Measured.SCALE) & (columns.raw("num_tiles") > 0)
    low, high = columns.raw("scale_inv_min"), columns.raw("scale_inv_max")
    bad = scale & ((low <= 0) | ~np.isfinite(low) | ~np.isfinite(high))
    if not bad.any():
        return np.asarray(bad)
    return np.asarray(bad & (~columns.has(Measured.RATIO) | (columns.raw("num_off_scale_tiles") > 0)))


class ZeroTiles:
    """How many zero tiles each site normally has: the most that a clean step showed."""

    def __init__(self, num_sites: int) -> None:
        self._most = np.full(num_sites, -1, dtype=np.int64)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = num_sites - len(self._most)
        if more > 0:
            self._most = np.concatenate([self._most, np.full(more, -1, dtype=np.int64)])

    def learn(self, view: StepView) -> None:
        """Take a clean step in."""
        zero = np.where(view.has(Measured.AMAX), view.raw("num_zero_tiles"), -1)
        np.maximum.at(self._most, view.row, zero)

    def usual(self, row: int) -> int | None:
        """Most zero tiles of a site in a clean step, None before one was seen."""
        got = int(self._most[row])
        return None if got < 0 else got


def finding(
    view: StepView, at: npt.NDArray[np.int64], nonfinite: npt.NDArray[np.int64], zero_tiles: ZeroTiles
) -> Finding:
    """The finding for records `at` with degenerate scales, and `nonfinite` behind them, in the order of execution."""
    first = int(at[0])
    facts = view.facts(first)
    evidence = [
        Evidence("scale_inv_min", float(view.raw("scale_inv_min")[first]), "finite and > 0", "1", view.step),
        Evidence("eps", facts.eps, "1e-12", "x"),
    ]
    if view.has(Measured.RATIO)[first]:
        evidence.append(
            Evidence("num_off_scale_tiles", int(view.raw("num_off_scale_tiles")[first]), 0, "tiles", view.step)
        )
    if view.has(Measured.AMAX)[first]:
        usual = zero_tiles.usual(int(view.row[first]))
        evidence.append(Evidence("num_zero_tiles", int(view.raw("num_zero_tiles")[first]), usual, "tiles", view.step))
        smallest = float(view.raw("amax_min_nonzero")[first])
        if math.isfinite(smallest):
            evidence.append(Evidence("amax_min_nonzero", smallest, None, "x", view.step))
    if len(nonfinite):
        evidence.append(Evidence("nonfinite_sites", len(nonfinite), 0, "sites", view.step))
    loss = view.scalar("loss")
    if loss is not None:
        evidence.append(Evidence("loss", loss, None, "", view.step))
    return Finding(
        mode="zero-tile-eps",
        severity="critical",
        step=view.step,
        rank=view.rank,
        site=facts.id,
        tile=view.tile("off_scale_tile", first),
        element=None,
        evidence=tuple(evidence),
        verdict="fp8",
        rank_in_flow=int(view.flow[first]),
        extra={
            "sites": view.site_ids(np.concatenate([at, nonfinite])),
            "num_sites": len(at) + len(nonfinite),
            "operands": [facts.operand],
            "operand_counted": bool(view.has(Measured.COUNTS)[first]),
        },
    )
