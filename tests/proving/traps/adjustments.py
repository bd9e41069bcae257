"""Healthy things that a person adjusts while a training runs: clipping, groups of parameters, cycles of the rate, averages that
become the weights, rows that hold two documents."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from proving.data import IGNORED
from proving.training import Training, Trap
from proving.traps._base import Simple, moment
from torch import Tensor


class ClippingTightened(Simple):
    """Gradients are clipped to a third of what was allowed, or less, on purpose."""

    name = "clipping-tightened"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.clip_norm is None and training.clip_value is None:
            return None
        share = float(rng.uniform(0.1, 0.35))
        made = cls(step=moment(rng, training), drawn={"share": share})
        made.share = share
        return made

    def at(self, t: Training) -> None:
        t.clip_norm = None if t.clip_norm is None else self.share * t.clip_norm
        t.clip_value = None if t.clip_value is None else self.share * t.clip_value


class GroupAdded(Simple):
    """Some parameters leave their group for one of their own, with half or twice the rate: the head, or the last block."""

    name = "param-group-added"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.world_size > 1 or "adapter" in training.notes:
            return None
        times = float(rng.choice([0.5, 2.0]))
        made = cls(step=moment(rng, training), drawn={"times": times})
        made.times = times
        return made

    def at(self, t: Training) -> None:
        where = t.notes.get("blocks") or t.notes["linears"]
        own = {id(p) for p in t.model.get_submodule(where[-1]).parameters()}
        for group in list(t.optimizer.param_groups):
            moved = [p for p in group["params"] if id(p) in own]
            if moved and len(moved) < len(group["params"]):
                group["params"] = [p for p in group["params"] if id(p) not in own]
                changed = {"lr_scale": self.times * group.get("lr_scale", 1.0), "lr": self.times * group["lr"]}
                t.optimizer.add_param_group({**group, "params": moved, **changed})


class RateInCycles(Trap):
    """From a step on the rate goes in cycles: from what it was down to a tenth along a cosine, and back at once."""

    name = "rate-in-cycles"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.schedule is None:
            return None
        made = cls(step=moment(rng, training))
        made.length = int(rng.integers(8, 25))
        made.drawn["length"] = made.length
        return made

    def before_attach(self, t: Training) -> None:
        usual = t.schedule
        assert usual is not None

        def rate(step: int) -> float:
            if step < self.step:
                return usual(step)
            done = (step - self.step) % self.length / self.length
            return usual(step) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

        t.schedule = rate


class AveragesWrittenBack(Trap):
    """Every few steps the average of the last weights becomes the weights, as in stochastic weight averaging."""

    name = "averages-written-back"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.world_size > 1:
            return None
        made = cls(step=moment(rng, training))
        made.every = int(rng.integers(4, 13))
        made.drawn["every"] = made.every
        return made

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        since = (step - self.step) % self.every
        if step < self.step:
            return
        weights = [p for p in t.model.parameters() if p.requires_grad]
        if since == 0:
            self.average = [p.clone() for p in weights]
            return
        for average, p in zip(self.average, weights, strict=True):
            average.lerp_(p, 1 / (since + 1))
        if since == self.every - 1:
            for average, p in zip(self.average, weights, strict=True):
                p.copy_(average)


class PackingBegins(Trap):
    """From a step on a row holds the ends of two documents; the seam is not scored."""

    name = "packing-begins"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if not (training.notes.get("tokens") and training.notes.get("causal")):
            return None
        share = float(rng.uniform(0.25, 0.75))
        made = cls(step=moment(rng, training), drawn={"share": share})
        made.share = share
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step:
            return batch
        edge = int(self.share * batch["labels"].shape[1])
        packed: dict[str, Tensor] = {n: torch.cat((v[:, :edge], v.roll(1, 0)[:, edge:]), 1) for n, v in batch.items()}
        packed["labels"][:, edge - 1] = IGNORED
        return packed
