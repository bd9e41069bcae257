"""What all faults share: when they begin and end, how everything is put back, and how numbers are drawn.

Severity is that of the effect, never of the knob. Where a GEMM is wrong the effect is the relative error of what it reads
or gives, ‖wrong − right‖/‖right‖, in the bands of ERRORS; the quantisation to E4M3 itself costs 0.03. A fault first draws
its effect from the band of its severity and then computes the knob that gives it: half of the rows zeroed is an error of
√½. Faults of another kind (learning rate, data) say in their own file what their effect is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from proving.training import Fault, Training
from torch import Tensor, nn

ERRORS: dict[str, tuple[float, float]] = {"mild": (0.05, 0.15), "medium": (0.15, 0.5), "severe": (0.5, 1.0)}
"""Relative error of what a GEMM reads or gives."""

T = TypeVar("T")


class Lasting(Fault):
    """A fault that begins before `step` and is put right before `until`.

    Subclasses say in `begin` what is done, and leave with `later` how it is undone.
    """

    name: ClassVar[str]
    generator: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.generator = cls.__module__.rpartition(".")[2]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._undo: list[Callable[[], object]] = []
        self._begun = False

    def before_step(self, t: Training, step: int) -> None:
        if self.until is not None and step >= self.until:
            self.undo()
        elif not self._begun and self.active(step):
            self._begun = True
            self.begin(t)

    def begin(self, t: Training) -> None:
        """Put the fault in: once, before the first wrong step."""

    def later(self, undo: Callable[[], object]) -> None:
        """Call this when the fault ends; the last that was given comes first."""
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def note(self, **values: float | int | str) -> None:
        """Write down what was measured, the first time."""
        for name, value in values.items():
            self.drawn.setdefault(name, value)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """A positive number, each octave of [low, high] alike."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def one_of(rng: np.random.Generator, items: Sequence[T]) -> T:
    """One of them, each alike."""
    return items[int(rng.integers(len(items)))]


def some_of(rng: np.random.Generator, items: Sequence[T], least: int, most: int) -> list[T]:
    """Between `least` and `most` of them, in their own order."""
    n = int(rng.integers(min(least, len(items)), min(most, len(items)) + 1))
    return [items[i] for i in sorted(rng.choice(len(items), size=n, replace=False))]


def onset(rng: np.random.Generator, t: Training) -> int:
    """A first wrong step."""
    first, last = t.onset
    return int(rng.integers(first, last + 1))


def until(rng: np.random.Generator, step: int, shortest: int, longest: int, stays: float = 0.0) -> int | None:
    """First step at which all is right again, None with the probability `stays`; short durations are more frequent."""
    if rng.random() < stays:
        return None
    return step + max(1, round(log_uniform(rng, shortest, longest)))


def seed(rng: np.random.Generator) -> int:
    """Of a generator that a fault uses while the training runs."""
    return int(rng.integers(1 << 31))


def role(t: Training, *names: str) -> list[str]:
    """Modules with any of these roles, in the order of the notes; empty where the model has none."""
    return [str(m) for name in names for m in t.notes.get(name, ())]


def trained(t: Training, names: Sequence[str]) -> list[str]:
    """Those whose weight is trained."""
    modules = ((name, t.model.get_submodule(name)) for name in names)
    return [name for name, m in modules if isinstance(getattr(m, "weight", None), Tensor) and m.weight.requires_grad]


def linears(t: Training) -> list[str]:
    """Linears whose GEMMs compute in FP8 on fp8watch's own path: those whose sizes a kernel takes."""
    if t.recipe == "observe":
        return []
    modules = ((name, t.model.get_submodule(name)) for name in role(t, "linears"))
    return [n for n, m in modules if isinstance(m, nn.Linear) and not m.in_features % 16 and not m.out_features % 16]


def has_adam(t: Training) -> bool:
    """Whether the optimizer keeps Adam's moments."""
    return isinstance(t.optimizer, torch.optim.Adam | torch.optim.AdamW)


def parent(names: Sequence[str]) -> tuple[str, ...]:
    """The modules that hold these, once each."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def behind_the_first(t: Training, names: list[str]) -> list[str]:
    """Those that pass a gradient on: not in the first block, whose input may need none."""
    blocks = role(t, "blocks")
    if len(blocks) > 1:
        behind = [n for n in names if any(n == b or n.startswith(f"{b}.") for b in blocks[1:])]
        if behind:
            return behind
    return names[1:]


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """From now on a module in training reads `change(x)` in place of its first argument; returns how to undo that."""

    def hook(m: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not m.training or not args or not isinstance(args[0], Tensor):
            return None
        return (change(args[0]), *args[1:])

    return module.register_forward_pre_hook(hook).remove


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """From now on a module in training returns `change(y)` for its output, or the first tensor of it."""

    def hook(m: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if not m.training:
            return None
        if isinstance(out, Tensor):
            return change(out)
        if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
            return (change(out[0]), *out[1:])
        return None

    return module.register_forward_hook(hook).remove


def with_gradient(x: Tensor, changed: Tensor) -> Tensor:
    """A tensor with the values of `changed` through which gradients pass as through x."""
    return x + (changed - x).detach()


def relative_error(wrong: Tensor, right: Tensor) -> float:
    """‖wrong − right‖/‖right‖; Inf where the wrong one is not finite."""
    energy = float(right.double().square().sum())
    error = float((wrong.double() - right.double()).square().sum())
    return math.sqrt(error / energy) if energy > 0 and math.isfinite(error) else math.inf
