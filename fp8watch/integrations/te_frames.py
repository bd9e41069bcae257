"""One call of a Transformer Engine module, forward and backward: what Python has seen of its operands.

Shapes:     operands [M, K], before the cast     Thread: training, and autograd's
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8watch.integrations.te_modules import TeModule, weights_of
from fp8watch.integrations.te_tensors import QuantizedView


@dataclass
class Frame:
    """One call of a module: its operands as seen by Python, and the number of GEMMs so far."""

    te: TeModule
    operands: dict[str, list[Tensor]] = field(default_factory=dict)
    before: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # (operand, GEMM) -> as it entered its cast
    num_products: dict[str, int] = field(default_factory=dict)
    observed: set[tuple[int, str, bool]] = field(default_factory=set)  # (GEMM, operand, columnwise)
    again: bool = False  # a recomputation: its forward was observed already
    sampled: bool = True  # its turn is in this step
    trains: bool = True  # whether a backward belongs to this forward
    debug: bool = False  # Transformer Engine's debug mode was asked to show the operands of this call

    def forget(self) -> None:
        """Let go of the operands."""
        self.operands.clear()
        self.before.clear()

    def backward(self, grad: Tensor) -> Frame:
        """The frame of its backward."""
        seen = dict(self.operands, grad_output=[grad.detach()]) if self.sampled else {}
        return Frame(
            self.te, seen, dict(self.before), observed=self.observed, sampled=self.sampled, debug=self.debug
        )  # fmt: skip

    def operand(self, index: int, operand: str, view: QuantizedView, offset: int | None) -> Tensor | None:
        """The operand of one GEMM before its cast, if Python has seen one of that shape.

        Args:
            offset: of its rows in what Python saw, all experts in one tensor; None where that is unknown.
        """
        te = self.te
        shown = self.before.get((operand, index))
        if shown is not None and tuple((flat := shown.reshape(-1, shown.shape[-1])).shape) == view.shape:
            return flat
        seen = list(self.operands.get(operand, ()))
        if (
            operand == "weight"
            and not seen
            and all(te_site.visible for te_site in te.sites if te_site.operand == "weight")
        ):
            parts = [w.detach() for w in weights_of(te, index)]
            seen = [torch.cat(parts) if len(parts) > 1 else parts[0]] if parts else []
        if operand == "grad_output" and te.kind == "LayerNormMLP" and index == 0 and len(seen) == 1:
            return None  # the gradient of the module's output is that of fc2
        for x in reversed(seen):
            if not x.is_floating_point() or x.element_size() not in (2, 4):
                continue
            flat = x.reshape(-1, x.shape[-1])
            if te.kind == "GroupedLinear" and operand != "weight":
                if offset is None:
                    return None
                flat = flat[offset : offset + view.shape[0]]
            if tuple(flat.shape) == view.shape:
                return flat
        return None


class Hook:
    """A hook of a module. A copy or a pickle of the module gets an inert one that loads without fp8watch."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
