"""Gradients of which nothing small is left: most of their elements are 0, and none of the others is much smaller than its neighbours.

Shapes:     samples [K] float32 of gradients as they arrive at their optimizer -> one number of each
Thread:     training; nothing waits for a device

What flushes small numbers in a backward leaves `.grad` as autograd gave it, so nothing changes on its way. But it shows in what is there. A
gradient that is sparse because of its data (rows of tokens that did not come, units that are dead) has elements of all sizes all the
same: of 64 numbers from around zero that one none is below a quarter of their median happens once in ten thousand looks. Gradients that
look like this from the first look on are made so, perhaps: a parameter must have been seen otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8watch_agent.update_names import GRADIENT_CUT_OFF

MOST = 0.5
"""Of a gradient's elements are 0, or it is not sparse."""
ENOUGH = 64
"""Other elements, or nothing is said."""
NEAR = 0.25
"""Of their median: the smallest of them is no smaller."""
UNKNOWN = -1.0


class GradientCutOff:
    """Of the parameters of one watch."""

    def __init__(self) -> None:
        self.whole: set[str] = set()
        """Of which less than half was 0, once."""

    def look(self, seen: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        """Numbers of a step, by name; on a CPU only where there may be news.

        Args:
            seen: names and samples; on a CPU of those alone that are half zeros.
        """
        found: dict[str, Any] = {}
        there: dict[object, list[tuple[str, Tensor]]] = {}
        for name, sample in seen:
            if not sample.is_cpu:
                there.setdefault((sample.numel(), sample.device), []).append((name, sample))
            elif name in self.whole:
                found[GRADIENT_CUT_OFF + name] = float(cut_off(sample.reshape(1, -1)))
        for some in there.values():
            shares = cut_off(torch.stack([sample.reshape(-1) for _, sample in some]))
            found |= {GRADIENT_CUT_OFF + name: share for (name, _), share in zip(some, shares.unbind(), strict=True)}
        return found

    def named(self, numbers: dict[str, float], apart: str) -> None:
        """Numbers of a step that have arrived: what is cut off, and was whole at an earlier look, stays.

        Args:
            numbers: of the step, by name.
            apart: begins the names of gradients that became so on their way, which is said of them.
        """
        for key in [n for n in numbers if n.startswith(GRADIENT_CUT_OFF)]:
            name = key.removeprefix(GRADIENT_CUT_OFF)
            if numbers[key] == 0:
                self.whole.add(name)
            if not numbers[key] > 0 or name not in self.whole or apart + name in numbers:
                del numbers[key]


def cut_off(samples: Tensor) -> Tensor:
    """Of each sample the share of zeros where it is cut off, 0 where less than half is 0, UNKNOWN elsewhere. [N, K] -> [N] float32"""
    sizes = (
        samples.abs().sort(1).values
    )  # no median of torch's: on a GPU it is refused where algorithms must be deterministic
    num = sizes.shape[1]
    num_zero = (sizes == 0).sum(1, keepdim=True)
    least = sizes.gather(1, num_zero.clamp(max=num - 1))[:, 0]
    middle = sizes.gather(1, ((num_zero + num) // 2).clamp(max=num - 1))[:, 0]
    few, share = num - num_zero[:, 0] < ENOUGH, num_zero[:, 0] / num
    said = ~few & (least >= NEAR * middle) & (sizes[:, -1] < math.inf)
    return torch.where(share < MOST, 0.0, torch.where(said, share, UNKNOWN))
