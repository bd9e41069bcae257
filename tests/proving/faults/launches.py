"""Launches that do not fit what was saved or planned: pieces of a checkpoint that are put together in the wrong order, a schedule that ends
before the run does.

Severity is in how many modules, or how far the rate comes against the one that was right.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, log_uniform, one_of, onset, role, some_of, trained, until
from proving.faults.resume import _Resumed
from proving.training import Expected, Training
from torch import Tensor, nn

_MODES = ("recipe-mismatch", "silent-data-corruption", "scalar-shift", "optimizer-divergence")
_RANKS = (12, 16, 24, 32)


class ShardsSortedByName(_Resumed):
    """Files of shards are sorted as text, and that of rank 10 comes before that of rank 2 (DeepSpeed #5342: optimizer states are merged
    silently in the order 10, 11, 9; #1381, #8452: `model_100` before `model_11`): blocks of rows are in another order. Weights and
    biases of some Linears, or of all; the moments are in the order that was, or are sorted alike."""

    name = "shards-sorted-by-name"

    def __init__(self, *, modules: list[str], num_ranks: int, moments_too: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.num_ranks, self.moments_too = modules, num_ranks, moments_too

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ShardsSortedByName | None:
        num_ranks = one_of(rng, _RANKS)
        names = [
            n
            for n in trained(training, role(training, "linears"))
            if isinstance(m := training.model.get_submodule(n), nn.Linear) and m.out_features >= num_ranks
        ]
        if len(names) < 3 or training.resume_at:
            return None
        how = {"mild": [one_of(rng, names)], "medium": some_of(rng, names, 2, max(2, len(names) // 2)), "severe": names}
        modules = how[severity]
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(_MODES, tuple(modules), None, False),
            drawn={"num_ranks": num_ranks, "module": modules[0], "num_modules": len(modules)},
            modules=modules,
            num_ranks=num_ranks,
            moments_too=bool(rng.random() < 0.5),
        )

    def sorted(self, x: Tensor) -> Tensor:
        """Rows [M, …] as the files' names sort: the first shards are the larger ones where M does not divide evenly."""
        shards = torch.tensor_split(x, self.num_ranks)
        order = sorted(range(self.num_ranks), key=str)
        return torch.cat([shards[rank] for rank in order])

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        self.note(moments=str(self.moments_too))
        concerned = {f"{name}.{of}" for name in self.modules for of in ("weight", "bias")}
        model = {k: self.sorted(v) if k in concerned else v for k, v in state["model"].items()}
        if not self.moments_too:
            return state | {"model": model}
        given = {id(p): name for name, p in t.model.named_parameters()}
        order = [given.get(id(p)) for group in t.optimizer.param_groups for p in group["params"]]
        moments = {
            i: {k: self._alike(v) for k, v in of.items()} if order[i] in concerned else of
            for i, of in state["optimizer"]["state"].items()
            if i < len(order)
        }
        return state | {"model": model, "optimizer": state["optimizer"] | {"state": moments}}

    def _alike(self, value: Any) -> Any:
        """Moments are as long as their weight; a count of steps is one number."""
        return self.sorted(value) if isinstance(value, Tensor) and value.ndim else value


class RateBelowZero(Lasting):
    """The rate is a line down to zero that nobody stops there, and the run is longer than was planned: each step goes uphill, a little faster
    than the one before (finetune-anything #57: a linear schedule with another number of epochs gives negative rates, and the loss
    explodes). `of_rate` is what part of the rate of the whole schedule is reached, with the other sign, after
    as many steps as `steps` says; there it stays."""

    name = "rate-below-zero"
    parts: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.004, 0.02),
        "medium": (0.02, 0.1),
        "severe": (0.1, 2.0),
    }

    def __init__(self, *, part: float, num_steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.part, self.num_steps = part, num_steps
        self.usual: list[float] | None = None
        """Rates of a training that sets none itself."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RateBelowZero | None:
        step, part = onset(rng, training), log_uniform(rng, *cls.parts[severity])
        num_steps = int(rng.integers(5, 25))
        return cls(
            step=step,
            until=until(rng, step, 15, 40, stays=0.8),
            severity=severity,
            expected=Expected(("optimizer-divergence", "scalar-shift"), None, None, False),
            drawn={"of_rate": round(part, 3), "steps": num_steps},
            part=part,
            num_steps=num_steps,
        )

    def factor(self, step: int) -> float:
        """By what the right rate is multiplied."""
        if not self.active(step):
            return 1.0
        return -self.part * min(1.0, (step - self.step + 1) / self.num_steps)

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        if not self.active(step):
            return
        groups = t.optimizer.param_groups
        if t.schedule is None and self.usual is None:
            self.usual = [group["lr"] for group in groups]
            self.later(lambda: self._put_back(t))
        for i, group in enumerate(groups):
            usual = group["lr"] if self.usual is None else self.usual[i]
            group["lr"] = usual * self.factor(step)

    def _put_back(self, t: Training) -> None:
        for group, usual in zip(t.optimizer.param_groups, self.usual or (), strict=False):
            group["lr"] = usual
        self.usual = None
