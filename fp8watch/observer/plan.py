"""What one attach does at run time: a quantiser a row of the slab, and where its statistics go.

Upstream:   fp8watch.layers.custom_ops               Downstream: fp8watch.sketch.slab, fp8watch.sketch.tile_cache, fp8watch.sketch.weight_hash
Shapes:     operand [M, K] -> what a GEMM reads of it, and one slab row a direction
Thread:     training, and autograd's
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.checkpoint_consistency import Recomputed
from fp8watch.observer.nonfinite_checks import nonfinite_outputs
from fp8watch.observer.pass_counter import Passes
from fp8watch.observer.probes import probe_numbers, probe_stats
from fp8watch.observer.stopwatch import EXTRA, LIGHT, SAMPLING, Stopwatch
from fp8watch.quantize.site_quantizer import SiteQuantizer, measure_operand, places, run_quantizers
from fp8watch.recipe import OPERANDS, Recipe
from fp8watch.sketch.slab import Slab
from fp8watch.sketch.tile_cache import HeldTiles
from fp8watch.sketch.weight_hash import hash_bits
from fp8watch_agent.guard import Guard

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
TILE_BYTES = 64 << 20
"""Of tile statistics, held on the device: a quarter for the running step, for each of two on their way, for the history."""

MAX_LOSSES = 4096
"""Losses held for one step: a loop whose steps never end must not fill the memory."""

STUCK_AFTER_PASSES = 20
"""Backward passes without an end of step that are worth a word; more micro-batches than that are rare."""


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
    hashing: bool = False  # in this step the weights are hashed
    checks_outputs: bool = True  # in this step the outputs of GEMMs and the gradients of parameters are looked at
    keep_tiles: bool = True
    handle: int = 0
    paused: bool = False  # by the user
    outside: bool = False  # of the windows that attach was given
    unobserved: frozenset[int] = frozenset()  # rows that attach was told to leave alone
    stopwatch: Stopwatch | None = None  # in a step in which observing is timed
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> shape of the operand at its first call
    calls: int = 0  # quantisations of this step, in order of execution
    backward_seen: bool = False
    forward_seen: bool = False
    root_seen: bool = False  # the model returned, with gradients
    num_passes: int = 0  # backward passes since the last end of a step; forward passes where none of ours is seen
    on_stuck: weakref.WeakMethod[Callable[[], None]] | None = None  # says that no step ends
    losses_add_up: bool = False  # those of this step are shares of one loss, not each the mean of its micro-batch
    tiles: HeldTiles = field(default_factory=lambda: HeldTiles(TILE_BYTES // 4))
    hashed: set[int] = field(default_factory=set)  # rows whose weight was hashed in this step
    recomputed: Recomputed = field(default_factory=Recomputed)
    losses: list[Tensor] = field(default_factory=list)
    logits: dict[str, Tensor] = field(default_factory=dict)  # attention module -> largest logit of this step
    modules: weakref.WeakSet[nn.Linear] = field(default_factory=weakref.WeakSet)  # those taken over
    unasked: dict[int, int] = field(default_factory=dict)  # columnwise row -> calls of this step that left it out
    _task: int = -1
    _forward_since: bool = False  # of the last backward that was counted

    def saw_forward(self) -> None:
        """A watched module is in its forward, and it counts."""
        self.forward_seen = self._forward_since = True

    on_forward: Callable[[], None] | None = None  # what ends the step before, where its optimizers ran in backward

    @property
    def observing(self) -> bool:
        """Whether what runs now enters the statistics."""
        return self.slab is not None and not self.paused and not self.outside

    def saw_backward(self) -> None:
        """A watched module is in its backward."""
        self.backward_seen = True
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if self._forward_since:  # reentrant checkpointing nests a backward for each of its parts
                self._forward_since = False
                self._count_pass()

    def saw_root(self, *, grad: bool) -> None:
        """The model returned. Where no watched module ran in it, this is all that is known of the pass."""
        if not grad or self.forward_seen:
            return
        if self.on_forward is not None:
            self.guard.run("on_forward", self.on_forward)
        self.root_seen = True
        self._count_pass()

    def _count_pass(self) -> None:
        self.num_passes += 1
        if self.num_passes == STUCK_AFTER_PASSES and self.on_stuck is not None and (say := self.on_stuck()) is not None:
            self.guard.run("stuck", say)

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
        observe = count and self._any_observed(rows)
        if observe and self.stopwatch is not None:
            results = self._timed(self.stopwatch, used, x_MK, codes)
        else:
            stats = observe or (count and any(q.stateful for q in used))
            results = run_quantizers(used, x_MK, stats=stats, heavy=observe and self.sampled, codes=codes)
        began = self.stopwatch.mark() if self.stopwatch is not None else None
        for row, quantizer, (_, measured) in zip(rows, used, results, strict=True):
            if measured is None:
                continue
            if count:
                quantizer.end(measured)
            if observe:
                self.guard.run("accumulate", self._accumulate, row, x_MK, measured)
        if self.stopwatch is not None:
            self.stopwatch.add(LIGHT, began, self.stopwatch.mark())
        return [out for out, _ in results]

    def observe(self, rows: tuple[int, ...], x_MK: Tensor, *, number: int) -> None:
        """Measure an operand that no GEMM reads quantised: nothing of its size is made. Rows that are not observed are
        left out, but for scales with a history, which must see each pass."""
        observing = self.observing
        if not observing or self.unobserved:
            left_alone = self.unobserved if observing else rows
            rows = tuple(row for row in rows if row not in left_alone or self.quantizers[row].stateful)
            if not rows:
                return
        used = [self.quantizers[row] for row in rows]
        for quantizer in used:
            quantizer.begin(number)
        heavy = self.sampled and self._any_observed(rows)
        if self.stopwatch is not None:
            results = self._timed_alone(self.stopwatch, used, x_MK, heavy=heavy)
        else:
            results = measure_operand(used, x_MK, heavy=heavy)
        for row, quantizer, measured in zip(rows, used, results, strict=True):
            quantizer.end(measured)
            if observing:
                self.guard.run("accumulate", self._accumulate, row, x_MK, measured)

    @property
    def _stateful(self) -> bool:
        return self.recipe.history is not None

    def _any_observed(self, rows: tuple[int, ...]) -> bool:
        return self.observing and (not self.unobserved or any(row not in self.unobserved for row in rows))

    def idle(self, first: int) -> bool:
        """Whether nothing of a Linear need be looked at now, where its GEMMs stay as they are."""
        if self._stateful:
            return False
        return not self._any_observed(tuple(range(first, first + len(self.rows))) if self.unobserved else ())

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
            began = self.stopwatch.mark() if self.stopwatch is not None else None
            self.observe(rows, x_MK, number=number)
            if self.stopwatch is not None:
                self.stopwatch.add(LIGHT, began, self.stopwatch.mark())
        return [x_MK.to(torch.float32, copy=True) for _ in rows]

    def settle(self) -> None:
        """Roll what belongs to passes that are over, so that states can be read or used outside of training."""
        numbers = {INPUT: self.passes.settle(), WEIGHT: self.passes.forward, GRAD_OUTPUT: -1}
        for row, quantizer in enumerate(self.quantizers):
            operand = next(o for (o, _), r in self.rows.items() if r == row % len(self.rows))
            quantizer.settle(numbers[operand])

    def _timed(
        self, stopwatch: Stopwatch, used: list[SiteQuantizer], x_MK: Tensor, codes: bool
    ) -> list[tuple[Any, TileStats | None]]:
        """Quantise as training would without being observed, with the light statistics, and with all."""
        marks = [stopwatch.mark()]
        for stats, heavy in ((False, False), (False, False), (True, False), (True, True)):  # the first warms the caches
            results = run_quantizers(used, x_MK, stats=stats, heavy=heavy, codes=codes)
            marks.append(stopwatch.mark())
        start, warm, bare, light, full = marks
        stopwatch.add(EXTRA, start, light)
        stopwatch.add(LIGHT, bare, light)
        stopwatch.add(LIGHT, warm, bare, -1)
        stopwatch.add(SAMPLING, light, full)
        stopwatch.add(SAMPLING, bare, light, -1)
        return results

    def _timed_alone(
        self, stopwatch: Stopwatch, used: list[SiteQuantizer], x_MK: Tensor, *, heavy: bool
    ) -> list[TileStats]:
        """Measure with the light statistics, and with all: what the second take more is what sampling costs. Whoever
        calls times all of it as light, so the second is taken off again."""
        begin = stopwatch.mark()
        light = measure_operand(used, x_MK, heavy=False)
        middle = stopwatch.mark()
        full = measure_operand(used, x_MK, heavy=True)
        end = stopwatch.mark()
        stopwatch.add(LIGHT, middle, end, -1)
        stopwatch.add(SAMPLING, middle, end)
        stopwatch.add(SAMPLING, begin, middle, -1)
        stopwatch.add(EXTRA, begin, middle)
        return full if heavy else light

    def _accumulate(self, row: int, x_MK: Tensor, stats: TileStats) -> None:
        self.record(row, stats.shape, stats)
        if self.hashing and row not in self.hashed and self.is_weight(row) and row not in self.unobserved:
            assert self.slab is not None
            self.hashed.add(row)
            self.slab.keep_hash(row, hash_bits(x_MK))

    def is_weight(self, row: int) -> bool:
        """Whether a row is a Linear's weight, rowwise."""
        return row < len(self.quantizers) and row % len(self.rows) == self.rows[WEIGHT, False]

    def record(self, row: int, shape: tuple[int, int], stats: TileStats) -> None:
        """Merge one call into its row, and keep its tiles until the step closes."""
        if self.slab is None or not self.observing or row in self.unobserved:
            return
        self.shapes.setdefault(row, shape)
        order, self.calls = self.calls, self.calls + 1
        self.slab.accumulate(row, stats, order)
        if stats.folded is not None:
            stats.folded.release()
        if self.keep_tiles:
            self.tiles.add(row, order, stats)

    def note_output(self, row: int, y: Tensor) -> None:
        """Merge what is not finite in the output of a GEMM into the row of its operand."""
        if row in self.unobserved:
            return
        began = self.stopwatch.mark() if self.stopwatch is not None else None
        count = nonfinite_outputs(y)
        if count is not None and self.slab is not None:
            self.slab.count_outputs(row, count)
        if self.stopwatch is not None:
            self.stopwatch.add(SAMPLING, began, self.stopwatch.mark())

    def note_probe(self, row: int, y: Tensor) -> None:
        """Merge an output into the row of its probe."""
        if self.slab is None or not y.numel() or not (y.is_cpu or self.checks_outputs):
            return
        began = self.stopwatch.mark() if self.stopwatch is not None else None
        order, self.calls = self.calls, self.calls + 1
        if row not in self.shapes:
            self.shapes[row] = (y.numel() // y.shape[-1], y.shape[-1]) if y.dim() else (1, 1)
        if self.slab.device.type != "cpu":
            self.slab.accumulate(row, probe_stats(_flat(y), heavy=self.sampled), order)
        elif not self.slab.look(row, y, order, energy=self.sampled):
            self.slab.accumulate_probe(row, probe_numbers(_flat(y), heavy=self.sampled), order)
        if self.stopwatch is not None:
            self.stopwatch.add(LIGHT, began, self.stopwatch.mark())

    def loss(self) -> Tensor:
        """The loss of the step: the sum of its shares, or the mean over its micro-batches. [] float32"""
        losses = torch.stack([x.float() for x in self.losses])
        return losses.sum() if self.losses_add_up else losses.mean()

    def note_logits(self, fqn: str, x: Tensor) -> None:
        """Keep the largest logit of this step; −Inf is what masks are made of."""
        largest, before = x.amax().float(), self.logits.get(fqn)
        self.logits[fqn] = largest if before is None else torch.maximum(before, largest)

    def begin_step(self, *, sampled: bool) -> None:
        """Forget the step that has just been copied out."""
        self.calls = 0
        self.backward_seen = self.forward_seen = self.root_seen = self.losses_add_up = False
        self.num_passes = 0
        self.on_forward = None
        self.unasked.clear()
        self.tiles.take()
        self.hashed.clear()
        self.losses.clear()
        self.logits.clear()
        self.sampled = sampled


def _flat(y: Tensor) -> Tensor:
    """[..., N] as [M, N]."""
    return y.reshape(-1, y.shape[-1]) if y.dim() else y.reshape(1, 1)
