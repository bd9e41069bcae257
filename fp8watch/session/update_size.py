"""How far Adam moved its weights, against what it keeps of them says.

Upstream:   fp8watch.session.update_turns
Shapes:     [R, SAMPLE] of weights, what they moved by, and their moments -> one number
Thread:     training, before an optimizer steps; nothing waits for a device

Adam moves a weight by −lr · m̂ / (√v̂ + eps), and AdamW by −lr · decay · w besides (Kingma and Ba 2015, algorithm 1; Loshchilov
and Hutter 2019, algorithm 2); both moments are there behind the step, of negated gradients where it maximizes. A weight that moved along that, but twice as far,
took the update twice; half as far, something takes part of it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ADAM = (torch.optim.Adam, torch.optim.AdamW)
ALONG = 0.95
"""Cosine of what a weight moved by and what it was to move by."""
AGREE, ALIKE = 0.75, 0.1
"""Share of the weights whose factor is within so much of the median."""
LEAST_TIMES = 1.4
"""A factor nearer to 1 is none: another rate than the one that is set in this moment, say."""
LEAST_WEIGHTS = 2
LEAST_UPDATE = 2.0**-16
"""Of a weight's size, on average: smaller updates are mostly rounding in float32."""


class Rate(NamedTuple):
    """What a parameter group says before its step."""

    lr: float
    decay: float  # decoupled
    beta1: float
    beta2: float
    eps: float


def rate_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rate | None:
    """None where it is no plain Adam, or its numbers lie on a device."""
    if type(optimizer) not in ADAM or group.get("amsgrad"):
        return None
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    decay = group.get("weight_decay", 0.0) if decoupled else 0.0
    given = group.get("lr"), decay, *group.get("betas", (None, None)), group.get("eps")
    numbers = [float(x) for x in given if isinstance(x, float | int) or (isinstance(x, Tensor) and x.is_cpu)]
    if len(numbers) < len(given):
        return None
    return Rate(*numbers)


def update_times(
    rates: Sequence[Rate], was: Tensor, moved: Tensor, first: Tensor, second: Tensor, steps: Tensor
) -> Tensor:
    """The median factor between what weights moved by and what they were to move by; 0 where it is about 1, or they do not agree.

    Args:
        rates: [R], of the step.
        was: [R, SAMPLE] float32, before it.
        moved: [R, SAMPLE] float32.
        first, second: [R, SAMPLE] float32, moments behind it.
        steps: [R], how many each weight has had, with it.

    Returns:
        [] float32.
    """
    lr, decay, beta1, beta2, eps = (
        torch.tensor(rates, dtype=torch.float64, device="cpu").to(was.device, non_blocking=True).T[..., None]
    )
    num = steps.double()[:, None]
    size = (second.double() / (1 - beta2**num)).sqrt() + eps
    meant = -lr * (first.double() / (1 - beta1**num) / size + decay * was.double())
    along = (moved.double() * meant).sum(1)
    energy, went = meant.square().sum(1), moved.double().square().sum(1)
    times = along / energy.clamp(min=1e-60)
    large = meant.abs().mean(1) > LEAST_UPDATE * was.double().abs().mean(1)
    known = large & (along > ALONG * (energy * went).sqrt()) & (energy > 0)
    median = torch.where(known, times, torch.nan).nanmedian()
    alike = ((times - median).abs() <= ALIKE * median) & known
    agree = (alike.sum() >= AGREE * len(times)) & (alike.sum() >= LEAST_WEIGHTS)
    far = (median >= LEAST_TIMES) | (median <= 1 / LEAST_TIMES)
    return torch.where(agree & far, median, 0.0).float()
