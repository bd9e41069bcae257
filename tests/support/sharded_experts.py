"""Trainings of one model on the ranks of a group, sharded or replicated, beside the same training on one rank alone.

The training alone takes the batches of all ranks one after the other and averages their gradients, which on two ranks has
the same bits. Nothing is checkpointed in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8watch

Batch = tuple[int, int]
"""Number of the step, and of the rank."""


class Subject(NamedTuple):
    """A model that returns its loss.

    Args:
        make: it, with its experts checkpointed or not; seeded by the caller.
        loss: of a model on a batch.
        blocks: what is sharded by itself, innermost first.
    """

    make: Callable[[bool], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]


Rows = dict[tuple[str, str, str], tuple[int, float]]
"""(module, operand, direction) -> number of elements and amax, in the last step."""


def _trained(subject: Subject, model: nn.Module, ranks: Sequence[int], steps: int) -> list[list[float]]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        found = [subject.loss(model, (step, rank)) for rank in ranks]
        for loss in found:
            loss.backward()
        for p in model.parameters() if len(ranks) > 1 else ():
            if p.grad is not None:
                p.grad.div_(len(ranks))
        optimizer.step()
        losses.append([float(loss.detach()) for loss in found])
    return losses


def _rows(watch: Any) -> Rows:
    _, rows = watch._recorder.step(-1)
    return {
        k: (int(r["num_elements"]), float(r["amax_max"])) for k, r in rows.items() if k[1] in ("input", "grad_output")
    }


def compare(subject: Subject, how: str, recipe: str, *, before: bool, steps: int = 3) -> dict[str, bool]:
    """What holds of a training on all ranks beside one on each rank alone; to be called on all of them.

    Args:
        subject: the model.
        how: ddp, or fsdp.
        recipe: of both.
        before: the watch is attached before the model is sharded.
        steps: of each training.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    watches = []

    def made(checkpointed: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return subject.make(checkpointed)

    def attached(model: nn.Module, **kwargs: Any) -> nn.Module:
        watches.append(fp8watch.attach(model, recipe=recipe, overhead_budget=None, **kwargs))
        return model

    alone = _trained(subject, attached(made()), range(world), steps)
    model = attached(made(True)) if before else made(True)
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for block in (*subject.blocks(model), model):
            fully_shard(block, mesh=mesh)
    if not before:
        attached(model)
    losses = _trained(subject, model, [rank], steps)
    without = attached(made(), filter_fn=lambda _, fqn: "experts" not in fqn)
    high = _trained(subject, without, range(world), steps)
    expected, mine = (_rows(watch) for watch in watches[:2])
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, mine)
    together = {
        key: (sum(rows[key][0] for rows in everybody), max(rows[key][1] for rows in everybody))
        for key in expected
        if all(key in rows for rows in everybody)
    }
    facts = [watch._recorder.facts for watch in watches[:2]]
    errors = [watch.summary()["internal_errors"] for watch in watches]
    for watch in watches:
        watch.detach()
    return {
        "losses": [one for (one,) in losses] == [of[rank] for of in alone],
        "experts in FP8": [of[rank] for of in alone] != [of[rank] for of in high],
        "experts": sum(".experts." in f".{key[0]}" for key in expected) >= 8,
        "statistics": together == expected,
        "told": not any(errors) and not any(f.get("silent") or f.get("not_in_fp8") for f in facts),
    }
