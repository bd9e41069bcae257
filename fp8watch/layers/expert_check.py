"""What the GEMMs of one expert read and made, held against its operands, in the turn of its module.

Shapes:     rows of all experts [S', K] and what was made of them -> those of one expert -> a few counts in one slab row
Thread:     training, and autograd's

The looks are those of a Linear (`operand_check`, `shadow_gemm`), on the rows and the weight of one expert, so that a turn costs
as much. Another turn of the module has another expert; one without tokens hands its rows to the next, and its gradient of
the weight is still held against zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.ask_why import why_codes
from fp8watch.layers.expert_groups import Frame
from fp8watch.layers.operand_check import capturing
from fp8watch.layers.shadow_gemm import hold_against_shadow
from fp8watch.observer.expert_layout import Even, Layout, Whole
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.site_rows import OperandRows
from fp8watch.quantize.self_consistency import Reads, check_quantiser
from fp8watch.quantize.site_quantizer import SiteQuantizer

Span = tuple[int, int]


def hold_expert_operand(
    plan: ObservationPlan, first: int, asked: OperandRows, frame: Frame, layout: Layout, out: Any
) -> None:
    """Hold one direction of the operand of the expert whose turn it is against what its GEMM is handed.

    Args:
        plan: whose slab it goes to.
        first: row at which the sites of the parameter begin; its module has its turn.
        asked: the direction that was quantised.
        frame: rows as they were quantised.
        layout: whose they are.
        out: values float32 [S', K], or codes and scale_inv.
    """
    slab, canary, (row,) = plan.slab, plan.canary, asked.rows
    if slab is None or not plan.observing or plan.stopwatch is not None or capturing(frame.rows):
        return
    if row in plan.sites.unobserved or canary.took(row, "operand"):
        return
    began, asking = perf_counter(), plan.why.spent_s
    quantizer: SiteQuantizer = asked.quantizers[0]
    found = _span(plan, first, row, frame, layout)
    if found is None:
        return
    expert, (start, end) = found
    canary.takes(row, "operand")
    tile = quantizer.tile_for((int(frame.rows.shape[0]), int(frame.rows.shape[1])))
    if isinstance(out, tuple):
        tiles = slice(start // tile[0], -(-end // tile[0]))
        reads = Reads(out[0][start:end], out[1][tiles], tile)
    else:
        reads = Reads(out[start:end], None, tile)
    check = check_quantiser(frame.rows[start:end], reads, quantizer.spec, phase=canary.phase)
    above = torch.tensor([start // tile[0], 0], dtype=torch.int32, device="cpu")
    above = above.to(check.fault_tile.device, non_blocking=True)
    at = torch.where(check.fault_tile < 0, check.fault_tile, check.fault_tile + above)
    slab.accumulate_quantiser(row, check._replace(fault_tile=at))
    plan.experts.turns.operands[row] = expert
    why_codes(plan, row, frame.rows[start:end], reads, quantizer.spec, None, check)
    canary.spent_s += perf_counter() - began - (plan.why.spent_s - asking)


def _span(plan: ObservationPlan, first: int, row: int, frame: Frame, layout: Layout) -> tuple[int, Span] | None:
    """The expert that is looked at, and its rows in the frame; None where this call has none of it."""
    num = plan.experts.num_experts.get(row, 0)
    if not num:
        return None
    expert = plan.experts.turns.expert(first, plan.canary.phase, num)
    if isinstance(layout, Whole):
        return (expert, (0, int(frame.rows.shape[0]))) if layout.expert == expert and len(frame.rows) else None
    if isinstance(layout, Even):
        start, end = expert * layout.rows_each, (expert + 1) * layout.rows_each
        return expert, (start, end)
    assert layout.sizes is not None
    starts, sizes = layout.first_rows.tolist(), layout.sizes.tolist()
    expert = _with_rows(expert, sizes)
    return (expert, (starts[expert], starts[expert] + sizes[expert])) if sizes[expert] else None


def _with_rows(expert: int, sizes: Sequence[int]) -> int:
    """This one, or the next that has any rows."""
    return next((e % len(sizes) for e in range(expert, expert + len(sizes)) if sizes[e % len(sizes)]), expert)


def hold_expert_product(
    plan: ObservationPlan,
    first: int,
    operand: int,
    columnwise: bool,
    of: int | None,
    groups: Sequence[Span],
    factors: Callable[[int], tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Hold the GEMM of the expert whose turn it is against float64 on sampled rows.

    Args:
        plan: whose slab it goes to.
        first: row at which the sites of the parameter begin; its module has its turn.
        operand, columnwise: INPUT: fprop; GRAD_OUTPUT rowwise: dgrad, columnwise: wgrad.
        of: the expert of all rows; None: rows are grouped by expert.
        groups: rows of each expert, or of that one.
        factors: number of a group -> output of its GEMM, and what it read: the operand and the other one.
    """
    canary, row = plan.canary, plan.sites.row(first, operand, columnwise)
    what = "wgrad" if columnwise else "GEMM"
    if plan.slab is None or not plan.observing or plan.stopwatch is not None or canary.took(row, what):
        return
    began, spent = perf_counter(), canary.spent_s
    expert = plan.experts.turns.expert(first, canary.phase, plan.experts.num_experts.get(row, 1))
    if of is not None:
        if of != expert:
            return
        group = 0
    else:
        sizes = [end - start for start, end in groups]
        group = expert = expert if columnwise else _with_rows(expert, sizes)
    y, first_factor, second = factors(group)
    hold_against_shadow(plan, row, y, operand, columnwise, (first_factor, second))
    if canary.took(row, what):
        plan.experts.turns.products[row] = expert
        canary.spent_s = spent + perf_counter() - began
