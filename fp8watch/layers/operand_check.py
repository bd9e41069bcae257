"""What the GEMMs of a module read, held against its operands: rows in a full sample, some tiles closely in its turn.

Shapes:     operand [M, K], and what was made of it -> a few counts in one slab row a direction
Thread:     training, and autograd's
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fp8watch.kernels import reference
from fp8watch.layers.ask_why import why_codes
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.site_rows import OperandRows
from fp8watch.observer.stopwatch import SAMPLING
from fp8watch.quantize.rounding_bound import check_rounding, part_of_rows, rows_equal, rows_hold
from fp8watch.quantize.self_consistency import Reads, check_quantiser
from fp8watch.quantize.site_quantizer import DelayedQuantizer, SiteQuantizer
from fp8watch.sketch.slab import Slab


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured: a turn in it would be taken in every replay."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def hold_against_operand(plan: ObservationPlan, asked: OperandRows, x_MK: Tensor, outs: Sequence[Any]) -> None:
    """Check each direction of an operand once in a turn, and merge what was found into its row.

    Args:
        plan: whose slab it goes to.
        asked: the directions that were quantised.
        x_MK: the operand.
        outs: what the GEMMs are handed, one a row: dequantised values, (codes, scale_inv), or (values, (codes, scale_inv)).
    """
    slab, canary = plan.slab, plan.canary
    if slab is None or not plan.observing or plan.stopwatch is not None or capturing(x_MK):
        return
    began, asking = perf_counter(), plan.why.spent_s
    for row, quantizer, out in zip(asked.rows, asked.quantizers, outs, strict=True):
        if row in plan.sites.unobserved or not canary.takes(row, "operand"):
            continue
        scale = quantizer.state.scale if isinstance(quantizer, DelayedQuantizer) else None
        near = slab.tile_to_look_at(row)
        for reads in _copies(out, quantizer.tile_for((int(x_MK.shape[0]), int(x_MK.shape[1])))):
            x = quantizer.as_cast(x_MK)
            found = check_quantiser(x, reads, quantizer.spec, scale, near, canary.phase)
            slab.accumulate_quantiser(row, found)
            why_codes(plan, row, x, reads, quantizer.spec, scale, found)
    canary.spent_s += perf_counter() - began - (plan.why.spent_s - asking)


def hold_rows(plan: ObservationPlan, asked: OperandRows, x_MK: Tensor, outs: Sequence[Any]) -> None:
    """Read rows of what the GEMMs are handed, in some calls of a step that takes full statistics of the operand (see
    `StepState.holds`); where a row lost more than rounding takes, that tile is looked at closely.

    Args: as of `hold_against_operand`.
    """
    slab, stopwatch = plan.slab, plan.stopwatch
    if slab is None or not plan.observing or capturing(x_MK):
        return
    began = stopwatch.mark() if stopwatch is not None else None
    for row, quantizer, out in zip(asked.rows, asked.quantizers, outs, strict=True):
        if row in plan.sites.unobserved or not quantizer.rows_bound or not plan.step.holds(row, "operand"):
            continue
        shape = int(x_MK.shape[0]), int(x_MK.shape[1])
        scale = quantizer.state.scale if isinstance(quantizer, DelayedQuantizer) else None
        for reads in _copies(out, quantizer.tile_for(shape)):
            _hold_copy(plan, slab, row, quantizer, x_MK, reads, scale)
    if stopwatch is not None:
        stopwatch.add(SAMPLING, began, stopwatch.mark())


def hold_kept(plan: ObservationPlan, row: int, quantizer: SiteQuantizer, kept: Reads, values: Tensor) -> None:
    """Hold rows of what a GEMM of backward is handed against the codes that forward had kept for it, in some calls of a
    step that takes full statistics of the operand. On the CPU: elsewhere GEMMs read the codes, or are held as a whole in
    their module's turn.

    Args:
        plan: whose slab it goes to.
        row: of the columnwise copy.
        quantizer: its own.
        kept: codes [M, K] and scale_inv.
        values: float32 [M, K], what the GEMM reads.
    """
    slab, stopwatch = plan.slab, plan.stopwatch
    if slab is None or not values.is_cpu or not plan.observing or row in plan.sites.unobserved:
        return
    if kept.scale_inv is None or not values.numel() or not plan.step.holds(row, "kept"):
        return
    began = stopwatch.mark() if stopwatch is not None else None
    rows = part_of_rows(values.shape[0], plan.step.num_begun)
    if not rows_equal(values, kept, rows):
        right = reference.dequantize(kept.data, kept.scale_inv, kept.tile)  # in range: a scale has nothing more to clip
        found = check_rounding(right, values, rows, quantizer.spec, kept.tile, slab.amax_if_finite(row))
        if found is not None:
            slab.accumulate_quantiser(row, found)
    if stopwatch is not None:
        stopwatch.add(SAMPLING, began, stopwatch.mark())


def _copies(out: Any, tile: tuple[int, int]) -> list[Reads]:
    """What is read of one result: values by the GEMM that runs now, codes by one in backward, or both."""
    if not isinstance(out, tuple):
        return [Reads(out, None, tile)]
    first, second = out
    return (
        [Reads(first, None, tile), Reads(second[0], second[1], tile)]
        if isinstance(second, tuple)
        else [Reads(first, second, tile)]
    )


def _hold_copy(
    plan: ObservationPlan,
    slab: Slab,
    row: int,
    quantizer: SiteQuantizer,
    x_MK: Tensor,
    reads: Reads,
    scale: Tensor | None,
) -> None:
    phase = plan.step.num_begun
    rows = part_of_rows(x_MK.shape[0], phase)
    if x_MK.is_cpu and rows_hold(x_MK, reads, rows, quantizer.spec, slab.amax_on_host(row), scale):
        return
    data, scale_inv, tile = reads
    values = data if scale_inv is None else quantizer.backend.dequantize(data, scale_inv, tile)
    found = check_rounding(x_MK, values, rows, quantizer.spec, tile, slab.amax_if_finite(row), scale)
    if found is None:
        return
    slab.accumulate_quantiser(row, found)
    if x_MK.is_cpu:  # what is wrong with it: elsewhere that is for the module's turn
        slab.accumulate_quantiser(row, check_quantiser(x_MK, reads, quantizer.spec, scale, found.fault_tile, phase))
    if plan.stopwatch is None:
        why_codes(plan, row, x_MK, reads, quantizer.spec, scale, found)
