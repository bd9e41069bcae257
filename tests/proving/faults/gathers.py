"""What ranks hand to each other and what arrives as something else: FP8 weights with the padding of a shard or with a shard's own scale,
chunks of an activation that are read before they have come, gradients in a buffer that the next layer writes into.

Severity is the relative error of what the GEMM reads, or of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from proving.faults._base import (
    ERRORS,
    Lasting,
    change_input,
    linears,
    log_uniform,
    one_of,
    onset,
    relative_error,
    role,
    seed,
    trained,
    until,
    with_gradient,
)
from proving.faults._kernel import KernelFault, Key
from proving.faults._sites import Operand
from proving.training import Expected, Training
from torch import Tensor

_MOST_PADDING = 8
_WEIGHTS = ("quantiser-fault", "stale-weight-scale")


class GatheredWithPadding(KernelFault):
    """A weight that does not divide evenly is gathered in FP8, and the rows that pad the short shard stay in the middle of it: those behind
    lie some rows too far, the last are lost (torchao #3982, torchtitan #4371, ROCm's Transformer Engine #587). Where the short
    shard ends follows from the error that was drawn."""

    name = "gathered-with-padding"
    operands = ("weight",)
    directions = ((False,),)
    modes = _WEIGHTS

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drawn.pop("race")
        self.found: dict[Key, tuple[int, int]] = {}
        """Of each copy: the row behind the short shard, and how many rows of padding follow."""

    def spoil(self, name: str, operand: Operand) -> Tensor:
        key, right = (name, operand.columnwise), operand.right
        if operand.columnwise not in self.columnwise or not float(right.abs().max()) > 0:
            return right
        if key not in self.found:
            self.found[key] = self._boundary(right)
            self.note(row=self.found[key][0], num_padding=self.found[key][1])
        out = self.gathered(right, *self.found[key])
        self.note(error=relative_error(out, right), at=f"{name} {tuple(out.shape)}")
        return out

    @staticmethod
    def gathered(right: Tensor, row: int, num_padding: int) -> Tensor:
        """The weight with zeros from `row` on, and all that was there behind them."""
        padding = right.new_zeros(num_padding, right.shape[1])
        return torch.cat((right[:row], padding, right[row:]))[: len(right)]

    def _boundary(self, right: Tensor) -> tuple[int, int]:
        """Where the error comes nearest to what was drawn, for one to eight rows."""
        energy = right.double().square().sum(1)
        best = (float("inf"), 0, 0)
        for num in range(1, min(_MOST_PADDING, len(right) - 1) + 1):
            moved = (right[:-num] - right[num:]).double().square().sum(1)
            # from `row` on: `num` rows are lost, each later one is that of `num` rows before
            behind = torch.cat((moved.flip(0).cumsum(0).flip(0), energy.new_zeros(1)))
            lost = energy.unfold(0, num, 1).sum(1)
            errors = ((behind + lost) / energy.sum()).sqrt()
            at = int((errors - self.error).abs().argmin())
            best = min(best, (float((errors[at] - self.error).abs()), at, num))
        return best[1], best[2]


class ShardsScaledApart(KernelFault):
    """Each rank casts its shard of a weight with the amax of the shard, and the whole is read with one scale: rows of other shards come out
    too large or too small by a factor (Transformer Engine #1544: the amax has to be reduced before the cast; #1128: another weight's
    `scale_inv`). How many rows follows from the error that was drawn."""

    name = "shards-scaled-apart"
    operands = ("weight",)
    directions = ((False,),)
    modes = (*_WEIGHTS, "cross-rank-disagreement")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.race = False
        self.drawn.pop("race")
        self.ratio = log_uniform(self.rng, 1.2 + self.error, 2.0 + 2 * self.error)
        self.smaller = self.severity == "mild" and bool(self.rng.random() < 0.5)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        ratio = (4.0 if self.severity == "severe" else 2.0) if operand.job.power_2_scale else self.ratio
        self.note(ratio=round(1 / ratio if self.smaller else ratio, 3))
        return operand.right / ratio if self.smaller else operand.right * ratio


class RowsArriveLate(Lasting):
    """The GEMM begins before all chunks of a gathered activation have come, and reads what lay in the buffer: rows of the batch before
    (overlap of gather and GEMM: uccl's mKernel #18, Transformer Engine #1583). In some calls, in all Linears that read the buffer."""

    name = "rows-arrive-late"

    def __init__(self, *, modules: list[str], error: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.error = modules, error
        self.rng = np.random.default_rng(seed)
        self.chance, self.start = float(self.rng.uniform(0.3, 1.0)), float(self.rng.random())
        self.share: dict[str, float] = {}
        self.before: dict[str, Tensor] = {}
        self.late = False

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RowsArriveLate | None:
        names = linears(training)
        if not names:
            return None
        name = one_of(rng, names)
        together = [
            role(training, *roles) for roles in (("attention.q", "attention.k", "attention.v"), ("mlp.gate", "mlp.up"))
        ]
        beside = [n for of in together if name in of for n in of if n.rpartition(".")[0] == name.rpartition(".")[0]]
        modules = [n for n in names if n == name or n in beside]
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 4, 30, stays=0.7),
            severity=severity,
            expected=Expected(
                ("silent-data-corruption", "kernel-output-fault", "scalar-shift"), tuple(modules), None, False
            ),
            drawn={"module": modules[0], "num_modules": len(modules), "asked_error": round(error, 4)},
            modules=modules,
            error=error,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            self.later(change_input(t.model.get_submodule(name), partial(self.read, name)))

    def read(self, name: str, x: Tensor) -> Tensor:
        """What the GEMM reads in the place of x."""
        rows = x.detach().reshape(-1, x.shape[-1])
        old = self.before.get(name)
        self.before[name] = rows.clone()
        if old is None or old.shape != rows.shape:
            old = rows.roll(len(rows) // 2, 0)
        order = (torch.arange(len(rows)) + int(self.start * len(rows))) % len(rows)
        first = name not in self.share
        if first:
            errors = (old - rows).double().square().sum(1)[order].cumsum(0)
            enough = self.error**2 * rows.double().square().sum()
            self.share[name] = min(1.0, (int((errors < enough).sum()) + 1) / len(rows))
        if name == self.modules[0]:  # the others read the same buffer
            self.late = first or self.rng.random() < self.chance
        if not self.late:
            return x
        chosen, wrong = order[: max(1, round(self.share[name] * len(rows)))], rows.clone()
        wrong[chosen] = old[chosen]
        if not torch.equal(wrong, rows):  # rows of a learnt table are the same in each batch
            self.note(error=relative_error(wrong, rows), num_rows=len(chosen))
        return with_gradient(x, wrong.view_as(x))


class GradientBufferShared(Lasting):
    """Two layers share a gradient buffer, and the next wgrad writes into it while that of the layer before is still being reduced
    (Megatron-LM #5222: double buffers, a slight corruption that is hard to see). A part of one gradient is that of its neighbour."""

    name = "gradient-buffer-shared"

    def __init__(self, *, module: str, other: str, error: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.other, self.error, self.seed = module, other, error, seed
        random = np.random.default_rng(seed)
        self.chance, self.start = float(random.uniform(0.3, 1.0)), float(random.random())
        self.num = 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientBufferShared | None:
        names = trained(training, role(training, "linears"))
        shape: Callable[[str], Any] = lambda name: training.model.get_submodule(name).weight.shape  # noqa: E731
        pairs = [
            (name, max((n for n in names[:i] if shape(n) == shape(name)), key=names.index))
            for i, name in enumerate(names)
            if any(shape(n) == shape(name) for n in names[:i])
        ]
        if not pairs:
            return None
        (module, other), step = one_of(rng, pairs), onset(rng, training)
        error = log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 8, 40, stays=0.8),
            severity=severity,
            expected=Expected(
                ("silent-data-corruption", "kernel-output-fault", "scalar-shift"), (module,), None, False
            ),
            drawn={"module": module, "of": other, "asked_error": round(error, 4)},
            module=module,
            other=other,
            error=error,
            seed=seed(rng),
        )

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        random = np.random.default_rng([self.seed, step])
        if not self.active(step) or (step > self.step and random.random() > self.chance):
            return
        mine, others = (t.model.get_submodule(name).weight.grad for name in (self.module, self.other))
        if mine is None or others is None:
            return
        right = mine.clone()
        order = (torch.arange(mine.numel()) + int(self.start * mine.numel())) % mine.numel()
        if not self.num:
            errors = (others - mine).double().square().flatten()[order].cumsum(0)
            self.num = min(mine.numel(), int((errors < self.error**2 * mine.double().square().sum()).sum()) + 1)
        mine.view(-1)[order[: self.num]] = others.flatten()[order[: self.num]]
        self.note(num_elements=self.num, error=relative_error(mine, right))
