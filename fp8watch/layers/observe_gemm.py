"""One GEMM that reads a module's own parameter: its operands, output and gradient are looked at, and nothing is changed.

Shapes:     x [M, K], parameter [N, K] or [K, N], of experts [E, N, K] or [E, K, N], y [M, N] -> one slab row a direction
Thread:     training, and autograd's

A parameter is measured once in each forward of its module, whole and as it lies in memory where its tiles are square:
rows of experts one behind the other, each padded to whole tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8watch.layers.custom_ops import asked_rows, is_eager, note_gemm_output, pass_number, plan_of
from fp8watch.layers.expert_groups import ExpertGroups, Frame
from fp8watch.layers.local_part import local_part
from fp8watch.layers.observe_linear import _add_light, _mark, _set_grad_enabled
from fp8watch.observer.expert_layout import Even, Layout, Sorted, Whole
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.pass_counter import graph_task
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT


@dataclass(frozen=True, slots=True)
class Gemm:
    """One call, as it was made.

    Args:
        x: [M, K], what it read beside the parameter.
        y: as it was returned, with autograd's history.
        columns: y has its outputs in rows, and tokens in columns.
        parameter: whole.
        transposed: the contraction is not its last dimension.
        of: rows by expert; a number: all of that expert; None: no experts.
        weight: the parameter has its turn to be measured.
    """

    x: Tensor
    y: Tensor
    columns: bool
    parameter: Tensor
    transposed: bool
    of: ExpertGroups | int | None
    weight: bool
    dgrad: bool  # x requires a gradient
    order: Tensor | None = None  # of the rows of y that those of x have: sorted by expert
    of_ranks: Tensor | None = None  # the DTensor of which y is this rank's part, with autograd's history


def observe_gemm(gemm: Gemm, site: Tensor, *, hidden: bool = False) -> None:
    """Look at a GEMM that has run. Eager only.

    Args:
        gemm: it.
        site: of its parameter.
        hidden: it ran inside a function with a backward of its own (Megatron's linears), which is not seen: it must not be
            waited for where steps end.
    """
    plan, first = plan_of(site), int(site) & 0xFFFFFFFF
    if plan is None:
        return
    step = plan.step
    before = step.forward_seen, step.forward_since
    _observe(plan, first, gemm, site)
    if hidden:
        step.forward_seen, step.forward_since = before


def _observe(plan: ObservationPlan, first: int, gemm: Gemm, site: Tensor) -> None:
    began = _mark(plan)
    grad = torch.is_grad_enabled()
    wgrad = gemm.parameter.requires_grad and grad
    idle = plan.idle(first)
    if idle:
        pass_number(plan, INPUT, True)  # steps end all the same
        if gemm.weight and plan.hash_due(first):
            _set_grad_enabled(False)
            try:
                _weight(plan, first, gemm.parameter.detach(), transposed=gemm.transposed)
            finally:
                _set_grad_enabled(grad)
            _add_light(plan, began)
    else:
        _set_grad_enabled(False)
        try:
            _operand(plan, first, gemm.x.detach(), INPUT, gemm.of, rowwise=True, columnwise=wgrad)
            if gemm.weight:
                _weight(plan, first, gemm.parameter.detach(), transposed=gemm.transposed)
            _add_light(plan, began)
            if plan.step.sample.any_outputs and graph_task() == -1:
                y = _tokens_by_outputs(gemm.y.detach(), gemm)
                y = gemm.of.counted(y) if isinstance(gemm.of, ExpertGroups) else y
                note_gemm_output(plan, first, y, INPUT, False)
        finally:
            _set_grad_enabled(grad)
        began = _mark(plan)
    y = gemm.y if gemm.of_ranks is None else gemm.of_ranks
    if y.requires_grad:
        nothing = gemm.y.new_empty((0,))  # a view of no rows would keep all of y
        _hook_on(y, site, replace(gemm, x=nothing, y=nothing, of_ranks=None), wgrad=wgrad)
    if not idle:
        _add_light(plan, began)


def _hook_on(y: Tensor, site: Tensor, gemm: Gemm, *, wgrad: bool) -> None:
    """Look at the gradient of an output when it comes; `gemm` without its tensors, which the hook must not keep."""

    def see(grad: Tensor | None) -> None:
        plan, first = plan_of(site), int(site) & 0xFFFFFFFF
        grad = local_part(grad)
        if plan is None or grad is None or not is_eager(grad):
            return
        if plan.idle(first):
            pass_number(plan, GRAD_OUTPUT, True)
            return
        began = _mark(plan)
        enabled = torch.is_grad_enabled()  # with create_graph=True
        _set_grad_enabled(False)
        try:
            rows = _tokens_by_outputs(grad.detach(), gemm)
            _operand(plan, first, rows, GRAD_OUTPUT, gemm.of, rowwise=gemm.dgrad, columnwise=wgrad)
        except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
            plan.guard.swallow("own gemm", error)
        finally:
            _set_grad_enabled(enabled)
        _add_light(plan, began)

    y.register_hook(see)  # type: ignore[no-untyped-call]


def _tokens_by_outputs(y: Tensor, gemm: Gemm) -> Tensor:
    if gemm.order is not None:
        return y.reshape(len(gemm.order), -1)[gemm.order]
    y = y.transpose(-1, -2) if gemm.columns else y
    return y.reshape(-1, y.shape[-1])


def _operand(
    plan: ObservationPlan,
    first: int,
    x: Tensor,
    operand: int,
    of: ExpertGroups | int | None,
    *,
    rowwise: bool,
    columnwise: bool,
) -> None:
    """Measure input or grad_output in the directions that are read."""
    number = pass_number(plan, operand, True)
    if not x.numel():
        return
    if operand == INPUT:
        asked = asked_rows(plan, first, operand, rowwise, columnwise)
        if number is None:  # a recomputation may ask for what the first pass left out
            if not plan.step.recount(asked.asks_column):
                return
            rowwise, number = False, plan.passes.forward
        elif asked.leaves_column is not None:
            unasked = plan.step.unasked
            unasked[asked.leaves_column] = unasked.get(asked.leaves_column, 0) + 1
    if number is None:
        return
    if not isinstance(of, ExpertGroups):
        if rowwise or columnwise:
            layout = None if of is None else Whole(of)
            _measure(plan, first, operand, x, number, layout, rowwise=rowwise, columnwise=columnwise)
        return
    for column in _directions(plan, first, operand, rowwise=rowwise, columnwise=columnwise):
        frame = of.columnwise(x, _tile_rows(plan, first, operand, column)) if column else of.rowwise(x)
        calls = _measure(
            plan,
            first,
            operand,
            frame.rows,
            number,
            Sorted(frame.first_rows, frame.sizes),
            rowwise=not column,
            columnwise=column,
        )
        if calls:
            _take_off(plan, plan.sites.row(first, operand, column), frame)


def _weight(plan: ObservationPlan, first: int, parameter: Tensor, *, transposed: bool) -> None:
    """Measure a parameter in all directions of its sites."""
    number = pass_number(plan, WEIGHT, True)
    if number is None or not parameter.numel():
        return
    for column in _directions(plan, first, WEIGHT, rowwise=True, columnwise=True):
        tile = _tile(plan, first, WEIGHT, column)
        # tiles that are no squares run along the contraction
        w = parameter.transpose(-1, -2) if transposed and tile is not None and tile[0] != tile[1] else parameter
        layout, padding = None, 0
        if w.dim() == 3:
            experts, rows, columns = w.shape
            more = 0 if tile is None else -rows % tile[0]
            if more:
                w = torch.cat((w, w.new_zeros((experts, more, columns))), dim=1)
            w, layout, padding = w.reshape(-1, columns), Even(rows + more), experts * more
        calls = _measure(plan, first, WEIGHT, w, number, layout, rowwise=not column, columnwise=column)
        if calls and padding:
            _take_off(plan, plan.sites.row(first, WEIGHT, column), Frame(w, w, padding, 0))


def _directions(plan: ObservationPlan, first: int, operand: int, *, rowwise: bool, columnwise: bool) -> Iterator[bool]:
    """Whether each row that is asked for is columnwise; an operand with the same codes in both directions has one."""
    own = (operand, True) in plan.sites.rows
    if rowwise or (columnwise and not own):
        yield False
    if columnwise and own:
        yield True


def _tile(plan: ObservationPlan, first: int, operand: int, column: bool) -> tuple[int, int] | None:
    """Tile of a site in the operand's own rows × columns; None: the whole tensor."""
    quantizer = plan.sites.quantizers[plan.sites.row(first, operand, column)]
    return None if quantizer.spec.tile is None else quantizer.tile_for((1, 1))


def _tile_rows(plan: ObservationPlan, first: int, operand: int, column: bool) -> int:
    tile = _tile(plan, first, operand, column)
    return 1 if tile is None else tile[0]


def _measure(
    plan: ObservationPlan,
    first: int,
    operand: int,
    x: Tensor,
    number: int,
    layout: Layout | None,
    *,
    rowwise: bool,
    columnwise: bool,
) -> bool:
    """Measure rows in the directions that are asked for; whether anything came of it."""
    if not x.numel():
        return False
    asked = asked_rows(plan, first, operand, rowwise, columnwise)
    began = plan.step.calls
    if layout is None:
        plan.observe(asked, x, number=number)
        return plan.step.calls > began
    with plan.experts.measuring(layout):
        plan.observe(asked, x, number=number)
    calls = range(began, plan.step.calls)
    for row in asked.rows:
        plan.experts.note(row, calls, layout)
    return len(calls) > 0


def _take_off(plan: ObservationPlan, row: int, frame: Frame) -> None:
    """Take what is padding off the counts of a row."""
    if plan.slab is None or (isinstance(frame.num_padding, int) and not frame.num_padding):
        return
    width, quantizer = frame.rows.shape[1], plan.sites.quantizers[row]
    across = 0 if quantizer.spec.tile is None else -(-width // quantizer.tile_for((1, 1))[1])
    plan.slab.take_off_zeros(row, frame.num_padding * width, frame.num_empty_tiles * across)
