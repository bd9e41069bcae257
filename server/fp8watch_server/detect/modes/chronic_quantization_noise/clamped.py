"""Scales that an eps decides: mode 21, chronic-quantization-noise, before the noise of it is seen.

Shapes:     tile amax, tiles clamped by eps [S] -> at most one finding
Thread:     detect worker

Where every tile of an input or a weight lies octaves below its eps, all of them get one scale, whatever is in them, and the
octaves above stand unused: an eps meant for another unit. At 2^8 the elements 2^7 below the largest are below the smallest
normal number of E4M3. What that costs is for the SQNR to say; this is information.
"""

from __future__ import annotations

import numpy as np

from fp8watch_server.detect.context import Context, damage
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.step_view import INPUT, WEIGHT

UNUSED_OCTAVES = 8.0


class Clamped(Detector):
    """Operands below their eps."""

    modes = ("chronic-quantization-noise",)

    def __init__(self, num_sites: int) -> None:
        self._latch = Latch(num_sites, 3, 4)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._latch.grow(num_sites)

    def frozen(self) -> None:
        """It is so from the first step: there is no other baseline to keep."""

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, table = ctx.now, ctx.now.table
        if not np.any(table.eps > 0):
            return []
        clamped, tiles, zero = (now.column(f"num_{name}tiles") for name in ("eps_", "", "zero_"))
        forward = (table.role == INPUT) | (table.role == WEIGHT)
        with np.errstate(divide="ignore", invalid="ignore"):
            unused = np.log2(table.eps) - now.log2_amax
            below = forward & (clamped > 0) & (clamped >= tiles - np.nan_to_num(zero)) & (unused >= UNUSED_OCTAVES)
        hit = self._latch.update(below, ~np.isnan(unused) & ~np.isnan(tiles), now.step)
        if not hit.any() or not ctx.clean:
            return []
        rows = now.in_flow(hit)
        row, since = int(rows[0]), int(self._latch.since[rows[0]])
        amax = float(f"{2.0 ** now.log2_amax[row]:.4g}")
        evidence = [
            Evidence("eps", float(table.eps[row]), f"amax is {amax:g}", "x", since),
            Evidence("unused_octaves", round(float(unused[row]), 1), 0, "octaves", since),
            Evidence("num_eps_tiles", int(clamped[row]), 0, "tiles", since),
            *damage(ctx, row),
        ]
        if len(rows) > 1:
            evidence.append(
                Evidence("clamped_sites", len(rows), 0, f"of {int(np.count_nonzero(now.seen))} sites", since)
            )
        return [
            now.finding(
                "chronic-quantization-noise", "info", rows, evidence, "fp8", tile="worst_tile", began=since, by="eps",
                amax=amax, unused=float(unused[row]),
            )
        ]  # fmt: skip
