"""Linears that compute as before: their operands, outputs and gradients are looked at, in eager code and in graphs.

Shapes:     operand [M, K] -> one slab row a direction     Thread: training, and autograd's
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.custom_ops import (
    asked_rows,
    is_eager,
    is_virtual,
    keep_books,
    note_gemm_output,
    pass_number,
    plan_of,
    rows_by_columns,
)
from fp8watch.layers.host_op import host_op
from fp8watch.layers.vmap_rules import batch_in_rows
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.pass_counter import graph_task
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT
from fp8watch.observer.stopwatch import LIGHT
from fp8watch.observer.unseen import num_dispatch_modes, unseen

_set_grad_enabled = torch._C._set_grad_enabled  # torch.no_grad() takes longer than many an operand


def _mark(plan: ObservationPlan) -> Any:
    return plan.stopwatch.mark() if plan.stopwatch is not None else None


def _add_light(plan: ObservationPlan, began: Any) -> None:
    if plan.stopwatch is not None:
        plan.stopwatch.add(LIGHT, began, plan.stopwatch.mark())


def _observe(x: Tensor, site: Tensor, operand: int, rowwise: bool, columnwise: bool) -> Tensor:
    plan, first = plan_of(site), int(site) & 0xFFFFFFFF
    if plan is not None:  # None: detached before this backward
        if plan.idle(first) and not (operand == WEIGHT and plan.hash_due(first)):
            pass_number(plan, operand, True)
            return x.new_empty((0,))
        began = _mark(plan)
        _observe_now(plan, first, x, operand, rowwise, columnwise)
        _add_light(plan, began)
    return x.new_empty((0,))


def _observe_now(
    plan: ObservationPlan,
    first: int,
    x: Tensor,
    operand: int,
    rowwise: bool,
    columnwise: bool,
    source: Tensor | None = None,
) -> None:
    number = pass_number(plan, operand, True)
    if not x.numel():
        return
    asked = asked_rows(plan, first, operand, rowwise, columnwise or (operand == WEIGHT and rowwise))
    if operand != GRAD_OUTPUT and (number is None or asked.leaves_column is not None):
        keep_books(plan, asked, x, number)
    if number is not None and asked.rows:  # of a Linear of which only the bias is trained no GEMM reads the gradient
        try:
            plan.observe(asked, x, number=number, source=source)
        except Exception as error:  # noqa: BLE001 - what observes fails alone, and the guard counts
            plan.guard.swallow("observe", error)


observe = host_op("fp8watch::observe", _observe)
observe.register_vmap(batch_in_rows(observe))


@observe.register_fake
def _(x: Tensor, site: Tensor, operand: int, rowwise: bool, columnwise: bool) -> Tensor:
    return x.new_empty((0,))


torch.fx.node.has_side_effect(torch.ops.fp8watch.observe.default)


def rests(number: int, y: Tensor) -> bool:
    """Whether nothing of a Linear is looked at in this step; that it ran is noted all the same. Eager only.

    Behind a large GEMM nothing is in a processor's caches, and each thing that is touched costs: as little as can be is.

    Args:
        number: that the Linear's site stands for.
        y: its output.
    """
    plan = plan_of(number)
    if plan is None:
        return True
    if not plan.resting[number & 0xFFFFFFFF]:
        return False
    note_rest(plan, number, y, y)
    return True


def note_rest(plan: ObservationPlan, number: int, y: Tensor, local: Tensor) -> None:
    """Note that something ran which is not looked at, and where its backward comes by.

    Args:
        plan: of its site.
        number: that the site stands for.
        y: what it returned.
        local: what this rank holds of that.
    """
    grad = y.requires_grad
    if plan.step.is_noted(grad) and not is_virtual(local) and torch._C._get_tracing_state() is None:
        pass_number(plan, INPUT, True)
        if grad:
            y.register_hook(partial(_pass_ran_backward, number))  # type: ignore[no-untyped-call]


def _pass_ran_backward(number: int, _grad: Tensor) -> None:
    plan = plan_of(number)
    if plan is not None:
        pass_number(plan, GRAD_OUTPUT, True)


def observe_forward(x: Tensor, weight: Tensor, y: Tensor, site: Tensor) -> None:
    """Look at a Linear that computes as before: at its operands, its output and, in backward, the gradient of that.
    Eager only, see `is_eager`: an op would cost more than many an operand takes, and nothing here is in any graph."""
    if num_dispatch_modes():
        unseen(_observe_forward)(x, weight, y, site)
    else:
        _observe_forward(x, weight, y, site)


def _observe_forward(x: Tensor, weight: Tensor, y: Tensor, site: Tensor) -> None:
    number = int(site)
    plan, first = plan_of(number), number & 0xFFFFFFFF
    if plan is None:
        return
    began = _mark(plan)
    grad = torch.is_grad_enabled()
    wgrad = weight.requires_grad and grad
    idle = plan.idle(first)
    if idle:
        pass_number(plan, INPUT, True)  # steps end all the same
        if plan.hash_due(first):
            _set_grad_enabled(False)
            try:
                _observe_now(plan, first, weight, WEIGHT, True, False)
            finally:
                _set_grad_enabled(grad)
            _add_light(plan, began)
    else:
        _set_grad_enabled(False)
        try:
            _observe_now(plan, first, rows_by_columns(x), INPUT, True, wgrad, source=x)
            _observe_now(plan, first, weight, WEIGHT, True, False)
            _add_light(plan, began)
            if plan.step.sample.any_outputs and graph_task() == -1:
                note_gemm_output(plan, first, y, INPUT, False)
        finally:
            _set_grad_enabled(grad)
        began = _mark(plan)
    if y.requires_grad:
        dgrad = x.requires_grad

        def see_gradient(grad: Tensor | None) -> None:
            plan = plan_of(number)
            if plan is None or grad is None:
                return
            if plan.idle(first):
                pass_number(plan, GRAD_OUTPUT, True)
            elif not is_eager(grad):
                observe(rows_by_columns(grad.detach()), site, GRAD_OUTPUT, dgrad, wgrad)
            else:
                began = _mark(plan)
                enabled = torch.is_grad_enabled()  # with create_graph=True
                _set_grad_enabled(False)
                try:
                    _observe_now(plan, first, rows_by_columns(grad), GRAD_OUTPUT, dgrad, wgrad)
                finally:
                    _set_grad_enabled(enabled)
                _add_light(plan, began)

        y.register_hook(see_gradient)  # type: ignore[no-untyped-call]
    if not idle:
        _add_light(plan, began)
