"""Whether what activation checkpointing recomputes is what the first pass had: a sample of one operand, in turns.

Shapes:     operand [..., K] -> SAMPLE elements, kept from the first pass until the step ends
Thread:     training, and autograd's; nothing waits for a device

The loss is that of the first pass and the gradient that of the second. They are of one function only where dropout draws the same
masks and what was kept, or taken to the host, comes back as it was; dtype and kernels (`checkpoint_consistency`) say nothing of that. Each
recomputation is held against every first pass of its step, and against none where there were more than are kept: stages of
a pipeline run several before the first comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8watch_agent.update_names import RECOMPUTED

SAMPLE = 1024
TURNS = 2
"""Operands that have their turn in a step."""
MAX_KEPT = 16
"""First passes of one operand in a step."""
MAX_LOOKS = 2
"""Recomputations of one operand that are looked at in a step."""
LEAST = 0.01
"""Kernels whose sums have no order differ by 1e-3 in bfloat16; one row of a hundred that was written over by 0.1."""


@dataclass
class RecomputeValues:
    """Those of the running step."""

    name_of: Callable[[int], str] = str
    """Module and operand of a row."""
    turn: frozenset[int] = frozenset()
    """Rows whose first passes are kept in this step."""
    _rows: list[int] = field(default_factory=list)  # that were ever recomputed
    _next: int = 0
    _kept: dict[int, list[Tensor]] = field(default_factory=dict)
    _looks: dict[int, int] = field(default_factory=dict)
    _found: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def keep(self, row: int, x: Tensor) -> None:
        """The first pass of an operand whose turn it is; one more than are compared says that there were too many."""
        kept = self._kept.setdefault(row, [])
        if len(kept) <= MAX_KEPT:
            kept.append(_sample(x))

    @torch.no_grad()
    def again(self, row: int, x: Tensor) -> None:
        """The same operand, recomputed."""
        if row not in self.turn:
            if row not in self._rows:
                self._rows.append(row)
            return
        kept, looks = self._kept.get(row, []), self._looks.get(row, 0)
        if not 0 < len(kept) <= MAX_KEPT or looks >= MAX_LOOKS:
            return
        self._looks[row] = looks + 1
        now = _sample(x)
        if any(first.shape != now.shape or first.device != now.device for first in kept):
            return
        off = torch.stack([(now - first).norm() / first.norm() for first in kept]).amin()
        self._found[row] = torch.maximum(self._found[row], off) if row in self._found else off

    def take(self) -> dict[str, Tensor]:
        """What this step has shown, by name, and forget it; others have their turn in the next."""
        found = {RECOMPUTED + self.name_of(row): off for row, off in self._found.items()}
        if self._rows:
            chosen = (self._rows[(self._next + i) % len(self._rows)] for i in range(TURNS))
            self.turn, self._next = frozenset(chosen), (self._next + TURNS) % len(self._rows)
        self._kept.clear()
        self._looks.clear()
        self._found.clear()
        return found


def only_news(numbers: dict[str, float]) -> None:
    """Leave of the numbers of a step those of recomputations that differ."""
    for name in [n for n in numbers if n.startswith(RECOMPUTED)]:
        if not numbers[name] > LEAST:
            del numbers[name]


def _sample(x: Tensor) -> Tensor:
    """Evenly spread elements, float32, in memory of their own. [SAMPLE], or all there are"""
    flat = x.detach().reshape(-1)
    stride = max(1, flat.numel() // SAMPLE)
    stride -= stride > 1 and stride % 2 == 0  # an even one meets the same columns in each row
    return flat[::stride][:SAMPLE].to(torch.float32, copy=True)
