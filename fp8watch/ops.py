"""Custom ops through which operands are quantised and observed: functional to the compiler, accumulating at run time.

Upstream:   fp8watch.linear            Downstream: fp8watch.quantize, fp8watch.slab
Shapes:     operand [M, K] -> dequantised [M, K] float32, and one slab row a direction
Thread:     training, and autograd's

A site travels as one 0-d int64 CPU tensor, (plan handle << 32) | first row of its Linear; the plan is looked up
inside the op. The slab is never an argument: autograd would save it for backward, and two forwards before a
backward would then fail with "modified by an inplace operation".
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch_agent.guard import Guard

from .passes import Passes
from .quantize.stats import TileStats
from .quantizers import SiteQuantizer, places, run_quantizers
from .recipe import OPERANDS, Recipe
from .slab import Slab

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
BYTES_PER_TILE = 100
"""What the statistics of one tile take while they are held: five int64 counts, five float64 sums, seven of 1–4 bytes."""

MAX_LOSSES = 4096
"""Losses held for one step: a loop whose steps never end must not fill the memory."""


def rows_of(recipe: Recipe) -> dict[tuple[int, bool], int]:
    """Rows of a Linear in the slab, from its first: (operand, columnwise) -> row. See `quantizers.places`."""
    return {(OPERANDS.index(p.operand), p.direction == "columnwise"): row for row, p in enumerate(places(recipe))}


@dataclass
class Plan:
    """What one `attach` does at run time: a quantiser a row, and where its statistics go."""

    quantizers: list[SiteQuantizer]
    slab: Slab | None
    guard: Guard
    recipe: Recipe
    rows: dict[tuple[int, bool], int]  # (operand, columnwise) -> row of the slab, from a Linear's first
    warming: bool = False  # the recipe's warm-up: GEMMs multiply unquantised operands
    passes: Passes = field(default_factory=Passes)
    sampled: bool = True  # full statistics in this step; else counts only
    keep_tiles: bool = True
    max_tile_bytes: int = 64 << 20
    handle: int = 0
    paused: bool = False
    calibrating: bool = False  # this step also times the quantiser without statistics
    observing_s: float = 0.0  # what statistics cost in the calibration step
    calibration_s: float = 0.0  # what the calibration itself cost
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> shape of the operand at its first call
    calls: int = 0  # quantisations of this step, in order of execution
    backward_seen: bool = False
    forward_seen: bool = False
    tiles: dict[int, list[tuple[int, TileStats]]] = field(default_factory=dict)
    tile_bytes: int = 0
    losses: list[Tensor] = field(default_factory=list)
    modules: weakref.WeakSet[nn.Linear] = field(default_factory=weakref.WeakSet)  # those taken over
    unasked: dict[int, int] = field(default_factory=dict)  # columnwise row -> calls of this step that left it out
    on_forward: Callable[[], None] | None = None  # what ends the step before, where its optimizers ran in backward

    def row(self, first: int, operand: int, columnwise: bool) -> int:
        """Row of a site; of an operand that one quantisation serves in both directions, its only one."""
        return first + self.rows.get((operand, columnwise), self.rows[operand, False])

    def wanted(self, first: int, operand: int, rowwise: bool, columnwise: bool) -> tuple[int, ...]:
        """Rows of the sites that are quantised when these directions are asked for."""
        asked = [c for c, wanted in ((False, rowwise), (True, columnwise)) if wanted]
        return tuple(dict.fromkeys(self.row(first, operand, c) for c in asked))

    def quantize(self, rows: tuple[int, ...], x_MK: Tensor, *, number: int | None, codes: bool = False) -> list[Any]:
        """Quantise for the GEMM, one result a row; observe on the way where it counts.

        Args:
            rows: one or both directions of one operand.
            x_MK: the operand.
            number: of the pass; None where the call does not count: evaluation, recomputation.
            codes: results are (codes, scale_inv) in place of dequantised operands.
        """
        count = number is not None
        used = [self.quantizers[row] for row in rows]
        if number is not None:
            for quantizer in used:
                quantizer.begin(number)
        observe = count and self.slab is not None and not self.paused
        if observe and self.calibrating:
            results = self._calibrate(used, x_MK, codes)
        else:
            stats = observe or (count and any(q.stateful for q in used))
            results = run_quantizers(used, x_MK, stats=stats, heavy=observe and self.sampled, codes=codes)
        for row, quantizer, (_, measured) in zip(rows, used, results, strict=True):
            if measured is None:
                continue
            if count:
                quantizer.end(measured)
            if observe:
                self.guard.run("accumulate", self._accumulate, row, x_MK, measured)
        return [out for out, _ in results]

    def note_unasked(self, first: int, operand: int, columnwise: bool) -> None:
        """A call that counts: remember it where it leaves out a direction that a recomputation may ask for."""
        row = self.rows.get((operand, True))
        if row is not None and not columnwise:
            self.unasked[first + row] = self.unasked.get(first + row, 0) + 1

    def count_unasked(self, first: int, operand: int, columnwise: bool) -> int | None:
        """In a recomputation: the row that the first pass did not see, so that it counts now; None when it saw all.

        Reentrant checkpointing runs the first pass without gradients, where nothing asks for the columnwise copy.
        """
        row = self.rows.get((operand, True))
        if row is None or not columnwise or not self.unasked.get(first + row):
            return None
        self.unasked[first + row] -= 1
        return first + row

    def pass_through(self, rows: tuple[int, ...], x_MK: Tensor, *, number: int | None) -> list[Tensor]:
        """The operand itself for a GEMM in high precision, float32, one copy a row; observed as ever."""
        if number is not None and (self.slab is not None or any(self.quantizers[row].stateful for row in rows)):
            self.quantize(rows, x_MK, number=number)
        return [x_MK.to(torch.float32, copy=True) for _ in rows]

    def settle(self) -> None:
        """Roll what belongs to passes that are over, so that states can be read or used outside of training."""
        numbers = {INPUT: self.passes.settle(), WEIGHT: self.passes.forward, GRAD_OUTPUT: -1}
        for row, quantizer in enumerate(self.quantizers):
            operand = next(o for (o, _), r in self.rows.items() if r == row % len(self.rows))
            quantizer.settle(numbers[operand])

    def _calibrate(self, used: list[SiteQuantizer], x_MK: Tensor, codes: bool) -> list[tuple[Any, TileStats | None]]:
        start = time.perf_counter()
        run_quantizers(used, x_MK, stats=False, heavy=False, codes=codes)
        bare = time.perf_counter() - start
        results = run_quantizers(used, x_MK, stats=True, heavy=True, codes=codes)
        self.observing_s += time.perf_counter() - start - 2 * bare
        self.calibration_s += bare
        return results

    def _accumulate(self, row: int, x_MK: Tensor, stats: TileStats) -> None:
        self.record(row, (x_MK.shape[0], x_MK.shape[1]), stats)

    def record(self, row: int, shape: tuple[int, int], stats: TileStats) -> None:
        """Merge one call into its row, and keep its tiles until the step closes."""
        if self.slab is None or self.paused:
            return
        self.shapes.setdefault(row, shape)
        order, self.calls = self.calls, self.calls + 1
        self.slab.accumulate(row, stats, order)
        if self.keep_tiles:
            # held by reference until the step closes; past the budget the older calls of this site go first
            held = self.tiles.setdefault(row, [])
            size = stats.amax.numel() * BYTES_PER_TILE
            held.append((order, stats))
            self.tile_bytes += size
            while self.tile_bytes > self.max_tile_bytes and len(held) > 1:
                self.tile_bytes -= held.pop(0)[1].amax.numel() * BYTES_PER_TILE

    def begin_step(self, *, sampled: bool) -> None:
        """Forget the step that has just been copied out."""
        self.calls = 0
        self.backward_seen = self.forward_seen = False
        self.on_forward = None
        self.unasked.clear()
        self.tiles.clear()
        self.tile_bytes = 0
        self.losses.clear()
        self.sampled = sampled


_plans: dict[int, Plan] = {}
_handles = itertools.count(1)
_lock = threading.Lock()


def add_plan(plan: Plan) -> int:
    """Make a plan known to the ops; returns its handle."""
    with _lock:
        plan.handle = next(_handles)
        _plans[plan.handle] = plan
    return plan.handle


def remove_plan(plan: Plan) -> None:
    """Forget a plan. Graphs compiled with its sites fall through to unobserved arithmetic only after detach."""
    with _lock:
        _plans.pop(plan.handle, None)


def site_tensor(plan: Plan, first_row: int) -> Tensor:
    """The 0-d int64 CPU tensor that stands for one Linear of a plan."""
    return torch.tensor((plan.handle << 32) | first_row, dtype=torch.int64, device="cpu")


def lookup(site: Tensor) -> tuple[Plan, int]:
    """The plan of a site, and its Linear's first row.

    Raises:
        RuntimeError: the watch was detached.
    """
    value = int(site)
    plan = _plans.get(value >> 32)
    if plan is None:
        raise RuntimeError(
            f"fp8watch site {value >> 32}:{value & 0xFFFFFFFF} belongs to a detached watch; "
            "run forward again after detach(), a graph kept from before cannot be continued"
        )
    return plan, value & 0xFFFFFFFF


def _number(plan: Plan, operand: int, count: bool) -> int | None:
    """Number of the pass that a call belongs to, None where it does not count."""
    if operand == GRAD_OUTPUT:
        plan.backward_seen = True
        return plan.passes.in_backward() if count else None
    if torch._C._current_graph_task_id() != -1:
        # inside a backward: activation checkpointing recomputes the forward, which was counted already
        plan.passes.recomputes()
        return None
    if not count:
        return None
    if plan.on_forward is not None:
        plan.guard.run("on_forward", plan.on_forward)
    plan.forward_seen = True
    return plan.passes.in_forward()


def _late(plan: Plan, first: int, operand: int, columnwise: bool, number: int | None, count: bool) -> int | None:
    """The row that counts although this is a recomputation; keeps the books of the first passes on the way."""
    if operand == GRAD_OUTPUT or not count:
        return None
    if number is None:
        return plan.count_unasked(first, operand, columnwise)
    plan.note_unasked(first, operand, columnwise)
    return None


def _run(
    x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool, *, codes: bool
) -> list[Any]:
    """What a GEMM reads of one operand, one result a row of the slab; observed on the way where it counts."""
    plan, first = lookup(site)
    number = _number(plan, operand, count)
    if x.numel() == 0:
        return []
    rows = plan.wanted(first, operand, rowwise, columnwise)
    late = _late(plan, first, operand, columnwise, number, count)
    if late is not None:
        plan.guard.run("recomputed", plan.quantize, (late,), x, number=plan.passes.forward)
    if not count and operand != GRAD_OUTPUT and torch._C._current_graph_task_id() == -1:
        for row in rows:  # evaluation reads the scales that training has left
            plan.quantizers[row].settle(plan.passes.settle())
    if plan.warming and not codes:
        return list(plan.pass_through(rows, x, number=number))
    return plan.quantize(rows, x, number=number, codes=codes)


def _quantize_dequantize(
    x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor]:
    outs = _run(x, site, operand, count, rowwise, columnwise, codes=False)
    none = x.new_empty((0,), dtype=torch.float32)
    if not outs:  # an empty batch has no tiles; its result is as empty as F.linear's
        empty = x.to(torch.float32, copy=True)
        return (empty if rowwise else none), (empty.clone() if columnwise else none)
    if rowwise and columnwise:
        return outs[0], (outs[1] if len(outs) == 2 else outs[0].clone())  # an op may not return one tensor twice
    return (outs[0], none) if rowwise else (none, outs[0] if columnwise else none)


quantize_dequantize = torch.library.custom_op("fp8watch::quantize_dequantize", mutates_args=())(_quantize_dequantize)


@quantize_dequantize.register_fake
def _(x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool) -> tuple[Tensor, Tensor]:
    full, none = x.new_empty(x.shape, dtype=torch.float32), x.new_empty((0,), dtype=torch.float32)
    return (full if rowwise else none), (torch.empty_like(full) if columnwise else none)


def _quantize_codes(
    x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outs = _run(x, site, operand, count, rowwise, columnwise, codes=True)
    none = (x.new_empty((0,), dtype=torch.uint8), x.new_empty((0,), dtype=torch.float32))
    found = [(data.view(torch.uint8), scale_inv) for data, scale_inv in outs]
    row, col = (found[0] if rowwise else none), none
    if columnwise:  # column by column in memory, as wgrad multiplies them
        col = found[-1][0].t().contiguous().t(), found[-1][1]
    return (*row, *col)


quantize_codes = torch.library.custom_op("fp8watch::quantize_codes", mutates_args=())(_quantize_codes)
"""Codes as bytes and scale_inv, rowwise and columnwise, both in the operand's own rows × columns; blockwise only."""


