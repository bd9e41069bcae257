"""Custom op of probes: what a module put out, and whether the logits of its attention are looked at now.

Shapes:     output [..., N] -> one slab row
Thread:     training
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8watch.layers.custom_ops import is_virtual, plan_of
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.pass_counter import graph_task


def _look_at_probe(y: Tensor, site: Tensor) -> Tensor:
    plan, row = plan_of(site), int(site) & 0xFFFFFFFF
    if plan is not None and plan.observing and graph_task() == -1:
        plan.guard.run("probe", plan.note_probe, row, y)
    return y.new_empty((0,))


look_at_probe_op = torch.library.custom_op("fp8watch::look_at_probe", mutates_args=())(_look_at_probe)


@look_at_probe_op.register_fake
def _(y: Tensor, site: Tensor) -> Tensor:
    return y.new_empty((0,))


def look_at_probe(y: Tensor, site: Tensor) -> None:
    """Look at what a probed module put out."""
    if torch.compiler.is_compiling():
        look_at_probe_op(y, site)
    elif not is_virtual(y):
        _look_at_probe(y, site)


def logits_wanted(site: Tensor) -> ObservationPlan | None:
    """The plan of a probed attention module where its logits are looked at now."""
    plan, row = plan_of(site), int(site) & 0xFFFFFFFF
    if plan is None or not plan.observing or not plan.step.sample.full[row] or graph_task() != -1:
        return None
    return plan


torch.fx.node.has_side_effect(look_at_probe_op._opoverload)  # without a used result it would leave compiled graphs
