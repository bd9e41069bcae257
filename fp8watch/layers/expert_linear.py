"""y = x·W of each expert in FP8: one product with the weights of all experts, or with that of one, and both of its GEMMs behind.

Shapes:     x [S, K] by expert, w [E, N, K] or [N, K] -> y [S, N] in the dtype of x
Thread:     training, and autograd's; eager only

To the bit what a loop over experts computes whose Linears are on the FP8 path, each with its own tokens. Saved for backward are
codes and scales, a byte an element. Rows that belong to no expert are neither quantised nor multiplied: they are zero, and so
are their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8watch.kernels import emulated_grouped
from fp8watch.layers.custom_ops import lookup, note_gemm_output, pass_number
from fp8watch.layers.double_backward import apply_packed, once_only, packed_by
from fp8watch.layers.expert_check import hold_expert_product
from fp8watch.layers.expert_groups import ExpertGroups
from fp8watch.layers.expert_operands import Kept, Ranges, Weights, quantise_rows, quantise_weights, values_of
from fp8watch.layers.observe_gemm import Gemm, _weight
from fp8watch.numerics.formats import fp8_format
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.pass_counter import in_backward
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT
from fp8watch.observer.unseen import unseen


class _ExpertLinear(torch.autograd.Function):
    """The three GEMMs, on weights that are quantised already."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SK: Tensor,
        w: Tensor,
        of: ExpertGroups | int,
        weights: tuple[Weights, Weights],
        site: Tensor,
        count: bool,
        wgrad: bool,
    ) -> tuple[Tensor, Tensor]:
        plan, first = lookup(site)
        x = quantise_rows(
            plan, first, INPUT, x_SK, of, count=count, rowwise=True, columnwise=wgrad, codes=True
        )  # fmt: skip
        assert x.row is not None
        weight_of = _WeightOf(plan, first, weights[0], columnwise=False)
        y = emulated_grouped.fprop(x.row, weight_of, x.groups, (x_SK.shape[0], w.shape[-2]), x_SK.dtype)
        if count and first in plan.canary.turn and not in_backward():
            _hold(plan, first, INPUT, y, x.row, weight_of, of, x.groups)
        if count and plan.step.sample.any_outputs and not in_backward():
            plan.guard.run("output", note_gemm_output, plan, first, _counted(y, of), INPUT, False)
        kept = x.column if isinstance(x.column, Kept) else (None, None)
        token = y.new_empty((0,))  # by it `once_only` reaches x and w
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, *weights[1].kept, site, token)
        ctx.of, ctx.count, ctx.wgrad, ctx.column_groups = of, count, wgrad, x.column_groups
        ctx.weights = weights[1]._replace(kept=None)  # type: ignore[arg-type]
        ctx.dtypes, ctx.shape_of_w = (x_SK.dtype, w.dtype), w.shape
        return y, token

    @staticmethod
    def backward(ctx: Any, grad_SN: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        if grad_SN is None:  # what reads y gives it none: then there is none in front of it
            return (None,) * 7
        xc, xc_scale, w_data, w_scale, site, token = ctx.saved_tensors
        plan, first = lookup(site)
        x_dtype, w_dtype = ctx.dtypes
        dgrad, wgrad = ctx.needs_input_grad[0], ctx.needs_input_grad[1] and ctx.wgrad
        weights = ctx.weights._replace(kept=Kept(w_data, w_scale))
        dx = dw = None
        with torch.no_grad(), torch.autocast(grad_SN.device.type, enabled=False):
            g = quantise_rows(
                plan, first, GRAD_OUTPUT, grad_SN, ctx.of, count=ctx.count, rowwise=dgrad, columnwise=wgrad, codes=False
            )  # fmt: skip
            looks, turn = ctx.count and plan.step.sample.any_outputs, ctx.count and first in plan.canary.turn
            if dgrad:
                assert g.row is not None
                weight_of = _WeightOf(plan, first, weights, columnwise=True)
                shape = grad_SN.shape[0], ctx.shape_of_w[-1]
                dx = emulated_grouped.dgrad(g.row, weight_of, g.groups, shape, x_dtype)
                if turn:
                    _hold(plan, first, GRAD_OUTPUT, dx, g.row, weight_of, ctx.of, g.groups)
                if looks:
                    plan.guard.run("output", note_gemm_output, plan, first, _counted(dx, ctx.of), GRAD_OUTPUT, False)
            if wgrad:
                if xc is None:  # no rows of any expert
                    dw = torch.zeros(ctx.shape_of_w, dtype=w_dtype, device=grad_SN.device)
                else:
                    x = values_of(plan, first, INPUT, Kept(xc, xc_scale))
                    dw = emulated_grouped.wgrad(g.column, x, ctx.column_groups, w_dtype).reshape(ctx.shape_of_w)
                    if turn:
                        _hold_wgrad(plan, first, dw, g.column, x, ctx.of, ctx.column_groups)
                if looks:
                    plan.guard.run("output", note_gemm_output, plan, first, dw, GRAD_OUTPUT, True)
        made_of = grad_SN, token
        return once_only(dx, *made_of), once_only(dw, *made_of), None, None, None, None, None


def _hold(
    plan: ObservationPlan,
    first: int,
    operand: int,
    y: Tensor,
    rows: Tensor,
    weight_of: _WeightOf,
    of: ExpertGroups | int,
    groups: Ranges,
) -> None:
    """Hold fprop or dgrad of the expert whose turn it is against its operands."""

    def factors(group: int) -> tuple[Tensor, Tensor, Tensor]:
        start, end = groups[group]
        return y[start:end], rows[start:end], weight_of(group)

    plan.guard.run("shadow", unseen(hold_expert_product), plan, first, operand, False, _one(of), groups, factors)


def _hold_wgrad(
    plan: ObservationPlan, first: int, dw: Tensor, g: Tensor, x: Tensor, of: ExpertGroups | int, groups: Ranges
) -> None:
    """Hold wgrad of the expert whose turn it is against its operands."""

    def factors(group: int) -> tuple[Tensor, Tensor, Tensor]:
        start, end = groups[group]
        return dw[group] if dw.dim() == 3 else dw, g[start:end], x[start:end]

    plan.guard.run("shadow", unseen(hold_expert_product), plan, first, GRAD_OUTPUT, True, _one(of), groups, factors)


def _one(of: ExpertGroups | int) -> int | None:
    return of if isinstance(of, int) else None


class _WeightOf:
    """Dequantises the weight of one expert when its product comes."""

    def __init__(self, plan: ObservationPlan, first: int, weights: Weights, *, columnwise: bool) -> None:
        quantizer = plan.sites.quantizers[plan.sites.row(first, WEIGHT, columnwise)]
        self._dtype, self._backend = fp8_format(quantizer.spec.format).dtype, quantizer.backend
        self._tile, self._weights = quantizer.tile_for((1, 1)), weights

    def __call__(self, expert: int) -> Tensor:
        return self._weights.values(expert, self._dtype, self._tile, self._backend)


def _counted(y: Tensor, of: ExpertGroups | int) -> Tensor:
    return of.counted(y) if isinstance(of, ExpertGroups) else y


def expert_linear(x_SK: Tensor, w: Tensor, gemm: Gemm, site: Tensor, *, count: bool) -> Tensor:
    """`x · wᵀ` of each expert in FP8.

    Args:
        x_SK: sorted by expert.
        w: [E, N, K], or [N, K] of one expert, with autograd's history.
        gemm: whose rows these are, and the parameter that `w` is of; that is quantised in its own precision where `w` is
            the whole of it or of an expert.
        site: of the parameter.
        count: whether the call enters the statistics.

    Raises:
        RuntimeError: the watch was detached.
    """
    assert gemm.of is not None
    plan, first = lookup(site)
    grad = torch.is_grad_enabled()
    wgrad, later = w.requires_grad and grad, x_SK.requires_grad and grad
    with torch.no_grad():
        parameter = gemm.parameter.detach()
        lies, transposed = _as_it_lies(w, parameter, gemm)
        number = None
        if gemm.weight and lies is parameter:
            number = pass_number(plan, WEIGHT, count)
        elif gemm.weight and count:  # measured once in a forward, whole, whatever part of it is multiplied
            plan.guard.run("own gemm", _weight, plan, first, parameter, transposed=gemm.transposed)
        one = gemm.of if w.dim() == 2 and isinstance(gemm.of, int) else None
        weights = quantise_weights(
            plan, first, lies, transposed=transposed, number=number, later=later, of=one, look=count
        )
    with torch.autocast(x_SK.device.type, enabled=False):
        given = x_SK, w, gemm.of, weights, site, count, wgrad
        packed = packed_by(False) is not None
        y: Tensor = (apply_packed(_ExpertLinear.apply, *given) if packed else _ExpertLinear.apply(*given))[0]  # type: ignore[no-untyped-call]
    return y


def _as_it_lies(w: Tensor, parameter: Tensor, gemm: Gemm) -> tuple[Tensor, bool]:
    """What is quantised of the weights, and whether it lies as [K, N]: the parameter, or one expert of it; of any other part
    what is multiplied."""
    n, k = w.shape[-2:]
    one = parameter[gemm.of] if w.dim() == 2 and isinstance(gemm.of, int) and parameter.dim() == 3 else parameter
    if one.shape == (*w.shape[:-2], *((k, n) if gemm.transposed else (n, k))):
        return one, gemm.transposed
    return w.detach(), False
