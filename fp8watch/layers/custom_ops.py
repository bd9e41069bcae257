"""Custom ops through which operands are quantised and observed: functional to the compiler, accumulating at run time.

Upstream:   fp8watch.layers.fp8_linear
Downstream: fp8watch.observer.observation_plan
Shapes:     operand [M, K] -> dequantised [M, K] float32, and one slab row a direction
Thread:     training, and autograd's

A site travels as one 0-d int64 CPU tensor, (plan handle << 32) | first row of its Linear; the plan is looked up
inside the op. The slab is never an argument: autograd would save it for backward, and two forwards before a
backward would then fail with "modified by an inplace operation".
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.host_op import host_op
from fp8watch.layers.operand_check import hold_against_operand, hold_rows
from fp8watch.layers.shadow_gemm import hold_against_shadow, hold_rows_of_output
from fp8watch.layers.vmap_rules import mean_of_batch, one_by_one
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.pass_counter import first_tensor, graph_task
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT, OperandRows
from fp8watch.observer.unseen import num_dispatch_modes, unseen
from fp8watch.quantize.site_quantizer import Wanted

_PLAIN = (Tensor, torch.nn.Parameter)
_plans: dict[int, ObservationPlan] = {}
_shown = dict(_plans)  # those that what runs now is told to
_handles = itertools.count(1)
_lock = threading.Lock()


def add_plan(plan: ObservationPlan) -> int:
    """Make a plan known to the ops; returns its handle."""
    with _lock:
        plan.handle = next(_handles)
        _plans[plan.handle] = _shown[plan.handle] = plan
    return plan.handle


def remove_plan(plan: ObservationPlan) -> None:
    """Forget a plan. Graphs compiled with its sites fall through to unobserved arithmetic only after detach."""
    with _lock:
        _plans.pop(plan.handle, None)
        _shown.pop(plan.handle, None)
    for turn in list(plan.turns.values()):
        turn.close()


@contextmanager
def nothing_counts() -> Iterator[None]:
    """While a model runs on what is no data, for the shapes alone that come out: it computes as in training, and neither
    statistics nor scales with a history hear of it. Every thread is meant: autograd's run such a backward."""
    with _lock:
        hidden = [(plan, plan.step.paused) for plan in _shown.values()]
        _shown.clear()
    for plan, _ in hidden:
        plan.pause(True)
    try:
        yield
    finally:
        with _lock:
            _shown.update({plan.handle: plan for plan, _ in hidden if plan.handle in _plans})
        for plan, paused in hidden:
            plan.pause(paused)


def counts() -> bool:
    """Whether what runs now counts."""
    return len(_shown) == len(_plans)


def site_tensor(plan: ObservationPlan, first_row: int) -> Tensor:
    """The 0-d int64 CPU tensor that stands for one Linear of a plan."""
    return torch.tensor((plan.handle << 32) | first_row, dtype=torch.int64, device="cpu")


def lookup(site: Tensor) -> tuple[ObservationPlan, int]:
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


def plan_of(site: Tensor | int) -> ObservationPlan | None:
    """The plan of a site, which may be given as the number that it stands for; None after detach, and where nothing counts."""
    return _shown.get(int(site) >> 32)


def enter_forward(plan: ObservationPlan) -> None:
    """A watched module is in its forward, and it counts."""
    step = plan.step
    if step.on_forward is not None:
        step.end_before()
    step.forward_seen = step.forward_since = True


def pass_number(plan: ObservationPlan, operand: int, count: bool) -> int | None:
    """Number of the pass that a call belongs to, None where it does not count."""
    if plan.handle not in _shown:
        return None
    if operand == GRAD_OUTPUT:
        plan.step.saw_backward()
        return plan.passes.in_backward() if count else None
    if graph_task() != -1:
        # inside a backward: activation checkpointing recomputes the forward, which was counted already
        plan.passes.recomputes()
        return None
    if not count:
        return None
    enter_forward(plan)
    return plan.passes.in_forward()


def asked_rows(plan: ObservationPlan, first: int, operand: int, rowwise: bool, columnwise: bool) -> OperandRows:
    """Rows and quantisers of the directions that a call asks for."""
    known = plan.sites.known.get((first, operand, rowwise, columnwise))
    return plan.sites.asked(first, operand, rowwise, columnwise) if known is None else known


def keep_books(plan: ObservationPlan, asked: OperandRows, x: Tensor, number: int | None) -> None:
    """Of a forward operand that counts: note the columnwise row that the first pass leaves out, and measure it where the
    recomputation asks for it."""
    if number is not None:
        if asked.leaves_column is not None:
            unasked = plan.step.unasked
            unasked[asked.leaves_column] = unasked.get(asked.leaves_column, 0) + 1
    elif plan.step.recount(asked.asks_column):
        assert asked.asks_column is not None
        late = plan.sites.part((asked.asks_column,))
        plan.guard.run("recomputed", plan.observe, late, x, number=plan.passes.forward)


