"""Custom op of probes: what a module put out or was given, and whether the logits of its attention are looked at now.

Shapes:     output or input [..., N] -> one slab row
Thread:     training
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.custom_ops import is_virtual, plan_of
from fp8watch.layers.host_op import host_op
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.pass_counter import first_tensor, graph_task
from fp8watch.observer.unseen import num_dispatch_modes, unseen


def _look_at_probe(y: Tensor, site: Tensor) -> Tensor:
    plan, row = plan_of(site), int(site) & 0xFFFFFFFF
    if plan is not None and plan.observing and graph_task() == -1:
        plan.guard.run("probe", plan.note_probe, row, y)
    return y.new_empty((0,))


look_at_probe_op = host_op("fp8watch::look_at_probe", _look_at_probe)


@look_at_probe_op.register_fake
def _(y: Tensor, site: Tensor) -> Tensor:
    return y.new_empty((0,))


def look_at_probe(output: Any, number: int, entered: tuple[str, Any] | None = None) -> None:
    """Look at what a probed module put out, or was given, in eager code.

    Args:
        output: of its forward; or its arguments.
        number: that the site of its probe stands for. By it alone is asked whether anything is to be looked at: behind a
            large GEMM nothing is in a processor's caches, and each thing that is touched costs.
        entered: of a Linear its name and the arguments of its forward.
    """
    plan = plan_of(number)
    if plan is None or not plan.observing:
        return
    y = output if type(output) is Tensor and output.is_floating_point() else _floating(output)
    if y is not None and not is_virtual(y) and graph_task() == -1:
        given = None
        if entered is not None and (x := _floating(entered[1])) is not None and not is_virtual(x):
            given = entered[0], x.detach()
        note = plan.note_probe if not num_dispatch_modes() else unseen(plan.note_probe)
        plan.guard.run("probe", note, number & 0xFFFFFFFF, y, given)


def look_at_probe_in_graph(output: Any, site: Tensor) -> None:
    """The same in code that is being compiled."""
    y = _floating(output)
    if y is not None:
        look_at_probe_op(y.detach(), site)


def _floating(output: Any) -> Tensor | None:
    y = first_tensor(output)
    return y if y is not None and y.is_floating_point() else None


def logits_wanted(number: int) -> ObservationPlan | None:
    """The plan of a probed attention module where its logits are looked at now; its site by the number."""
    plan = plan_of(number)
    if plan is None or not plan.observing or not plan.step.sample.full[number & 0xFFFFFFFF] or graph_task() != -1:
        return None
    return plan


torch.fx.node.has_side_effect(look_at_probe_op._opoverload)  # without a used result it would leave compiled graphs
