"""Shadow GEMM: what a GEMM made of its operands, held against float64 on a few sampled rows.

Shapes:     output [M, N], operands [M, K] and [K, N] -> three fields of one slab row
Thread:     training, and autograd's; only for modules whose shadow is switched on

Operands that quantise well say nothing of the product: an accumulator of 14 bits without promotion every 128 terms
costs 0.35 % of the output's RMS at K = 4096, and bytes of one format read as another scale a whole gradient by a
power of two. Both show when 64 rows of the output are computed again. The shadow is cast like the output, so that
what the output's own dtype loses is not held against the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8watch.layers import custom_ops
from fp8watch.observer.pass_counter import graph_task
from fp8watch.observer.site_rows import INPUT
from fp8watch.quantize.output_checks import GemmCheck

NUM_ROWS = 64


def sampled_rows(num_rows: int, phase: int) -> list[int]:
    """At most NUM_ROWS rows spread evenly over the output; `phase` shifts them, so that calls see different ones.

    No random numbers: the generators belong to training.
    """
    n = min(NUM_ROWS, num_rows)
    return sorted({(i * num_rows // n + phase) % num_rows for i in range(n)})


@torch.no_grad()
def check_gemm(output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, phase: int = 0) -> GemmCheck:
    """Compare sampled rows of `output` with a·b + bias computed in float64.

    Args:
        output: [M, N] as the GEMM gave it, any floating dtype.
        a: [M, K] dequantised operand; only sampled rows are read.
        b: [K, N] dequantised operand.
        bias: [N] or None.
        phase: which rows, see `sampled_rows`.

    Returns:
        Error, gain and the count of non-finite outputs. Rows where the shadow itself is not finite enter neither
        error nor gain: there the operands are at fault, not the GEMM.

    Raises:
        ValueError: shapes that cannot be those of a·b.
    """
    (m, n), (am, k) = output.shape, a.shape
    if am != m or tuple(b.shape) != (k, n):
        raise ValueError(
            f"output {m}×{n}, operands {am}×{k} and {'×'.join(map(str, b.shape))}: must be [M, N], [M, K], [K, N]"
        )
    rows = torch.tensor(sampled_rows(m, phase), dtype=torch.int64).to(a.device, non_blocking=True)
    shadow = a.index_select(0, rows).double() @ b.double()
    if bias is not None:
        shadow += bias.double()
    shadow = shadow.to(output.dtype).double()
    got = output.index_select(0, rows).double()
    finite_output = got.isfinite()
    both = finite_output & shadow.isfinite()
    got, shadow = got.where(both, 0.0), shadow.where(both, 0.0)
    energy = shadow.square().sum()
    error = ((got - shadow).square().sum() / energy).sqrt()
    gain = (got * shadow).sum() / energy
    empty = energy == 0  # nothing to compare: no error, gain 1, unless the output has something where the shadow is 0
    wrong = empty & (got != 0).any()
    error = error.masked_fill(empty, 0.0).masked_fill(wrong, torch.inf)
    return GemmCheck(error.float(), gain.masked_fill(empty, 1.0).float(), (~finite_output).sum())


def _shadow_gemm(
    output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, site: Tensor, operand: int, columnwise: bool
) -> Tensor:
    plan, first = custom_ops.lookup(site)
    row = plan.sites.row(first, operand, columnwise)
    recomputed = operand == INPUT and graph_task() != -1
    slab = plan.slab
    if (
        slab is not None
        and plan.step.sampled
        and not plan.step.paused
        and not recomputed
        and output.numel()
        and a.numel()
    ):

        def accumulate() -> None:
            slab.accumulate_gemm(row, check_gemm(output, a, b, bias, phase=plan.step.calls))

        plan.guard.run("shadow", accumulate)
    return output.new_empty((0,))


shadow_gemm = torch.library.custom_op("fp8watch::shadow_gemm", mutates_args=())(_shadow_gemm)


@shadow_gemm.register_fake
def _(
    output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, site: Tensor, operand: int, columnwise: bool
) -> Tensor:
    return output.new_empty((0,))


torch.fx.node.has_side_effect(torch.ops.fp8watch.shadow_gemm.default)
