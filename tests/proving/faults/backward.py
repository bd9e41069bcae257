"""Gradients that are those of something else: of steps before, of a buffer that is not written any more, of a recomputed forward pass
that is not the one whose loss is plotted.

Severity is for how long, in how many modules, or how far off what is recomputed is.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import ERRORS, Lasting, linears, log_uniform, one_of, onset, role, some_of, trained, until
from proving.training import Expected, Training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class GradientsNotZeroed(Lasting):
    """`zero_grad` is left out for some steps or from now on (torchforge #71, tt-blacksmith #711, llm.c #548): each update is that of
    the sum of all gradients since. Severity is for how many steps."""

    name = "gradients-not-zeroed"
    lasts: ClassVar[dict[str, tuple[int, int]]] = {"mild": (1, 4), "medium": (4, 13), "severe": (13, 41)}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientsNotZeroed | None:
        step, num_steps = onset(rng, training), int(rng.integers(*cls.lasts[severity]))
        return cls(
            step=step,
            until=step + num_steps,
            severity=severity,
            expected=Expected(("scalar-shift", "optimizer-divergence"), None, None, False),
            drawn={"num_steps": num_steps},
        )

    def begin(self, t: Training) -> None:
        optimizer = t.optimizer
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        self.later(lambda: optimizer.__dict__.pop("zero_grad", None))


class GradientBufferLeft(Lasting):
    """The optimizer reads a gradient buffer that is not written any more: a bucket of an overlapped reduction whose index is not
    swapped (DeepSpeed #7188, #7805, #8061). Its modules get the gradient of one step again and again. Severity is the share of the
    modules."""

    name = "gradient-buffer-left"
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.01, 0.1), "medium": (0.1, 0.4), "severe": (0.4, 1.0)}

    def __init__(self, *, modules: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules = modules
        self.kept: dict[str, Tensor] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientBufferLeft | None:
        names = trained(training, linears(training) or role(training, "linears"))
        if len(names) < 4:
            return None
        num = max(1, round(rng.uniform(*cls.shares[severity]) * len(names)))
        first, step = int(rng.integers(len(names) - num + 1)), onset(rng, training)
        modules = names[first : first + num]  # a bucket holds neighbours
        return cls(
            step=step,
            until=until(rng, step, 8, 30, stays=0.7),
            severity=severity,
            expected=Expected(("silent-data-corruption", "optimizer-divergence"), tuple(modules), None, False),
            drawn={"num_modules": num, "of": len(names), "module": modules[0]},
            modules=modules,
        )

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        for name in self.modules:
            gradient = t.model.get_submodule(name).weight.grad
            if gradient is None:
                continue
            if step == self.step - 1:
                self.kept[name] = gradient.clone()
            elif self.active(step) and name in self.kept:
                gradient.copy_(self.kept[name])


class RecomputeDiffers(Lasting):
    """Activation checkpointing recomputes a block from something else than it was computed from: dropout draws other masks
    (OLMo-core #828, pytorch #190758), or the input that was kept, or taken to the host, has been written over. The loss is that of
    the first forward pass, the gradient is not. Its twin checkpoints too."""

    name, prepares = "recompute-differs", True

    def __init__(self, *, modules: list[str], way: str, error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.way, self.error = modules, way, error
        self.wrong = False

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RecomputeDiffers | None:
        blocks = role(training, "blocks")
        if not blocks or role(training, "router"):  # other rows are sent to other experts: there it is an error
            return None
        drops = [m for m in training.model.get_submodule(blocks[0]).modules() if isinstance(m, nn.Dropout) and m.p > 0]
        ways = ("rows", "dropout") if drops and severity == "medium" else ("rows",)
        modules, way = some_of(rng, blocks, 1, len(blocks)), one_of(rng, ways)
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.7),
            severity=severity,
            expected=Expected(("silent-data-corruption", "recipe-mismatch"), tuple(modules), None, False),
            drawn={"way": way, "asked_error": round(error, 3), "num_modules": len(modules), "module": modules[0]},
            modules=modules,
            way=way,
            error=error,
        )

    def started(self, t: Training) -> None:
        for name in self.modules:
            block = t.model.get_submodule(name)
            block.forward = functools.partial(self._checkpointed, block, block.forward)  # type: ignore[method-assign]
            self.later(functools.partial(block.__dict__.pop, "forward", None))

    def before_step(self, t: Training, step: int) -> None:
        self.wrong = self.active(step)

    def _checkpointed(self, block: nn.Module, forward: Any, *given: Any, **named: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*given, **named)
        num_calls = 0

        def run(*given: Any, **named: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1 or not self.wrong:
                return forward(*given, **named)
            if self.way == "dropout":
                torch.rand(1)  # the generator is somewhere else
                return forward(*given, **named)
            if given:
                return forward(self._overwritten(given[0]), *given[1:], **named)
            first = next(iter(named))
            return forward(**{**named, first: self._overwritten(named[first])})

        return checkpoint(run, *given, use_reentrant=False, **named)

    def _overwritten(self, x: Tensor) -> Tensor:
        """Some rows hold their neighbours: of two unlike rows the error is √2."""
        flat = x.reshape(-1, x.shape[-1])
        num_rows = max(1, round(min(1.0, self.error**2 / 2) * len(flat)))
        return torch.cat((flat.roll(1, 0)[:num_rows], flat[num_rows:])).view_as(x)
