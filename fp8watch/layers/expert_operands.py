"""Operands of experts, quantised for their GEMMs: each expert in tiles of its own, measured in the same pass.

Shapes:     rows [S, K] by expert, parameter [E, N, K] or [E, K, N] -> values, or codes and scale_inv
Thread:     training, and autograd's

Rows are laid out as `observe_gemm` measures them, so that the statistics of a site are the same whether its GEMMs compute in
FP8 or not. Rows of nobody are not quantised.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8watch.kernels.backend import Backend
from fp8watch.layers.custom_ops import asked_rows, pass_number
from fp8watch.layers.expert_check import hold_expert_operand
from fp8watch.layers.expert_groups import ExpertGroups, Frame
from fp8watch.layers.observe_gemm import _directions, _take_off, _tile, _tile_rows
from fp8watch.numerics.formats import fp8_format
from fp8watch.observer.expert_layout import Even, Layout, Sorted, Whole
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.site_rows import INPUT, WEIGHT
from fp8watch.quantize.site_quantizer import Wanted

Ranges = list[tuple[int, int]]


class Kept(NamedTuple):
    """Codes of an operand and their scales: a byte an element until they are multiplied."""

    data: Tensor  # uint8 [R, C]
    scale_inv: Tensor  # float32, one a tile


class Quantised(NamedTuple):
    """What the GEMMs read of the rows of an operand."""

    row: Tensor | None  # values float32 [S, K], of rows of experts only
    column: Any  # `Kept`, or values float32: each expert padded to whole tiles
    groups: Ranges  # rows of each expert in `row`
    column_groups: Ranges  # and in `column`, without padding


def quantise_rows(
    plan: ObservationPlan,
    first: int,
    operand: int,
    x_SK: Tensor,
    of: ExpertGroups | int,
    *,
    count: bool,
    rowwise: bool,
    columnwise: bool,
    codes: bool,
) -> Quantised:
    """Quantise input or grad_output.

    Args:
        plan: of the watch.
        first: row of the slab at which the sites of the parameter begin.
        operand: INPUT or GRAD_OUTPUT.
        x_SK: sorted by expert.
        of: whose rows these are; a number: all of that expert.
        count: whether the call enters the statistics.
        rowwise: values are wanted for the GEMM that contracts over columns.
        columnwise: a copy is wanted for the one that contracts over rows.
        codes: that copy as codes, for later.
    """
    numbers = _numbers(plan, first, operand, x_SK, count=count, columnwise=columnwise)
    starts = [0, *of.ends.tolist()] if isinstance(of, ExpertGroups) else [0, x_SK.shape[0]]
    groups = list(itertools.pairwise(starts))
    if not starts[-1]:
        nothing = x_SK.new_zeros((0, x_SK.shape[1]), dtype=torch.float32)
        return Quantised(nothing, nothing, groups, groups)
    row, column, column_groups = None, None, groups
    for is_column, number, wanted in zip((False, True), numbers, (rowwise, columnwise), strict=True):
        if not wanted:
            continue
        frame, layout = _frame(plan, first, operand, x_SK, of, is_column)
        how = Wanted.CODES if is_column and codes else Wanted.VALUES
        out = _quantise(plan, first, operand, frame, layout, number=number, column=is_column, wanted=how, look=count)
        if is_column:
            column = _kept(out) if codes else out
            sizes = [end - start for start, end in groups]
            begin = frame.first_rows.tolist()
            column_groups = [(a, a + n) for a, n in zip(begin, sizes, strict=True)]
        else:
            row = out
    return Quantised(row, column, groups, column_groups)


def _numbers(
    plan: ObservationPlan, first: int, operand: int, x: Tensor, *, count: bool, columnwise: bool
) -> tuple[int | None, int | None]:
    """Number of the pass for each direction; None where it does not count."""
    number = pass_number(plan, operand, count)
    if operand != INPUT or not count or not x.numel():
        return number, number
    asked = asked_rows(plan, first, operand, True, columnwise)
    if number is None:  # a recomputation may ask for what the first pass left out
        return None, plan.passes.forward if plan.step.recount(asked.asks_column) else None
    if asked.leaves_column is not None:
        unasked = plan.step.unasked
        unasked[asked.leaves_column] = unasked.get(asked.leaves_column, 0) + 1
    return number, number


def _frame(
    plan: ObservationPlan, first: int, operand: int, x: Tensor, of: ExpertGroups | int, column: bool
) -> tuple[Frame, Layout]:
    if isinstance(of, ExpertGroups):
        frame = of.columnwise(x, _tile_rows(plan, first, operand, column)) if column else of.rowwise(x)
        return frame, Sorted(frame.first_rows, frame.sizes)
    return Frame(x, torch.zeros(1, dtype=torch.int64, device="cpu"), 0, 0), Whole(of)


def _quantise(
    plan: ObservationPlan, first: int, operand: int, frame: Frame, layout: Layout, *, number: int | None, column: bool, wanted: Wanted,
    look: bool,
) -> Any:  # fmt: skip
    """One direction of an operand, measured on the way where it has a number, and with `look` checked where it has its turn."""
    asked = asked_rows(plan, first, operand, not column, column)
    began = plan.step.calls
    with plan.experts.measuring(layout):
        (out,) = plan.quantize(asked, frame.rows.contiguous(), number=number, wanted=(wanted,))
    if look and first in plan.canary.turn:
        plan.guard.run("canary", hold_expert_operand, plan, first, asked, frame, layout, out)
    calls = range(began, plan.step.calls)
    for row in asked.rows:
        plan.experts.note(row, calls, layout)
    if calls:
        _take_off(plan, plan.sites.row(first, operand, column), frame)
    return out


def _kept(codes: tuple[Tensor, Tensor]) -> Kept:
    return Kept(codes[0].view(torch.uint8), codes[1])


def values_of(plan: ObservationPlan, first: int, operand: int, kept: Kept) -> Tensor:
    """What the columnwise codes of an operand stand for, float32."""
    quantizer = plan.sites.quantizers[plan.sites.row(first, operand, True)]
    data = kept.data.view(fp8_format(quantizer.spec.format).dtype)
    shape = data.shape[0], data.shape[1]
    return quantizer.backend.dequantize(data, kept.scale_inv, quantizer.tile_for(shape))


class Weights(NamedTuple):
    """The weights of the experts of one product, one behind the other, each in blocks of its own."""

    kept: Kept
    rows_each: int  # of an expert
    pitch: int  # rows from one expert to the next: whole tiles
    turned: bool  # they lie as [K, N]

    def values(self, expert: int, dtype: torch.dtype, tile: tuple[int, int], backend: Backend) -> Tensor:
        """[N, K] float32 of one expert."""
        start, end = expert * self.pitch, expert * self.pitch + self.rows_each
        scale_inv = self.kept.scale_inv[start // tile[0] : -(-end // tile[0])]
        data = self.kept.data[start:end]
        if self.turned:  # as a Linear's lies in memory, so that the product has the same bits
            data, scale_inv, tile = data.t(), scale_inv.t(), (tile[1], tile[0])
        return backend.dequantize(data.contiguous().view(dtype), scale_inv.contiguous(), tile)


def quantise_weights(
    plan: ObservationPlan,
    first: int,
    w: Tensor,
    *,
    transposed: bool,
    number: int | None,
    later: bool,
    of: int | None = None,
    look: bool = False,
) -> tuple[Weights, Weights]:
    """Codes for fprop, and those for dgrad: the same where one quantisation serves both.

    Args:
        plan: of the watch.
        first: row of the slab at which the sites of the parameter begin.
        w: [E, N, K] or [N, K]; with `transposed` [E, K, N] or [K, N], as it lies in memory.
        transposed: see `w`.
        number: of the pass; None where the call does not count.
        later: there will be a dgrad.
        of: the expert that [N, K] is of.
        look: the call counts, and may be checked.
    """
    found: list[Weights] = []
    for column in _directions(plan, first, WEIGHT, rowwise=True, columnwise=later):
        tile = _tile(plan, first, WEIGHT, column)
        assert tile is not None  # recipes with one scale for a tensor leave experts in high precision
        turns = transposed and tile[0] != tile[1]  # tiles that are no squares run along the contraction
        lies = w.transpose(-1, -2) if turns else w
        lies = lies if lies.dim() == 3 else lies.unsqueeze(0)
        experts, rows, columns = lies.shape
        more = -rows % tile[0]
        if more and w.dim() == 3:
            lies = torch.cat((lies, lies.new_zeros((experts, more, columns))), dim=1)
        pitch = lies.shape[1]
        frame = Frame(lies.reshape(-1, columns), torch.zeros(1, device="cpu"), experts * (pitch - rows), 0)
        layout = Even(pitch) if of is None else Whole(of)
        out = _quantise(
            plan, first, WEIGHT, frame, layout, number=number, column=column, wanted=Wanted.CODES, look=look
        )
        found.append(Weights(_kept(out), rows, pitch, transposed and not turns))
    return found[0], found[-1]
