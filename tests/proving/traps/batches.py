"""Healthy events of the data: other sizes and lengths, other domains, a second epoch, losses of a heavy tail."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.data import next_bytes
from proving.training import Training, Trap
from proving.traps._base import moment
from torch import Tensor


def pooled(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Several micro-batches as one."""
    return {name: torch.cat([b[name] for b in batches]) for name in batches[0]}


class BatchChanged(Trap):
    """Twice the rows in a batch, or half."""

    name = "batch-size-changed"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.family == "rl":
            return None
        twice = bool(rng.integers(2))
        made = cls(step=moment(rng, training), drawn={"twice": twice})
        made.twice = twice
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step:
            return batch
        if not self.twice:
            return {name: value[: len(value) // 2] for name, value in batch.items()}
        return pooled([batch, t.batch(10_000_000 + step * t.world_size + t.rank)])


class LengthChanged(Trap):
    """Shorter sequences from a step on, as at the end of a curriculum stage."""

    name = "length-changed"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if not (training.notes.get("tokens") and training.notes.get("causal")):
            return None
        share = float(rng.uniform(0.4, 0.8))
        made = cls(step=moment(rng, training), drawn={"share": share})
        made.share = share
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step:
            return batch
        return {name: value[:, : int(self.share * value.shape[1])] for name, value in batch.items()}


class MixedLengths(Trap):
    """Every batch has another length."""

    name = "mixed-lengths"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if not (training.notes.get("tokens") and training.notes.get("causal")):
            return None
        made = cls(step=0)
        made.seed = int(rng.integers(1 << 31))
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        share = float(np.random.default_rng([self.seed, step]).uniform(0.3, 1.0))
        return {name: value[:, : max(8, int(share * value.shape[1]))] for name, value in batch.items()}


class DomainSwitched(Trap):
    """From a step on the text is of another kind: upper case, as of another corpus."""

    name = "domain-switched"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        return cls(step=moment(rng, training)) if training.notes.get("tokens") else None

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step:
            return batch

        def upper(tokens: Tensor) -> Tensor:
            return torch.where((tokens >= 97) & (tokens <= 122), tokens - 32, tokens)

        return batch | {"input_ids": upper(batch["input_ids"]), "labels": upper(batch["labels"])}


class DomainsMixed(Trap):
    """Every few steps a batch of another kind: data sources are mixed by batch."""

    name = "domains-mixed"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if not (training.notes.get("tokens") and training.notes.get("causal")):
            return None
        made = cls(step=0)
        made.seed, made.share = int(rng.integers(1 << 31)), float(rng.uniform(0.1, 0.4))
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if np.random.default_rng([self.seed, step]).random() > self.share:
            return batch
        rows, tokens = batch["input_ids"].shape
        other = next_bytes(self.seed, rows, tokens, (0.9, 1.0))(step)
        return batch | {name: other[name] for name in ("input_ids", "labels")}


class EpochBoundary(Trap):
    """The data begins again: the batches of the first steps come a second time."""

    name = "epoch-boundary"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        return None if training.family == "rl" else cls(step=moment(rng, training))

    def before_attach(self, t: Training) -> None:
        usual, length = t.batch, self.step * t.accumulate * t.world_size
        t.batch = lambda number: usual(number % length)


class TinyGradients(Trap):
    """Late in training: the learning rate is small, and a well-learnt, repeated batch gives small gradients."""

    name = "tiny-gradients"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.notes.get("classes") is None or training.family == "diffusion":
            return None
        made = cls(step=int(rng.integers(20, 40)))
        made.pool = int(rng.integers(1, 4))
        return made

    def before_attach(self, t: Training) -> None:
        usual, edge = t.batch, self.step * t.accumulate * t.world_size
        t.batch = lambda number: usual(number if number < edge else edge + number % self.pool)


class SpikyLoss(Trap):
    """Losses of a heavy tail, as rewards have: each step's loss is scaled by a log-normal number."""

    name = "spiky-loss"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        made = cls(step=0)
        made.seed, made.sigma = int(rng.integers(1 << 31)), float(rng.uniform(0.3, 0.7))
        made.drawn["sigma"] = made.sigma
        return made

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        return loss * float(np.exp(np.random.default_rng([self.seed, step]).normal() * self.sigma))
