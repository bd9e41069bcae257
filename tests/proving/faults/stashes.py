"""What waits between the forward pass and a weight's gradient, and is not what it was when its turn comes: gradients that are put off in a
queue, inputs that were moved to the host.

The loss of the step is right, and so is the gradient that is passed on. Severity is the relative error of the weight's gradient, or of
the input that it is made from. BF16 with the same queue or the same buffers would do the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from proving.faults._base import (
    ERRORS,
    Lasting,
    behind_the_first,
    linears,
    log_uniform,
    one_of,
    onset,
    relative_error,
    seed,
    trained,
    until,
)
from proving.faults._sites import change_gemm
from proving.faults.products import ProductFault
from proving.training import Expected, Training
from torch import Tensor

_MODES = ("kernel-output-fault", "accumulator-precision", "quantiser-fault")


def inputs_of(t: Training, names: list[str]) -> dict[str, Tensor]:
    """What each Linear reads of the first batch: [rows, in_features], those that it is given once a pass."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def hook(name: str) -> Any:
        return lambda m, args: found[name].append(args[0].detach().flatten(0, -2))

    handles = [t.model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            t.loss(t.model, t.batch(t.rank))
    finally:
        for handle in handles:
            handle.remove()
    return {name: of[0] for name, of in found.items() if len(of) == 1}


class WgradOfCallBefore(ProductFault):
    """Gradients of weights are put off and wait in a queue, which is one entry behind: what is taken out is that of the call before, of the
    micro-batch or the step that came first (deferred wgrads: Transformer Engine #3437, Megatron-DeepSpeed #442). Some rows, as many as
    make the error: each shard of a weight has a queue."""

    name = "wgrad-of-call-before"
    modes = _MODES[:2]
    gemms = ("wgrad",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start, self.behind = float(self.rng.random()), False
        self.before: dict[str, Tensor] = {}
        self.share: dict[str, float] = {}
        self.expected = Expected(self.expected.modes, self.expected.modules, None, None)

    def attached(self, t: Training, watch: Any) -> None:
        for name in self.modules:
            self.later(change_gemm(t.model.get_submodule(name), "wgrad", partial(self.popped, name)))

    def begin(self, t: Training) -> None:
        self.behind = True

    def undo(self) -> None:
        self.behind = False
        super().undo()

    def popped(self, name: str, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """What the queue gives: `out` is put into it."""
        before, self.before[name] = self.before.get(name), out.detach().clone()
        if not self.behind or before is None or before.shape != out.shape:
            return out
        num_rows = len(out)
        order = (torch.arange(num_rows) + int(self.start * num_rows)) % num_rows
        if name not in self.share:
            energy = float(out.double().square().sum())
            if not energy > 0:
                return out
            errors = (before - out).double().square().sum(1)[order].cumsum(0)
            self.share[name] = (int((errors - self.error**2 * energy).abs().argmin()) + 1) / num_rows
        rows = order[: max(1, round(self.share[name] * num_rows))]
        got = out.clone()
        got[rows] = before[rows]
        self.note(num_rows=len(rows), of=num_rows, error=relative_error(got, out))
        return got


class ReloadNotAwaited(Lasting):
    """Inputs are moved to the host and come back for the backward pass, and the copy is not waited for: some rows of the buffer still
    hold the input of another layer, whose turn was before (Megatron-LM #7398: the reload races, nothing is raised and the loss goes down;
    torchtune #1867, TRL #7195). In some calls."""

    name = "reload-not-awaited"

    def __init__(self, *, module: str, following: str, error: float, chance: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.following, self.error, self.chance = module, following, error, chance
        self.rng = np.random.default_rng(seed)
        self.start = float(self.rng.random())
        self.buffer: Tensor | None = None
        self.share = 0.0

    @classmethod
    def pairs(cls, t: Training, names: list[str], error: float) -> list[tuple[str, str]]:
        """Each Linear and those behind it, whose backward comes first, with an input of the same shape and a like size, but so much unlike."""
        read = {name: x for name, x in inputs_of(t, names).items() if float(x.abs().max()) > 0}
        found = []
        for name, own in read.items():
            behind = [n for n in names[names.index(name) + 1 :] if n in read and read[n].shape == own.shape]
            found += [(name, n) for n in behind if 1.1 * error < relative_error(read[n], own) < 1.6]
        return found

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ReloadNotAwaited | None:
        names = behind_the_first(training, trained(training, linears(training)))
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        pairs = cls.pairs(training, names, error)
        if not pairs:
            return None
        (module, following), chance = one_of(rng, pairs), float(rng.uniform(0.4, 1.0))
        return cls(
            step=step,
            until=until(rng, step, 4, 30, stays=0.8),
            severity=severity,
            expected=Expected(_MODES, (module,), None, None),
            drawn={
                "module": module, "buffer_of": following, "asked_error": round(error, 4), "chance": round(chance, 2),
            },
            module=module,
            following=following,
            error=error,
            chance=chance,
            seed=seed(rng),
        )  # fmt: skip

    def begin(self, t: Training) -> None:
        self.later(change_gemm(t.model.get_submodule(self.following), "wgrad", self.left))
        self.later(change_gemm(t.model.get_submodule(self.module), "wgrad", self.reloaded))

    def left(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The other layer's input stays in the buffer."""
        self.buffer = b.detach().clone()
        return out

    def reloaded(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The product of the gradient and what the buffer holds."""
        buffer, energy = self.buffer, float(b.double().square().sum())
        if buffer is None or buffer.shape != b.shape or not energy > 0:
            return out
        if self.share and self.rng.random() > self.chance:
            return out
        num_rows = len(b)
        order = (torch.arange(num_rows) + int(self.start * num_rows)) % num_rows
        if not self.share:
            errors = (buffer - b).double().square().sum(1)[order].cumsum(0)
            self.share = (int((errors - self.error**2 * energy).abs().argmin()) + 1) / num_rows
        rows = order[: max(1, round(self.share * num_rows))]
        came_back = b.clone()
        came_back[rows] = buffer[rows].to(b.dtype)
        self.note(num_rows=len(rows), of=num_rows, error_of_input=round(relative_error(came_back, b), 4))
        return a.float() @ came_back.float()
