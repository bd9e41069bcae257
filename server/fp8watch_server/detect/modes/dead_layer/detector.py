"""Layers and experts that no longer do anything: mode 4, dead-layer.

Shapes:     log2 amax, zero tiles and absence of a module's input and gradients [S] -> at most one finding
Thread:     detect worker

Information, not an alarm: a starved expert and a frozen layer are somebody's decision as often as a fault. An input or a
gradient that has collapsed is enough: behind a residual the other lives on. Alone it must stand further off than both
together. A module that is no longer called, or that no gradient reaches any more, sends nothing: that is told after
64 steps in which the others went on, and after eight times the longest pause that it ever made.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.step_view import GRAD_OUTPUT, INPUT, Mask

SIGMA_ALONE = 6.0
GRADIENT_ALONE = 2.0
"""Times the limit, for a gradient that collapsed while the input of its module did not."""
ABSENT_STEPS, TIMES_LONGEST_PAUSE = 64, 8
REPEAT_STEPS = 16
"""An absence is told again this often: an incident ends after 20 steps without a finding."""


class DeadLayers(Detector):
    """Modules whose input or gradient collapsed, or no longer comes."""

    modes = ("dead-layer",)

    def __init__(self, num_sites: int) -> None:
        self._latch = Latch(num_sites, 5, 6)
        self._pause = np.zeros(num_sites, dtype=np.int64)  # sampled steps since the site sent something
        self._longest = np.zeros(num_sites, dtype=np.int64)
        self._last_seen = np.full(num_sites, -1, dtype=np.int64)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        self._latch.grow(num_sites)
        more = max(0, num_sites - len(self._pause))
        self._pause = np.concatenate([self._pause, np.zeros(more, dtype=np.int64)])
        self._longest = np.concatenate([self._longest, np.zeros(more, dtype=np.int64)])
        self._last_seen = np.concatenate([self._last_seen, np.full(more, -1, dtype=np.int64)])

    def frozen(self) -> Mask:
        """Sites in alarm. [S]"""
        return self._latch.open

    def resume(self) -> None:
        """A new session: pauses begin anew."""
        super().resume()
        self._pause[:] = 0

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        absent = self._absent(ctx)
        if not ctx.warm or not ctx.clean:
            return []
        now, table = ctx.now, ctx.now.table
        change = ctx.above_usual
        gone = (now.all_zero | (now.column("num_elements") == 0)) & ctx.known(ctx.base.amax)
        named = ((table.role == INPUT) | (table.role == GRAD_OUTPUT)) & (~np.isnan(change) | gone)
        spread = np.nan_to_num(ctx.base.amax.spread(ctx.floor))
        alone = np.maximum(ctx.limit.dead_octaves, SIGMA_ALONE * spread)
        alone[table.role == GRAD_OUTPUT] = np.maximum(alone, GRADIENT_ALONE * ctx.limit.dead_octaves)[
            table.role == GRAD_OUTPUT
        ]
        with np.errstate(invalid="ignore"):
            low = named & ((change < -ctx.limit.dead_octaves) | gone)
            far = named & ((change < -alone) | gone)
        inputs, gradients = (_by_module(low & (table.role == role), ctx) for role in (INPUT, GRAD_OUTPUT))
        hit = self._latch.update(far | (low & inputs & gradients), named, now.step)
        if hit.any():
            return [self._collapsed(ctx, hit, gone, named)]
        return [self._no_longer(ctx, absent)] if absent.any() else []

    def _absent(self, ctx: Context) -> Mask:
        """Sites that have sent nothing for so long that it is to be said in this step. [S]"""
        now = ctx.now
        seen = ~np.isnan(now.column("num_elements")) | ~np.isnan(now.column("amax_max"))
        self._longest = np.where(seen, np.maximum(self._longest, self._pause), self._longest)
        self._pause = np.where(seen, 0, self._pause + 1)
        self._last_seen = np.where(seen, now.step, self._last_seen)
        asked = (now.table.role == INPUT) | (now.table.role == GRAD_OUTPUT)
        need = np.maximum(ABSENT_STEPS, TIMES_LONGEST_PAUSE * self._longest)
        due = (self._pause >= need) & ((self._pause - need) % REPEAT_STEPS == 0)
        return np.asarray(asked & ctx.known(ctx.base.amax) & due)

    def _collapsed(self, ctx: Context, hit: Mask, gone: Mask, measured: Mask) -> Finding:
        now, table = ctx.now, ctx.now.table
        rows = now.in_flow(hit)
        row = int(rows[0])
        since = int(self._latch.since[row])
        own = rows[table.module[rows] == table.module[row]]
        of_input, of_gradient = own[table.role[own] == INPUT], own[table.role[own] == GRAD_OUTPUT]
        evidence = []
        for name, at in (("amax_max", of_input), ("gradient_amax", of_gradient)):
            if len(at):
                first = int(at[0])
                value = 0.0 if gone[first] else float(f"{now.column('amax_max')[first]:.4g}")
                usual = float(f"{2.0 ** ctx.base.amax.median()[first]:.4g}")
                evidence.append(Evidence(name, value, usual, "x", since))
        tiles, zero = now.column("num_tiles")[row], now.column("num_zero_tiles")[row]
        if tiles > 0 and zero > 0:
            evidence.append(Evidence("num_zero_tiles", int(zero), None, f"of {int(tiles)} tiles", since))
        tokens = _tokens(ctx, row)
        if tokens is not None:
            evidence.append(Evidence("tokens", tokens, None, "tokens", None))
        which = "both" if len(of_input) and len(of_gradient) else "input" if len(of_input) else "gradient"
        other = table.role == (GRAD_OUTPUT if which == "input" else INPUT)
        return now.finding(
            "dead-layer", "info", rows, evidence, "shared", tokens=tokens, began=since, which=which, zeros=bool(gone[row]),
            other_measured=bool(np.any(measured & other & (table.module == table.module[row]))),
        )  # fmt: skip

    def _no_longer(self, ctx: Context, absent: Mask) -> Finding:
        """No record comes any more: of a module that is not called, or that no gradient reaches."""
        now, table = ctx.now, ctx.now.table
        rows = now.in_flow(absent)
        row = int(rows[0])
        last = int(self._last_seen[row])
        own = (table.module == table.module[row]) & ctx.known(ctx.base.amax)
        silent = self._pause >= ABSENT_STEPS
        if np.all(silent[own & (table.role == INPUT)]):
            which = "not-called"
        else:  # a weight that is frozen needs no wgrad, while dgrad goes on behind it
            which = "no-gradient" if np.all(silent[own & (table.role == GRAD_OUTPUT)]) else "frozen"
        evidence = [Evidence("last_seen", last, None, "step", last + 1)]
        if len(names := np.unique(table.module[rows])) > 1:
            evidence.append(Evidence("silent_modules", len(names), 0, "modules", last + 1))
        return now.finding("dead-layer", "info", rows, evidence, "shared", tokens=None, began=last + 1, which=which)


def _by_module(hit: Mask, ctx: Context) -> Mask:
    """Sites of modules that have one of these. [S]"""
    module: npt.NDArray[np.int64] = ctx.now.table.module
    return np.isin(module, module[hit])


def _tokens(ctx: Context, row: int) -> int | None:
    """Rows of the operand: elements over columns."""
    elements, columns = ctx.now.column("num_elements")[row], ctx.now.table.facts[row].shape[1]
    return int(elements // columns) if np.isfinite(elements) and columns else None
