"""Second copies that are wrong: what wgrad and dgrad read, while fprop is right and the loss of the step is too.

Columnwise copies of input and gradient feed wgrad; the weight's copy feeds dgrad. A fault here never touches the forward
pass: the loss shows it only after the updates that it spoils.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import ERRORS, Lasting, behind_the_first, log_uniform, onset, relative_error, until
from proving.faults._kernel import KernelFault, kernel_sites
from proving.faults._sites import Operand, change_gemm
from proving.training import Expected, Training
from torch import Tensor


class TransposedGarbage(KernelFault):
    """The columnwise copy is memory that nobody wrote."""

    name = "transposed-garbage"
    operands = ("input", "grad_output")
    directions = ((True,),)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        size = tuple(operand.codes.shape)
        bytes_ = torch.from_numpy(self.rng.integers(0, 0x7B, size=size, dtype=np.uint8))
        return operand.values(bytes_)


class TransposedUntransposed(KernelFault):
    """The columnwise copy was written in the order of the rowwise one, and is read as its transpose."""

    name = "transposed-untransposed"
    operands = ("input", "grad_output")
    directions = ((True,),)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        m, k = operand.codes.shape
        return operand.values(operand.codes.contiguous().view(k, m).t())


class TransposedStale(KernelFault):
    """The columnwise copy is that of the micro-batch before: the buffer is reused too early, or not written again."""

    name = "transposed-stale"
    operands = ("input", "grad_output")
    directions = ((True,),)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        before = self.before.get((name, operand.columnwise))
        if before is None or before.right.shape != operand.right.shape:
            return operand.right.roll(1, 0)
        return before.right


class WeightCopyStale(Lasting):
    """dgrad reads a transposed copy of the weight that was made some steps ago, fprop the weight of today.

    How old it is follows from the error that was drawn: it lies on the way from the first weights to those of today.
    """

    name = "weight-copy-stale"
    modes: ClassVar[tuple[str, ...]] = ("quantiser-fault", "stale-weight-scale")

    def __init__(self, *, modules: list[str], error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.error = modules, error
        self.first: dict[str, Tensor] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> WeightCopyStale | None:
        names = behind_the_first(training, kernel_sites(rng, training, "grad_output"))
        if not names:
            return None
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.7),
            severity=severity,
            expected=Expected(cls.modes, tuple(names), None, True),
            drawn={"module": names[0], "num_modules": len(names), "asked_error": round(error, 4)},
            modules=names,
            error=error,
        )

    def attached(self, t: Training, watch: Any) -> None:
        self.first = {name: t.model.get_submodule(name).weight.detach().float().clone() for name in self.modules}

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            now = module.weight.detach().float().clone()
            whole = relative_error(self.first[name], now)
            old = now + min(1.0, self.error / max(whole, 1e-6)) * (self.first[name] - now)
            self.note(error=relative_error(old, now))

            def reads_old(out: Tensor, grad: Tensor, weight: Tensor, old: Tensor = old) -> Tensor:
                return grad @ old

            self.later(change_gemm(module, "dgrad", reads_old))
