"""Modules that are on another device than where attach found them: `attach(model)`, then `model.cuda()`.

Shapes:     [..., K] -> [..., N], as without us     Thread: training

Backends, rows and the GEMMs that compute in FP8 are chosen for a device. What is moved behind attach computes as it did
before, and is not looked at: that it ran is noted, so that steps end, and that it is blind is said with the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8watch.layers.custom_ops import plan_of
from fp8watch.layers.local_part import is_dtensor, local_part
from fp8watch.layers.observe_linear import note_rest

DEVICE_KEY = "_fp8watch_device"
"""Of a module that attach took over: the device that its backend and its rows are made for, with its index."""

REPLICATED_KEY = "_fp8watch_replicated"
"""Of one that `nn.DataParallel` has made replicas of."""

UNSEEN_KEY = "_fp8watch_unseen"
"""Of one that ran and could not be looked at: whether because of tensor parallelism. Between forwards that cannot be told:
FSDP2 keeps a DTensor too where it will gather a plain tensor, and may keep it on another device."""

MARKS = (DEVICE_KEY, REPLICATED_KEY, UNSEEN_KEY)


def is_moved(module: nn.Module) -> bool:
    """Whether the parameters of a module that attach took over are on another device now."""
    known, first = module.__dict__.get(DEVICE_KEY), next(module.parameters(), None)
    return known is not None and first is not None and first.device != known and first.device.type != "meta"


def as_before(module: nn.Linear, x: Tensor, weight: Tensor, number: int) -> Tensor:
    """The output of a Linear that is moved or spread over ranks, whose site stands for `number`."""
    y = F.linear(x, weight, module.bias)
    if module.training:
        note_unseen(module, y, number, sharded=is_dtensor(weight))
    return y


def note_unseen(module: nn.Module, y: Tensor, number: int, *, sharded: bool) -> None:
    """Note that something ran which cannot be looked at, so that steps end and the reason is known.

    Args:
        module: that ran.
        y: what it returned.
        number: that its site stands for.
        sharded: it multiplied a tensor of tensor parallelism.
    """
    if not torch.compiler.is_compiling() and (plan := plan_of(number)) is not None:
        module.__dict__[UNSEEN_KEY] = sharded
        note_rest(plan, number, y, local_part(y))


def without_site(module: nn.Module, replica: Any, keys: Iterable[str]) -> Any:
    """A replica that `nn.DataParallel` made of a module: replicas run in threads, on devices of their own, and each is the
    module as it was before attach. That there are any is noted. `keys`: what attach left in the module."""
    if DEVICE_KEY in module.__dict__:
        module.__dict__[REPLICATED_KEY] = True
    for key in keys:
        replica.__dict__.pop(key, None)
    return replica
