"""Healthy things that are done between steps: restarts, evaluation, generation, averages of the weights."""

from __future__ import annotations

import copy

import numpy as np
import torch
from proving.training import Training, Trap
from proving.traps._base import moment


class Restart(Trap):
    """A checkpoint, a new process, and everything goes on: nothing has changed."""

    name, resumes = "restart", True

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        return None if training.world_size > 1 else cls(step=moment(rng, training))


class Evaluation(Trap):
    """Every few steps an evaluation on other data: no gradients, eval mode."""

    name = "evaluation-between"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.family == "rl":
            return None
        made = cls(step=int(rng.integers(5, 15)))
        made.every = int(rng.integers(7, 25))
        return made

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if step >= self.step and step % self.every == 0:
            t.model.eval()
            for k in range(3):
                t.loss(t.model, t.batch(20_000_000 + 3 * step + k))
            t.model.train()


class TrainModeEvaluation(Trap):
    """An evaluation by somebody who forgot `model.eval()`, on noise: forward passes in training mode without a step."""

    name = "evaluation-in-train-mode"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.family == "rl":
            return None
        made = cls(step=moment(rng, training))
        made.every = int(rng.integers(10, 25))
        return made

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if step >= self.step and step % self.every == 0:
            t.loss(t.model, t.batch(30_000_000 + step))


class Generation(Trap):
    """Now and then some text is written token by token, in eval mode."""

    name = "generation-between"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.family not in ("llama", "delayed", "accumulate", "resume", "moe", "ssm", "fp16"):
            return None
        made = cls(step=moment(rng, training))
        made.every = int(rng.integers(10, 25))
        return made

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if step >= self.step and step % self.every == 0:
            t.model.eval()
            tokens = t.batch(40_000_000 + step)["input_ids"][:1, :4]
            for _ in range(12):
                tokens = torch.cat((tokens, t.model(tokens)[:, -1:].argmax(-1)), 1)
            t.model.train()


class AverageSwapped(Trap):
    """An exponential average of the weights takes their place for an evaluation; then they come back."""

    name = "ema-swapped"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.family == "rl":
            return None
        made = cls(step=moment(rng, training))
        made.every = int(rng.integers(10, 30))
        return made

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        weights = t.model.state_dict()
        if step == 0:
            self.average = copy.deepcopy(weights)
        for name, value in weights.items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 0.05)
        if step >= self.step and step % self.every == 0:
            kept = copy.deepcopy(weights)
            t.model.load_state_dict(self.average)
            t.model.eval()
            t.loss(t.model, t.batch(50_000_000 + step))
            t.model.train()
            t.model.load_state_dict(kept)
