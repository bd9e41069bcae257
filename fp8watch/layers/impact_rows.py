"""What FP8 in one forward GEMM changes of the loss: sampled rows of a module whose turn it is, from two factors.

Shapes:     x [M, K], weight [N, K], y and its gradient [M, N] -> two fields of one slab row
Thread:     training, and autograd's

To first order a row m of the output costs Σ over n of ∂ℒ/∂y[m, n] · (y[m, n] − what F.linear gives there), in nats of the
loss that backward was called on. Both factors are at hand in a turn: some rows are multiplied again in the operands' own
dtype, and a hook takes the gradient of these rows. The sum over sampled rows says little of the sum over all of them,
for its terms have either sign; their RMS ranks layers as a full diagnosis does (`fp8watch.diagnose.loss_impact`).
Where code is compiled no hook is set, and nothing is claimed.
"""

from __future__ import annotations

from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8watch.layers.custom_ops import is_virtual
from fp8watch.layers.operand_check import capturing
from fp8watch.layers.shadow_gemm import sampled_rows
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.site_rows import INPUT
from fp8watch.observer.unseen import unseen

NUM_ROWS = 256
"""More than a shadow takes: impacts of tokens have heavy tails, and the RMS of 64 of them ranked layers at 0.8 only."""

LOOK = "impact"
"""What a turn notes that it has taken."""


class ImpactRows:
    """Rows of one call, from its forward to its backward: what FP8 changed of them waits for their gradient."""

    def __init__(self, plan: ObservationPlan, row: int, at: Tensor, error_RN: Tensor) -> None:
        self._plan, self._row, self._at = plan, row, at
        self._error: Tensor | None = error_RN

    def see(self, grad_MN: Tensor) -> None:
        """The gradient of the output: [M, N]. Only the first counts, of a graph that is run through twice."""
        error, self._error = self._error, None
        slab = self._plan.slab
        if error is None or slab is None or not self._plan.observing or is_virtual(grad_MN) or capturing(grad_MN):
            return
        began = perf_counter()
        with torch.no_grad():
            by_row = (grad_MN.detach().index_select(0, self._at).double() * error.double()).sum(1)
            finite = by_row.isfinite()
            slab.accumulate_impact(self._row, by_row.where(finite, 0.0).square().sum(), finite.sum())
        self._plan.canary.spent_s += perf_counter() - began


@torch.no_grad()
def impact_rows(
    plan: ObservationPlan, first: int, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, y_MN: Tensor
) -> ImpactRows | None:
    """What FP8 changed of some rows of an output; None where the module has had its look, or there is nothing to look at.

    Args:
        plan: of the attach.
        first: the module's first row of the slab.
        x_MK: what the module was given.
        weight_NK: in high precision.
        bias_N: or None.
        y_MN: as it was returned.
    """
    canary, row = plan.canary, plan.sites.find(first, INPUT, False)
    if row is None or row in plan.sites.unobserved or plan.slab is None or not y_MN.numel():
        return None
    if not plan.observing or plan.step.warming or plan.stopwatch is not None or capturing(y_MN):
        return None
    if any(is_virtual(t) for t in (x_MK, weight_NK, y_MN)) or not canary.takes(row, LOOK):
        return None
    began = perf_counter()
    num = y_MN.shape[0]
    found = torch.tensor(sampled_rows(num, canary.phase, NUM_ROWS), dtype=torch.int64, device="cpu")
    at = found.to(y_MN.device, non_blocking=True)
    dtype = y_MN.dtype
    x_RK = x_MK.detach().index_select(0, at).to(dtype)
    with torch.autocast(y_MN.device.type, enabled=False):
        plain = F.linear(x_RK, weight_NK.detach().to(dtype), None if bias_N is None else bias_N.detach().to(dtype))
    error = (y_MN.detach().index_select(0, at).float() - plain.float()).to(dtype)  # waits for backward
    canary.spent_s += perf_counter() - began
    return ImpactRows(plan, row, at, error)


def take_impact(
    plan: ObservationPlan, first: int, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, y_MN: Tensor
) -> None:
    """Look at one call of a module on our FP8 path that has its turn; a hook waits for the gradient. Eager only."""
    rows = plan.guard.run(LOOK, unseen(impact_rows), plan, first, x_MK, weight_NK, bias_N, y_MN)
    if rows is not None:
        y_MN.register_hook(lambda grad: plan.guard.run(LOOK, rows.see, grad))  # type: ignore[no-untyped-call]
