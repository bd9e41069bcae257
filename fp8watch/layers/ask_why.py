"""From a look that found a fault to the hypotheses that may explain it.

Shapes:     operand [M, K] and what was made of it, or a product and its operands -> an answer of one row
Thread:     training, and autograd's
"""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

from fp8watch.layers.another_factor import Some, another_factor
from fp8watch.observer.fault_why import LEAST_ERROR
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.site_rows import WEIGHT
from fp8watch.quantize.output_checks import GemmCheck
from fp8watch.quantize.self_consistency import QuantiserCheck, Reads
from fp8watch.quantize.why.ask import ask
from fp8watch.quantize.why.case import Case
from fp8watch.recipe import OperandRecipe


def why_codes(
    plan: ObservationPlan,
    row: int,
    x: Tensor,
    reads: Reads,
    spec: OperandRecipe,
    scale: Tensor | None,
    found: QuantiserCheck,
) -> None:
    """Ask why what a GEMM reads is not its operand, where that was found and nobody asked yet.

    Args:
        plan: of the session.
        row: of the slab.
        x, reads, spec, scale: as `check_quantiser` had them.
        found: what it gave.
    """
    why = plan.why
    if spec.scaling == "nvfp4":  # hypotheses are of FP8: one scale a tile, and codes that torch has a dtype for
        return
    if not why.due(row, plan.step.num_begun, (found.fault_tile[:1] >= 0).reshape(())):
        return
    if reads.scale_inv is not None and tuple(reads.scale_inv.shape) != tuple(
        -(-n // t) for n, t in zip(x.shape, reads.tile, strict=True)
    ):
        return
    began = perf_counter()
    is_weight = _is_weight(plan, row)
    update = why.update_of(row) if is_weight else None
    case = Case(x, reads, spec, found.fault_tile, scale, why.scales_before(row), update)
    why.keep(row, ask(case, is_weight=is_weight))
    why.spent_s += perf_counter() - began


def _is_weight(plan: ObservationPlan, row: int) -> bool:
    rows = plan.sites.rows
    return row % len(rows) in (rows.get((WEIGHT, False)), rows.get((WEIGHT, True)))


def why_product(
    plan: ObservationPlan,
    row: int,
    output: Tensor,
    rows_of: Some,
    columns_of: Some,
    inner: int,
    bias: Tensor | None,
    found: GemmCheck | None,
) -> None:
    """Ask why the output of fprop or dgrad is not the product of its operands.

    Args:
        plan: of the session.
        row: of the operand.
        output: [M, N].
        rows_of, columns_of, inner, bias: as of `another_factor`.
        found: what the shadow gave; None: nothing is wrong.
    """
    bad = None if found is None else (found.error > LEAST_ERROR).reshape(())
    if plan.why.due(row, plan.step.num_begun, bad):
        began = perf_counter()
        plan.why.keep(row, another_factor(output, rows_of, columns_of, inner, bias, plan.why.update_of(row)))
        plan.why.spent_s += perf_counter() - began
