"""Layers and experts that no longer do anything: mode 4, dead-layer.

Shapes:     log2 amax and zero tiles of a module's input and gradients [S] -> at most one finding
Thread:     detect worker

Information, not an alarm: a starved expert and a frozen layer are somebody's decision as often as a fault. Input and
gradient must both have fallen, so that a masked batch or a warm start is none.
"""

from __future__ import annotations

import numpy as np

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.view import GRAD_OUTPUT, INPUT, Mask


class DeadLayers(Detector):
    """Modules whose input and gradient collapsed."""

    modes = ("dead-layer",)

    def __init__(self, num_sites: int) -> None:
        self._latch = Latch(num_sites, 5, 6)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._latch.grow(num_sites)

    def frozen(self) -> Mask:
        """Sites in alarm. [S]"""
        return self._latch.open

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        if not ctx.warm or not ctx.clean:
            return []
        now, table = ctx.now, ctx.now.table
        change = ctx.above_usual
        with np.errstate(invalid="ignore"):
            fallen = change < -ctx.limit.dead_octaves
        # where every tile is zero there is no log2: the site must have lived before
        gone = now.all_zero & ctx.known(ctx.base.amax)
        low = fallen | gone
        seen = ~np.isnan(change) | gone
        num = len(table.modules)
        both = np.zeros((2, num), dtype=np.bool_)
        for i, role in enumerate((INPUT, GRAD_OUTPUT)):
            at = np.flatnonzero(low & (table.role == role))
            both[i, table.module[at]] = True
        dead = np.logical_and(both[0], both[1])[table.module]
        named = ((table.role == INPUT) | (table.role == GRAD_OUTPUT)) & seen
        hit = self._latch.update(dead & low & named, named, now.step)
        if not hit.any():
            return []
        rows = now.in_flow(hit)
        row = int(rows[0])
        since = int(self._latch.since[row])
        usual = float(ctx.base.amax.median()[row])
        value = 0.0 if gone[row] else float(f"{now.column('amax_max')[row]:.4g}")
        evidence = [Evidence("amax_max", value, float(f"{2.0**usual:.4g}"), "x", since)]
        tiles, zero = now.column("num_tiles")[row], now.column("num_zero_tiles")[row]
        if tiles > 0 and zero > 0:
            evidence.append(Evidence("num_zero_tiles", int(zero), None, f"of {int(tiles)} tiles", since))
        gradients = rows[table.role[rows] == GRAD_OUTPUT]
        if len(gradients):
            g = int(gradients[0])
            evidence.append(
                Evidence(
                    "gradient_amax",
                    0.0 if gone[g] else float(f"{now.column('amax_max')[g]:.4g}"),
                    float(f"{2.0 ** ctx.base.amax.median()[g]:.4g}"),
                    "x",
                    since,
                )
            )
        tokens = _tokens(ctx, row)
        if tokens is not None:
            evidence.append(Evidence("tokens", tokens, None, "tokens", None))
        return [now.finding("dead-layer", "info", rows, evidence, "shared", tokens=tokens, began=since)]


def _tokens(ctx: Context, row: int) -> int | None:
    """Rows of the operand: elements over columns."""
    elements, columns = ctx.now.column("num_elements")[row], ctx.now.table.facts[row].shape[1]
    return int(elements // columns) if np.isfinite(elements) and columns else None