def run_operand(
    x: Tensor,
    site: Tensor,
    operand: int,
    count: bool,
    rowwise: bool,
    columnwise: bool,
    *,
    codes: bool,
    later: bool = False,
) -> list[Any]:
    """What a GEMM reads of one operand, one result a row of the slab; observed on the way where it counts. With `later` the
    columnwise copy is for backward, which reads its codes."""
    plan, first = lookup(site)
    count = count and plan.handle in _shown
    number = pass_number(plan, operand, count)
    if x.numel() == 0:
        return []
    asked = asked_rows(plan, first, operand, rowwise, columnwise)
    warming = plan.step.warming
    if operand != GRAD_OUTPUT:
        if count:
            if number is None or asked.leaves_column is not None:
                keep_books(plan, asked, x, number)
            how = "codes" if codes else "high precision" if warming else "fp8"
            if number is not None:
                plan.recomputed.first[asked.first] = x.dtype, x.shape[-1], how
                if first in plan.step.again.turn and operand == INPUT:
                    plan.guard.run("recompute", plan.step.again.keep, first, x)
            else:
                plan.guard.run("recompute", plan.recomputed.again, asked.first, x, how)
                if operand == INPUT:
                    plan.guard.run("recompute", plan.step.again.again, first, x)
        elif asked.stateful and graph_task() == -1:
            for quantizer in asked.quantizers:  # evaluation reads the scales that training has left
                quantizer.close_passes(plan.passes.close_passes())
    if warming and not codes:
        return list(plan.pass_through(asked, x, number=number))
    wanted = (Wanted.CODES,) * len(asked.rows) if codes else _wanted(asked, rowwise, columnwise) if later else ()
    outs = plan.quantize(asked, x, number=number, wanted=wanted)
    if count and first in plan.canary.turn:
        plan.guard.run("canary", hold_against_operand, plan, asked, x, outs)
    if count and plan.canary.reads_rows and (plan.step.sample.full[asked.rows[0]] or plan.stopwatch is not None):
        plan.guard.run("rows", hold_rows, plan, asked, x, outs)
    return outs


def _wanted(asked: OperandRows, rowwise: bool, columnwise: bool) -> tuple[Wanted, ...]:
    """Of each row: values for the forward, codes for the backward, or both of one that serves both."""
    if len(asked.rows) == 2:
        return Wanted.VALUES, Wanted.CODES
    return (Wanted.BOTH if rowwise and columnwise else Wanted.CODES if columnwise else Wanted.VALUES,)


def _quantize_dequantize(
    x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor]:
    outs = run_operand(x, site, operand, count, rowwise, columnwise, codes=False)
    none = x.new_empty((0,), dtype=torch.float32)
    if not outs:  # an empty batch has no tiles; its result is as empty as F.linear's
        empty = x.to(torch.float32, copy=True)
        return (empty if rowwise else none), (empty.clone() if columnwise else none)
    if rowwise and columnwise:
        return outs[0], (outs[1] if len(outs) == 2 else outs[0].clone())  # an op may not return one tensor twice
    return (outs[0], none) if rowwise else (none, outs[0] if columnwise else none)


quantize_dequantize_op = host_op("fp8watch::quantize_dequantize", _quantize_dequantize)
quantize_dequantize_op.register_vmap(one_by_one(quantize_dequantize_op))


def quantize_dequantize(
    x: Tensor, site: Tensor, operand: int, *, count: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor]:
    """What the codes of an operand stand for, in the directions that are asked for: float32 [M, K] each, empty else."""
    quantized = _quantize_dequantize if runs_now(x) else quantize_dequantize_op
    return quantized(x, site, operand, count, rowwise, columnwise)


@quantize_dequantize_op.register_fake
def _(x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool) -> tuple[Tensor, Tensor]:
    full, none = x.new_empty(x.shape, dtype=torch.float32), x.new_empty((0,), dtype=torch.float32)
    return (full if rowwise else none), (torch.empty_like(full) if columnwise else none)


