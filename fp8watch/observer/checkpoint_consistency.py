"""Whether activation checkpointing computes the second time what it computed the first time.

Thread:     training, and autograd's

A recomputation is not counted: it is the same step's forward again. It must also *be* the same: in another precision
(autocast that was not restored), or with GEMMs in FP8 the one time and not the other, gradients are those of another
function. What is compared is what the site was given, call by call: dtype, columns, and how the GEMM computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Recomputed:
    """First passes and recomputations of the running step."""

    differs: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Row -> how the first pass computed, how the recomputation did. Of the whole run, the first of each row."""
    first: dict[int, tuple[torch.dtype, int, str]] = field(default_factory=dict)
    """Row -> dtype, columns and how the GEMM computes, of the forward operand that counted last."""

    def again(self, row: int, x: Tensor, how: str) -> None:
        """The same operand, recomputed."""
        before, now = self.first.get(row), (x.dtype, x.shape[-1], how)
        if before is not None and before != now:
            self.differs.setdefault(row, (_words(before), _words(now)))

    def fingerprint(self, fingerprint: str) -> str:
        """Of the recomputation: the recipe's own where nothing differs."""
        if not self.differs:
            return fingerprint
        text = ";".join(f"{row}={now}" for row, (_, now) in sorted(self.differs.items()))
        return hashlib.blake2b(f"{fingerprint};{text}".encode(), digest_size=6).hexdigest()

    def told(self, name_of: Callable[[int], str], fingerprint: str) -> tuple[str, dict[str, str]]:
        """The line and the facts of the first operand that differs.

        Args:
            name_of: module and operand of a row, such as "layers.0.fc1.input".
            fingerprint: of the recipe.
        """
        row, (before, now) = next(iter(self.differs.items()))
        where = name_of(row)
        facts = {
            "recompute_fingerprint": self.fingerprint(fingerprint),
            "recomputed": f"{where}: first {before}, then {now}",
        }
        return f"activation checkpointing recomputes {where} as {now}, the first pass was {before}", facts


def _words(given: tuple[torch.dtype, int, str]) -> str:
    dtype, columns, how = given
    return f"{str(dtype).removeprefix('torch.')} [*, {columns}] {how}"
