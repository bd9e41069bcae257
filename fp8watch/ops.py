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

from .formats import fp8_format
from .kernels.registry import Backend
from .quantize.stats import TileStats
from .recipe import OperandRecipe
from .slab import Slab

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
ROWS_PER_LINEAR = 5
BYTES_PER_TILE = 100
"""What the statistics of one tile take while they are held: five int64 counts, five float64 sums, seven of 1–4 bytes."""

MAX_LOSSES = 4096
"""Losses held for one step: a loop whose steps never end must not fill the memory."""

FIRST_ROW = {INPUT: 0, WEIGHT: 2, GRAD_OUTPUT: 3}
"""Rows of a Linear in the slab: input rowwise, input columnwise, weight, grad_output rowwise, grad_output columnwise."""


@dataclass
class SiteQuantizer:
    """Quantises one site. Recipes with a state of their own keep it here, one object a site."""

    spec: OperandRecipe
    columnwise: bool
    backend: Backend

    @property
    def tile(self) -> tuple[int, int]:
        """Tile in the operand's own rows × columns; a columnwise tile runs along the tokens: (128, 1)."""
        m, k = self.spec.tile
        return (k, m) if self.columnwise else (m, k)

    def __call__(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[Tensor, TileStats | None]:
        """Dequantised [M, K] float32 and, when asked for, the statistics of its tiles."""
        s = self.spec
        out, _, measured = self.backend.quantize_dequantize(
            x_MK, self.tile, fp8_format(s.format), s.power_2_scale, s.eps, stats=stats, heavy=heavy
        )
        return out, measured


@dataclass
class Plan:
    """What one `attach` does at run time: a quantiser a row, and where its statistics go."""

    quantizers: list[SiteQuantizer]
    slab: Slab | None
    guard: Guard
    recipe_observes: bool
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
    on_forward: Callable[[], None] | None = None  # what ends the step before, where its optimizers ran in backward

    def quantize(self, row: int, x_MK: Tensor, *, count: bool) -> Tensor:
        """Quantise and dequantise for the GEMM; observe on the way where it counts."""
        observe = count and self.slab is not None and not self.paused
        if observe and self.calibrating:
            return self._calibrate(row, x_MK)
        out, stats = self.quantizers[row](x_MK, stats=observe, heavy=self.sampled)
        if stats is not None and observe:
            self.guard.run("accumulate", self._accumulate, row, x_MK, stats)
        return out

    def _calibrate(self, row: int, x_MK: Tensor) -> Tensor:
        start = time.perf_counter()
        self.quantizers[row](x_MK, stats=False, heavy=False)
        bare = time.perf_counter() - start
        out, stats = self.quantizers[row](x_MK, stats=True, heavy=True)
        if stats is not None:
            self.guard.run("accumulate", self._accumulate, row, x_MK, stats)
        self.observing_s += time.perf_counter() - start - 2 * bare
        self.calibration_s += bare
        return out

    def _accumulate(self, row: int, x_MK: Tensor, stats: TileStats) -> None:
        assert self.slab is not None
        if row not in self.shapes:
            self.shapes[row] = (x_MK.shape[0], x_MK.shape[1])
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


def _counts(plan: Plan, operand: int, count: bool) -> bool:
    if operand == GRAD_OUTPUT:
        plan.backward_seen = True
        return count
    if torch._C._current_graph_task_id() != -1:
        return False  # inside a backward: activation checkpointing recomputes the forward, which was counted already
    if count:
        if plan.on_forward is not None:
            plan.guard.run("on_forward", plan.on_forward)
        plan.forward_seen = True
    return count


def _quantize_dequantize(
    x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor]:
    plan, first = lookup(site)
    row = first + FIRST_ROW[operand]
    count = _counts(plan, operand, count)
    none = x.new_empty((0,), dtype=torch.float32)
    if x.numel() == 0:  # an empty batch has no tiles; its result is as empty as F.linear's
        empty = x.to(torch.float32, copy=True)
        return (empty if rowwise else none), (empty.clone() if columnwise else none)
    x_row = plan.quantize(row, x, count=count) if rowwise else none
    x_col = plan.quantize(row + 1, x, count=count) if columnwise else none
    return x_row, x_col


quantize_dequantize = torch.library.custom_op("fp8watch::quantize_dequantize", mutates_args=())(_quantize_dequantize)


@quantize_dequantize.register_fake
def _(x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool) -> tuple[Tensor, Tensor]:
    full, none = x.new_empty(x.shape, dtype=torch.float32), x.new_empty((0,), dtype=torch.float32)
    return (full if rowwise else none), (torch.empty_like(full) if columnwise else none)


def _observe(x: Tensor, site: Tensor, operand: int, rowwise: bool, columnwise: bool) -> Tensor:
    plan, first = _plans.get(int(site) >> 32), int(site) & 0xFFFFFFFF
    if plan is not None and _counts(plan, operand, True) and x.numel():  # None: detached before this backward
        for wanted, row in ((rowwise, 0), (columnwise, 1)):
            if wanted:
                plan.guard.run("observe", plan.quantize, first + FIRST_ROW[operand] + row, x, count=True)
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


def _keep_side_effects() -> None:
    ops: Any = torch.ops.fp8watch
    for op in (ops.observe.default, ops.note_loss.default, ops.quantize_dequantize.default):
        torch.fx.node.has_side_effect(op)  # an op without a used result would otherwise be removed from the graph


_keep_side_effects()