def _quantize_codes(
    x: Tensor, site: Tensor, operand: int, count: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outs = run_operand(x, site, operand, count, rowwise, columnwise, codes=True)
    none = (x.new_empty((0,), dtype=torch.uint8), x.new_empty((0,), dtype=torch.float32))
    found = [(data.view(torch.uint8), scale_inv) for data, scale_inv in outs]
    row, col = (found[0] if rowwise else none), none
    if columnwise:  # column by column in memory, as wgrad multiplies them
        col = found[-1][0].t().contiguous().t(), found[-1][1]
    return (*row, *col)


quantize_codes = host_op("fp8watch::quantize_codes", _quantize_codes)
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


def rows_by_columns(x: Tensor) -> Tensor:
    """[..., K] as [M, K]; M is no −1, which would be any number of no elements: of samples of torch.func.vmap not even
    these can be counted."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def runs_now(x: Tensor) -> bool:
    """Whether an op need not be called to run: nobody compiles, traces or transforms what works on this tensor. A call
    through torch's dispatcher takes as long as a small operand."""
    if torch.compiler.is_compiling():
        return False
    return not is_virtual(x) and torch._C._get_tracing_state() is None and torch._C._len_torch_dispatch_stack() == 0


def is_eager(*tensors: Tensor) -> bool:
    """Whether tensors have values of their own now: they are plain, and not being compiled or transformed."""
    return not torch.compiler.is_compiling() and not any(is_virtual(t) for t in tensors)


def _look_at_output(
    y: Tensor, site: Tensor, operand: int, columnwise: bool, factors: Sequence[Tensor | None]
) -> Tensor:
    plan, first = plan_of(site), int(site) & 0xFFFFFFFF
    if plan is not None and not (operand == INPUT and graph_task() != -1):  # a recomputation was looked at before
        note_gemm_output(plan, first, y, operand, columnwise)
        if factors and (first in plan.canary.turn or first in plan.canary.forced):
            row = plan.sites.row(first, operand, columnwise)
            plan.guard.run("shadow", hold_against_shadow, plan, row, y.detach(), operand, columnwise, factors)
        if factors and plan.canary.reads_rows:
            row = plan.sites.row(first, operand, columnwise)
            if plan.step.sample.full[row] or plan.stopwatch is not None:
                plan.guard.run("rows", hold_rows_of_output, plan, row, y.detach(), operand, columnwise, factors)
    return y.new_empty((0,))


def note_gemm_output(plan: ObservationPlan, first: int, y: Tensor, operand: int, columnwise: bool) -> None:
    for row in asked_rows(plan, first, operand, not columnwise, columnwise).rows:
        plan.note_output(row, y.detach())


look_at_output_op = host_op("fp8watch::look_at_output", _look_at_output)
look_at_output_op.register_vmap(one_by_one(look_at_output_op))


@look_at_output_op.register_fake
def _(y: Tensor, *_: object) -> Tensor:
    return y.new_empty((0,))


def look_at_output(y: Tensor, site: Tensor, operand: int, columnwise: bool, *factors: Tensor | None) -> None:
    """Count what is not finite in the output of the GEMM that reads this operand in this direction, and where the GEMM has
    its turn, which is known at run time only, hold it against its shadow. `factors` are what it reads, as
    `hold_against_shadow` wants them."""
    if torch.compiler.is_compiling():
        look_at_output_op(y, site, operand, columnwise, factors)
    elif not is_virtual(y):
        look = _look_at_output if not num_dispatch_modes() else unseen(_look_at_output)
        look(y, site, operand, columnwise, factors)


def is_virtual(y: Tensor) -> bool:
    """Whether a tensor has no values of its own: inside torch.func's transforms, traced, or on device meta."""
    return type(y) not in _PLAIN or y.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(y)


def _keep_loss(loss: Tensor, site: Tensor | int, adds_up: bool, grad: bool) -> None:
    plan = plan_of(site)
    if plan is not None and graph_task() == -1:
        plan.step.saw_root(grad=grad)
        if plan.slab is not None:
            plan.step.note_loss(loss, adds_up=adds_up)


def _note_loss(loss: Tensor, site: Tensor, adds_up: bool, grad: bool) -> Tensor:
    _keep_loss(loss, site, adds_up, grad)
    return loss.new_empty((0,))


note_loss = host_op("fp8watch::note_loss", _note_loss)
note_loss.register_vmap(mean_of_batch(note_loss))


@note_loss.register_fake
def _(loss: Tensor, site: Tensor, adds_up: bool, grad: bool) -> Tensor:
    return loss.new_empty((0,))


def tell_loss(loss: Tensor, site: Tensor, number: int | None, adds_up: bool, grad: bool) -> None:
    """The model returned this loss, with gradients or not; `adds_up` where it is a share of one.

    Args:
        site: of the plan.
        number: that the site stands for; None in code that is being compiled.
    """
    if number is not None and runs_now(loss):
        _keep_loss(loss, number, adds_up, grad)
    else:
        note_loss(loss.detach(), site, adds_up, grad)


def _end_forward(site: Tensor | int, grad: bool) -> None:
    plan = plan_of(site)
    if plan is not None and graph_task() == -1:
        plan.passes.forward_ended(grad=grad)
        plan.step.saw_root(grad=grad)


def _forward_ended(after: Tensor, site: Tensor, grad: bool) -> Tensor:
    _end_forward(site, grad)
    return after.new_empty((0,))


forward_ended = host_op("fp8watch::forward_ended", _forward_ended)
forward_ended.register_vmap(mean_of_batch(forward_ended))


@forward_ended.register_fake
def _(after: Tensor, site: Tensor, grad: bool) -> Tensor:
    return after.new_empty((0,))


def root_returned(output: Any, site: Tensor, number: int | None, grad: bool) -> None:
    """The model returned something that is no loss; the other arguments are those of `tell_loss`."""
    if number is None:
        found = first_tensor(output)
        forward_ended(site if found is None else found.detach(), site, grad)
    else:
        _end_forward(number, grad)


_ops: Any = torch.ops.fp8watch
for _op in ("note_loss", "forward_ended", "quantize_dequantize", "quantize_codes", "look_at_output"):
    torch.fx.node.has_side_effect(getattr(_ops, _op).default)  # what gives nothing would be removed from the graph