@quantize_codes.register_fake
def _(
    x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    none, no_scale = x.new_empty((0,), dtype=torch.uint8), x.new_empty((0,), dtype=torch.float32)
    row_shape = (-(-m // 128), -(-k // 128)) if operand == WEIGHT else (m, -(-k // 128))
    row = (x.new_empty((m, k), dtype=torch.uint8), x.new_empty(row_shape, dtype=torch.float32))
    col = (x.new_empty((k, m), dtype=torch.uint8).t(), x.new_empty((-(-m // 128), k), dtype=torch.float32))
    return (*(row if rowwise else (none, no_scale)), *(col if columnwise else (none.clone(), no_scale.clone())))


def _observe(x: Tensor, site: Tensor, operand: int, rowwise: bool, columnwise: bool) -> Tensor:
    plan, first = _plans.get(int(site) >> 32), int(site) & 0xFFFFFFFF
    if plan is not None:  # None: detached before this backward
        number = _number(plan, operand, True)
        late = _late(plan, first, operand, columnwise, number, True)
        if late is not None and x.numel():
            plan.guard.run("observe", plan.quantize, (late,), x, number=plan.passes.forward)
        if number is not None and x.numel():
            rows = plan.wanted(first, operand, rowwise, columnwise or (operand == WEIGHT and rowwise))
            if not rows:  # of a Linear of which only the bias is trained no GEMM reads the gradient
                return x.new_empty((0,))
            plan.guard.run("observe", plan.quantize, rows, x, number=number)
    return x.new_empty((0,))


observe = torch.library.custom_op("fp8watch::observe", mutates_args=())(_observe)


@observe.register_fake
def _(x: Tensor, site: Tensor, operand: int, rowwise: bool, columnwise: bool) -> Tensor:
    return x.new_empty((0,))


def _note_loss(loss: Tensor, site: Tensor) -> Tensor:
    plan = _plans.get(int(site) >> 32)
    if plan is not None and torch._C._current_graph_task_id() == -1 and len(plan.losses) < MAX_LOSSES:
        plan.losses.append(loss.detach().clone())
    return loss.new_empty((0,))


note_loss = torch.library.custom_op("fp8watch::note_loss", mutates_args=())(_note_loss)


@note_loss.register_fake
def _(loss: Tensor, site: Tensor) -> Tensor:
    return loss.new_empty((0,))


def _forward_ended(after: Tensor, site: Tensor, grad: bool) -> Tensor:
    plan = _plans.get(int(site) >> 32)
    if plan is not None and torch._C._current_graph_task_id() == -1:
        plan.passes.forward_ended(grad=grad)
    return after.new_empty((0,))


forward_ended = torch.library.custom_op("fp8watch::forward_ended", mutates_args=())(_forward_ended)


@forward_ended.register_fake
def _(after: Tensor, site: Tensor, grad: bool) -> Tensor:
    return after.new_empty((0,))


def _keep_side_effects() -> None:
    ops: Any = torch.ops.fp8watch
    for op in (
        ops.observe.default,
        ops.note_loss.default,
        ops.forward_ended.default,
        ops.quantize_dequantize.default,
        ops.quantize_codes.default,
    ):
        torch.fx.node.has_side_effect(op)  # an op without a used result would otherwise be removed from the graph


_keep_side_effects()
