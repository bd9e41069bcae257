"""Weights that are put together from elsewhere, and not all of them from the same moment: an average over workers of which one is missing,
shards of an older checkpoint.

Severity is how much of the weights an average takes away, or in how many modules, and how old the shards are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    Lasting,
    log_uniform,
    one_of,
    onset,
    relative_error,
    role,
    some_of,
    trained,
    until,
)
from proving.faults.resume import _Resumed
from proving.training import Expected, Training
from torch import Tensor, nn

_KEPT = "kept_for_later"
"""In the optimizer's first group: what the older checkpoint holds. A leg is a process of its own, and a checkpoint is all that is handed on."""


class AbsentWorkerAveraged(Lasting):
    """Workers train by themselves and take the average of their weights every few steps; one of them does not answer, its share is zeros,
    and the sum is divided by all of them (averages over what some ranks do not have: pytorch #74157). Each time all weights, gains and
    biases become smaller by the same share."""

    name = "absent-worker-averaged"
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.004, 0.015),
        "medium": (0.015, 0.06),
        "severe": (0.06, 0.25),
    }

    def __init__(self, *, share: float, every: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share, self.every = share, every

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> AbsentWorkerAveraged | None:
        step, share = onset(rng, training), log_uniform(rng, *cls.shares[severity])
        num_workers, every = max(4, round(1 / share)), int(rng.integers(3, 12))
        return cls(
            step=step,
            until=until(rng, step, 12, 40, stays=0.7),
            severity=severity,
            expected=Expected(("silent-data-corruption", "optimizer-divergence", "scalar-shift"), None, None, False),
            drawn={"num_workers": num_workers, "every": every},
            share=1 / num_workers,
            every=every,
        )

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if self.active(step) and (step - self.step) % self.every == 0:
            for p in t.model.parameters():
                if p.requires_grad:
                    p.mul_(1 - self.share)


class ShardsOfOlderSave(_Resumed):
    """Not all shards of a checkpoint are of the step that it says: one rank could not save and goes on from the files of the save before
    (composer #2146: a silent error; dlrover #972). Weights and biases of some Linears are those of some steps ago; their moments are as
    old, or are those of the step."""

    name = "shards-of-older-save"
    ages: ClassVar[dict[str, tuple[int, int]]] = {"mild": (10, 20), "medium": (20, 40), "severe": (40, 65)}

    def __init__(self, *, modules: list[str], age: int, moments_too: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.age, self.moments_too = modules, age, moments_too

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ShardsOfOlderSave | None:
        names = [
            n
            for n in trained(training, role(training, "linears"))
            if isinstance(training.model.get_submodule(n), nn.Linear)
        ]
        if len(names) < 4 or training.resume_at or training.world_size > 1:
            return None
        num = {"mild": (1, 1), "medium": (2, len(names) // 2), "severe": (len(names) // 2, len(names) - 1)}[severity]
        modules, step = some_of(rng, names, *num), onset(rng, training)
        low, high = cls.ages[severity]
        age = min(step, int(rng.integers(low, high + 1)))
        return cls(
            step=step,
            severity=severity,
            expected=Expected(
                ("silent-data-corruption", "recipe-mismatch", "scalar-shift"), tuple(modules), None, False
            ),
            drawn={"module": modules[0], "num_modules": len(modules), "age": age},
            modules=modules,
            age=age,
            moments_too=one_of(rng, (True, False)),
        )

    def _concerned(self, t: Training) -> dict[str, nn.Parameter]:
        known = {f"{name}.{of}" for name in self.modules for of in ("weight", "bias")}
        return {name: p for name, p in t.model.named_parameters() if name in known}

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        if not self.resumed and step == self.step - self.age:
            t.optimizer.param_groups[0][_KEPT] = {
                name: {
                    "weight": p.detach().clone(),
                    "moments": {
                        k: v.clone()
                        for k, v in t.optimizer.state.get(p, {}).items()
                        if isinstance(v, Tensor) and v.ndim
                    },
                }
                for name, p in self._concerned(t).items()
            }

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state["optimizer"]["param_groups"]]
        older: dict[str, Any] = groups[0].pop(_KEPT, {})
        weights = {name: of["weight"] for name, of in older.items()}
        if weights:
            now = torch.cat([state["model"][name].flatten() for name in weights])
            self.note(
                error=round(relative_error(torch.cat([w.flatten() for w in weights.values()]), now), 4),
                moments=str(self.moments_too),
            )
        moments = dict(state["optimizer"]["state"])
        if self.moments_too:
            given = {id(p): name for name, p in t.model.named_parameters()}
            order = [given.get(id(p)) for group in t.optimizer.param_groups for p in group["params"]]
            for i, name in enumerate(order):
                if name in older and i in moments:
                    moments[i] = moments[i] | older[name]["moments"]
        optimizer = state["optimizer"] | {"state": moments, "param_groups": groups}
        return state | {"model": state["model"] | weights, "optimizer": optimizer}
