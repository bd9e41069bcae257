"""What one attach does at run time with an operand: quantise it for its GEMM, and merge what is seen into its rows.

Upstream:   fp8watch.layers.custom_ops
Downstream: fp8watch.quantize.site_quantizer, fp8watch.sketch.slab, fp8watch.session.step_flush
Shapes:     operand [M, K] -> what a GEMM reads of it, and one slab row a direction
Thread:     training, and autograd's
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.kernels.backend import Into
from fp8watch.kernels.cpu import largest_magnitude
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.calibration import timed_measure, timed_quantize
from fp8watch.observer.canary import Canary
from fp8watch.observer.checkpoint_consistency import Recomputed
from fp8watch.observer.expert_rows import ExpertRows
from fp8watch.observer.fault_why import FaultWhy
from fp8watch.observer.nonfinite_checks import nonfinite_outputs
from fp8watch.observer.pass_counter import Passes
from fp8watch.observer.probes import probe_numbers, probe_stats
from fp8watch.observer.shared_input import SharedInput
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT, OperandRows, SiteRows
from fp8watch.observer.step_sample import NO, YES, ByRow, StepSample
from fp8watch.observer.step_state import StepState
from fp8watch.observer.stopwatch import FIXED, LIGHT, SAMPLING, Stopwatch
from fp8watch.quantize.site_quantizer import Wanted, measure_operand, run_into, run_quantizers
from fp8watch.recipe import Recipe
from fp8watch.sketch.slab import Slab
from fp8watch.sketch.tile_cache import HeldTiles
from fp8watch.sketch.weight_hash import hash_bits
from fp8watch_agent.guard import Guard

TILE_BYTES = 64 << 20
"""Of tile statistics, held on the device: a quarter for the running step, for each of two on their way, for the history."""


@dataclass
class ObservationPlan:
    """What the custom ops find under their handle: the rows of the sites, the running step, and where statistics go."""

    sites: SiteRows
    slab: Slab | None  # None: nothing is observed
    guard: Guard
    recipe: Recipe
    step: StepState
    passes: Passes = field(default_factory=Passes)
    recomputed: Recomputed = field(default_factory=Recomputed)
    shared_input: SharedInput = field(default_factory=SharedInput)
    canary: Canary = field(default_factory=Canary)
    experts: ExpertRows = field(default_factory=ExpertRows)
    why: FaultWhy = field(default_factory=FaultWhy)
    tiles: HeldTiles = field(default_factory=lambda: HeldTiles(TILE_BYTES // 4))
    stopwatch: Stopwatch | None = None  # in a step in which observing is timed
    as_they_are: bool = False  # no GEMM that is observed reads codes of ours: each may be looked at in turns
    resting: ByRow = NO  # of a Linear's first row: nothing of it is looked at, where its GEMMs stay as they are
    handle: int = 0
    turns: dict[int, Any] = field(default_factory=dict)  # first row of a foreign Linear -> the call that is looked at
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # those taken over

    def begin_step(self, sample: StepSample) -> None:
        """Forget the step that has just been copied out."""
        self.tiles.take()
        self.shared_input = SharedInput()
        for turn in list(self.turns.values()):  # whose backward never came: it holds its operands
            turn.close()
        now = perf_counter()
        if self.canary.turn or now >= self.canary.due:
            self.canary.begin_step(now)
        self.step.begin(sample)
        self._decide_rest()

    def pause(self, paused: bool) -> None:
        """Observe nothing from now on, or observe again."""
        self.step.paused = paused
        self._decide_rest()

    def _decide_rest(self) -> None:
        if not self.as_they_are or self.recipe.history is not None or self.stopwatch is not None:
            self.resting = NO
        else:
            self.resting = self.sites.resting(self.step.sample) if self.observing else YES

    @property
    def observing(self) -> bool:
        """Whether what runs now enters the statistics."""
        return self.slab is not None and not self.step.paused and not self.step.outside

    def elsewhere(self, x: Tensor) -> bool:
        """Whether a tensor is not where the rows are: a model that was moved behind attach, or that has parts on several
        devices. To look at it all the same would wait for a device, or write from one into the memory of another."""
        slab = self.slab
        return slab is not None and (not x.is_cpu if slab.is_cpu else x.device != slab.device)

    def quantize(
        self, asked: OperandRows, x_MK: Tensor, *, number: int | None, wanted: tuple[Wanted, ...] = ()
    ) -> list[Any]:
        """Quantise for the GEMM, one result a row; observe on the way where it counts.

        Args:
            asked: one or both directions of one operand.
            x_MK: the operand.
            number: of the pass; None where the call does not count: evaluation, recomputation.
            wanted: what the result of each row is, see `run_quantizers`; empty: dequantised operands.
        """
        step, stopwatch = self.step, self.stopwatch
        counts = number is not None
        if number is not None and asked.stateful:
            for quantizer in asked.quantizers:
                quantizer.begin(number)
        observe = counts and asked.observed and self.observing and not self.elsewhere(x_MK)
        heavy = observe and bool(step.sample.full[asked.rows[0]])
        into = self._into(asked) if observe else None
        if into is not None and stopwatch is None:
            made, merged = run_into(asked.quantizers, x_MK, heavy=heavy, wanted=wanted, into=into)
            self._keep(asked, x_MK, merged, into.order)
            return made
        if observe and stopwatch is not None:
            scratch = None if into is None else self._into(asked, scratch=True)
            results = timed_quantize(stopwatch, asked, x_MK, wanted=wanted, into=into, scratch=scratch)
        else:
            stats = observe or (counts and asked.stateful)
            results = run_quantizers(
                asked.quantizers, x_MK, together=asked.together, stats=stats, heavy=heavy, wanted=wanted, into=into
            )
        began = stopwatch.mark() if stopwatch is not None else None
        outs: list[Any] = []
        measured: list[TileStats] = []
        for out, seen in results:
            outs.append(out)
            if seen is not None:
                measured.append(seen)
        if counts and measured:
            self._merge(asked, x_MK, measured, observing=observe, into=into)
        if stopwatch is not None:
            stopwatch.add(LIGHT, began, stopwatch.mark())
        return outs

    def observe(self, asked: OperandRows, x_MK: Tensor, *, number: int, source: Tensor | None = None) -> None:
        """Measure an operand that no GEMM reads quantised: nothing of its size is made. Rows that are not observed are
        left out, but for scales with a history, which must see each pass.

        Args:
            asked: one or both directions of one operand.
            x_MK: the operand.
            number: of the pass.
            source: the tensor that the Linear was called with, where other Linears may be called with it too.
        """
        observing = self.observing and not self.elsewhere(x_MK)
        if not observing:
            if not asked.stateful:
                return
        elif len(asked.looked_at) != len(asked.rows):
            if not asked.looked_at:
                return
            asked = self.sites.part(asked.looked_at)
        if asked.stateful:
            for quantizer in asked.quantizers:
                quantizer.begin(number)
        heavy = observing and asked.observed and bool(self.step.sample.full[asked.rows[0]])
        if source is not None and (not source.is_cpu or source.is_inference()):
            source = None
        if source is not None and asked.kind is not None:
            known = self.shared_input.find(source, asked.kind, heavy=heavy)
            if known is not None:
                self._merge(asked, x_MK, known, observing=observing)
                return
        into = self._into(asked) if observing else None
        if self.stopwatch is not None:
            scratch = None if into is None else self._into(asked, scratch=True)
            results = timed_measure(self.stopwatch, asked, x_MK, heavy=heavy, into=into, scratch=scratch)
        else:
            results = measure_operand(asked.quantizers, x_MK, together=asked.together, heavy=heavy, into=into)
        if source is not None and asked.kind is not None:
            self.shared_input.keep(source, asked.kind, tuple(results), heavy=heavy)
        self._merge(asked, x_MK, results, observing=observing, into=into)

    def idle(self, first: int) -> bool:
        """Whether nothing of a Linear need be looked at now, where its GEMMs stay as they are."""
        if self.recipe.history is not None:
            return False
        return not (self.observing and self.step.sample.light[first] and self.sites.any_observed(first))

    def hash_due(self, first: int) -> bool:
        """Whether the weight of a Linear that is idle is hashed in this step all the same."""
        return self.observing and bool(self.step.sample.hashes[self.sites.row(first, WEIGHT, False)])

    def pass_through(self, asked: OperandRows, x_MK: Tensor, *, number: int | None) -> list[Tensor]:
        """The operand itself for a GEMM in high precision, float32, one copy a row; observed as ever."""
        if number is not None and (self.slab is not None or asked.stateful):
            began = self.stopwatch.mark() if self.stopwatch is not None else None
            self.observe(asked, x_MK, number=number)
            if self.stopwatch is not None:
                self.stopwatch.add(LIGHT, began, self.stopwatch.mark())
        return [x_MK.to(torch.float32, copy=True) for _ in asked.rows]

    def close_passes(self) -> None:
        """Roll what belongs to passes that are over, so that states can be read or used outside of training."""
        numbers = {INPUT: self.passes.close_passes(), WEIGHT: self.passes.forward, GRAD_OUTPUT: -1}
        operands = {row: operand for (operand, _), row in self.sites.rows.items()}
        for row, quantizer in enumerate(self.sites.quantizers):
            quantizer.close_passes(numbers[operands[row % len(operands)]])

    def record(self, row: int, shape: tuple[int, int], stats: TileStats) -> None:
        """Merge one call that somebody else measured into its row."""
        if self.slab is None or not self.observing or row in self.sites.unobserved:
            return
        if not self.elsewhere(stats.amax):
            self._accumulate(self.slab, row, shape, stats)

    def _into(self, asked: OperandRows, *, scratch: bool = False) -> Into | None:
        """Where a call merges what it measures by itself; None where that is done after it."""
        slab, step = self.slab, self.step
        if slab is None or not asked.merges:
            return None
        try:
            into = slab.into(asked.rows, step.calls, scratch=scratch)
        except Exception as error:  # noqa: BLE001 - as below
            self.guard.swallow("accumulate", error)
            return None
        if not scratch:
            step.calls += len(asked.rows)
        return into

    def _merge(
        self,
        asked: OperandRows,
        x_MK: Tensor,
        measured: Sequence[TileStats],
        *,
        observing: bool,
        into: Into | None = None,
    ) -> None:
        """What was measured of an operand, one a row: to the scales with a history, and to the rows that are observed,
        where it is not there yet. Whatever fails in the latter is counted and costs its row alone."""
        unobserved = self.sites.unobserved
        if into is not None:
            self._keep(asked, x_MK, measured, into.order)
            return
        together = observing and self.slab is not None and self._accumulate_both(self.slab, asked.rows, measured)
        for row, quantizer, stats in zip(asked.rows, asked.quantizers, measured, strict=True):
            if asked.stateful:
                quantizer.end(stats)
            if not observing or self.slab is None or row in unobserved:
                continue
            try:
                self._accumulate(self.slab, row, stats.shape, stats, is_there=together)
                self._hash(row, x_MK)
            except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
                self.guard.swallow("accumulate", error)

    def _keep(self, asked: OperandRows, x_MK: Tensor, measured: Sequence[TileStats], order: int) -> None:
        """Hold the tiles of what is merged already until the step closes, and hash a weight whose turn it is."""
        rows, shapes = asked.rows, self.sites.shapes
        try:
            if rows[0] not in shapes or rows[-1] not in shapes or self.experts.num_experts:
                for row, stats in zip(rows, measured, strict=True):
                    self._hold(row, order, stats)
                    order += 1
            else:
                self.tiles.add(rows, order, measured)
            if self.step.sample.hashes[rows[0]]:
                self._hash(rows[0], x_MK)
        except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
            self.guard.swallow("accumulate", error)

    def _hash(self, row: int, x_MK: Tensor) -> None:
        """Put the hash of a weight into its row, once in each step in which it has its turn."""
        step = self.step
        if self.slab is not None and step.sample.hashes[row] and row not in step.hashed and self.sites.is_weight(row):
            step.hashed.add(row)
            self.slab.keep_hash(row, hash_bits(x_MK))

    def _accumulate_both(self, slab: Slab, rows: tuple[int, ...], measured: Sequence[TileStats]) -> bool:
        """Merge both directions of an operand at once, where that can be done."""
        if any(row in self.sites.unobserved for row in rows):
            return False
        try:
            return slab.accumulate_both(rows, measured, self.step.calls)
        except Exception as error:  # noqa: BLE001 - as below, where each of them is tried
            self.guard.swallow("accumulate", error)
            return False

    def _accumulate(
        self, slab: Slab, row: int, shape: tuple[int, int], stats: TileStats, *, is_there: bool = False
    ) -> None:
        """Merge one call into its row, if it is not there, and keep its tiles until the step closes."""
        step = self.step
        order, step.calls = step.calls, step.calls + 1
        if not is_there:
            slab.accumulate(row, stats, order)
        if stats.folded is not None:
            stats.folded.release()
        self._hold(row, order, stats, shape)

    def _hold(self, row: int, order: int, stats: TileStats, shape: tuple[int, int] | None = None) -> None:
        """Keep the tiles of one call until the step closes."""
        if row not in self.sites.shapes:
            self.sites.shapes[row] = shape or stats.shape
        self.tiles.add((row,), order, (stats,))
        if row in self.experts.num_experts:
            self.experts.see(row, stats)

    def note_output(self, row: int, y: Tensor) -> None:
        """Merge what is not finite in the output of a GEMM into the row of its operand, in the steps that look at it."""
        if not self.step.sample.outputs[row] or not self.observing or row in self.sites.unobserved or self.elsewhere(y):
            return
        began = self.stopwatch.mark() if self.stopwatch is not None else None
        try:
            if y.is_cpu:  # one read settles the usual case
                count = None if y.numel() and math.isfinite(largest_magnitude(y)) else nonfinite_outputs(y)
            else:
                there = self.slab is not None and self.slab.count_outputs_there(
                    row, y, nan_only=y.dtype == torch.float16
                )
                count = None if there else nonfinite_outputs(y)
            if count is not None and self.slab is not None:
                self.slab.count_outputs(row, count)
        except Exception as error:  # noqa: BLE001 - as above
            self.guard.swallow("output", error)
        if self.stopwatch is not None:
            self.stopwatch.add(SAMPLING, began, self.stopwatch.mark())

    def note_probe(self, row: int, y: Tensor, entered: tuple[str, Tensor] | None = None) -> None:
        """Merge an output, or an input, into the row of its probe. `entered`, of a Linear: its name and what it was given, which says whether
        what is not finite came in or was made there."""
        step, shapes, slab = self.step, self.sites.shapes, self.slab
        if slab is None or not y.numel() or not (y.is_cpu or step.sample.outputs[row]) or self.elsewhere(y):
            return
        began = self.stopwatch.mark() if self.stopwatch is not None else None
        heavy = bool(step.sample.full[row])
        order, step.calls = step.calls, step.calls + 1
        if row not in shapes:
            shapes[row] = (y.numel() // y.shape[-1], y.shape[-1]) if y.dim() else (1, 1)
        if not (slab.is_cpu and slab.look(row, y, order, energy=heavy)):
            y_MN = y.detach().reshape(-1, y.shape[-1]) if y.dim() else y.detach().reshape(1, 1)
            if slab.is_cpu:
                slab.accumulate_probe(row, probe_numbers(y_MN, heavy=heavy), order)
            elif not slab.look_there(row, y_MN, order, energy=heavy):
                slab.accumulate(row, probe_stats(y_MN, heavy=heavy), order)
            step.note_entered(entered)
        if self.stopwatch is not None:
            self.stopwatch.add(FIXED, began, self.stopwatch.mark())
