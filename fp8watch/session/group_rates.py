"""Learning rates of an optimizer's parameters beside each other: one group that leaps while the others go on.

Shapes:     the rate of each group, before each step -> two numbers and a name, only where a rate leaps
Thread:     training, before an optimizer steps; numbers of the host alone

A schedule moves all rates by one factor, and that is no news. What is followed is the rate of each parameter over the median of all,
wherever its group stands: groups are split, added and written anew. Said are those that stood still for STILL_STEPS and
leap by LEAP. A rate that was 0 is a group that was frozen, and its beginning is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.session.by_optimizer import ByOptimizer
from fp8watch.session.tensor_places import parameter_names
from fp8watch_agent.update_names import OF, RATE_PARAMETERS, RATE_TIMES

STILL_STEPS = 16
LEAP = 1.5
"""Times its share of the others' rate; the collector decides what is worth a word."""
MAX_PARAMETERS = 1 << 16
Optimizer = torch.optim.Optimizer


@dataclass
class _Rates:
    shape: tuple[tuple[float, int], ...] = ()  # rate over the first group's, parameters, of each group
    shares: dict[int, float] = field(default_factory=dict)  # id of a parameter -> its rate over the median
    since: int = 0  # steps


class GroupRates:
    """Those of the optimizers of one watch.

    Args:
        model: whose parameters have names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = ByOptimizer[_Rates]()

    def stop(self) -> None:
        """Follow nothing any more."""
        self._known.clear()

    def before(self, optimizer: Optimizer) -> dict[str, Any]:
        """It is about to step: what leaped, as scalars of the step that ends now."""
        groups, known = optimizer.param_groups, self._known.get(id(optimizer))
        if len(groups) == 1 and known is not None and _is_alone(groups[0], known.shape):
            known.since += 1
            return {}
        rates = [_rate(group) for group in groups]
        base = next((rate for rate in rates if rate > 0), 0.0)
        if not base or min(rates) < 0:
            return {}
        if known is None:
            self._known.put(optimizer, known := _Rates())
        shape = tuple((float(f"{r / base:.6g}"), len(g["params"])) for r, g in zip(rates, groups, strict=True))
        if shape == known.shape:
            known.since += 1
            return {}
        shares = _shares(groups, rates)
        before, since = known.shares, known.since
        known.shape, known.shares, known.since = shape, shares, 0
        if since < STILL_STEPS or not before:
            return {}
        leaps = {
            p: share / before[p] for p, share in shares.items() if before.get(p, 0.0) > 0 and share > LEAP * before[p]
        }
        if not leaps or 2 * len(leaps) > len(shares):
            return {}
        first = next(p for p in leaps)
        name = dict(parameter_names(self._model)).get(first, "a parameter")
        return {RATE_TIMES: max(leaps.values()), RATE_PARAMETERS: len(leaps), OF + name: 1.0}


def _is_alone(group: dict[str, Any], shape: tuple[tuple[float, int], ...]) -> bool:
    """Whether the only group has as many parameters as it had: its rate is its own, whatever a schedule makes of it."""
    lr = group.get("lr")
    return type(lr) is float and 0.0 < lr < math.inf and shape == ((1.0, len(group["params"])),)


def _rate(group: dict[str, Any]) -> float:
    """Of a group; −1 where it lies on a device, or there is none."""
    lr = group.get("lr")
    if lr is None or (isinstance(lr, Tensor) and not lr.is_cpu):
        return -1.0
    return float(lr)


def _shares(groups: list[dict[str, Any]], rates: list[float]) -> dict[int, float]:
    """Rate of each parameter over the median of all of them, by its id."""
    ids = [(id(p), rate) for group, rate in zip(groups, rates, strict=True) for p in group["params"]][:MAX_PARAMETERS]
    median = sorted(rate for _, rate in ids)[len(ids) // 2] if ids else 0.0
    return {p: rate / median for p, rate in ids} if median > 0 else {}
