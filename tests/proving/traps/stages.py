"""Healthy stages of a training that was planned so: the rate goes down to nothing, batches grow, a frozen part is let go, targets are smoothed,
inputs are masked, batches in which little is scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from proving.data import IGNORED, generator
from proving.training import Training, Trap
from proving.traps._base import Simple, moment
from torch import Tensor


class CooldownToZero(Trap):
    """From a step on the rate goes down to nothing along a line or a root, and stays there, as at the end of a constant schedule."""

    name = "cooldown-to-zero"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.schedule is None:
            return None
        made = cls(step=moment(rng, training))
        made.length, made.power = int(rng.integers(20, 45)), float(rng.choice([0.5, 1.0]))
        made.drawn.update(length=made.length, power=made.power)
        return made

    def before_attach(self, t: Training) -> None:
        usual = t.schedule
        assert usual is not None
        t.schedule = lambda step: (
            usual(step) * max(0.0, 1 - max(0, step - self.step + 1) / self.length) ** self.power
            if step >= self.step
            else usual(step)
        )


class BatchRamped(Trap):
    """Batches begin at a quarter of their rows and double twice on the way, as large runs do."""

    name = "batch-ramped"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        batch = training.batch(0)
        if training.family == "rl" or len(next(iter(batch.values()))) < 4:
            return None
        made = cls(step=moment(rng, training))
        made.first = int(rng.integers(20, made.step - 15)) if made.step > 40 else made.step
        made.drawn["first"] = made.first
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        num = len(next(iter(batch.values())))
        kept = num if step >= self.step else num // 2 if step >= self.first else num // 4
        return {name: value[: max(2, kept)] for name, value in batch.items()}


class UnfrozenLate(Simple):
    """The first block and the embedding are frozen from the start and trained from a step on, as in gradual unfreezing."""

    name = "unfrozen-late"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        # DDP and peft decide at the start what is trained
        if "blocks" not in training.notes or training.world_size > 1 or "adapter" in training.notes:
            return None
        return cls(step=moment(rng, training))

    def _set(self, t: Training, trained: bool) -> None:
        for name in (t.notes["blocks"][0], *t.notes.get("embedding", ())[:1]):
            for p in t.model.get_submodule(name).parameters():
                p.requires_grad_(trained)

    def started(self, t: Training) -> None:
        self._set(t, False)

    def at(self, t: Training) -> None:
        self._set(t, True)


class SmoothingBegins(Simple):
    """Targets are smoothed from a step on: the loss is another one, and larger."""

    name = "label-smoothing-begins"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if not (training.notes.get("tokens") or training.notes.get("classes")) or "noise" in training.batch(0):
            return None
        made = cls(step=moment(rng, training))
        made.smoothing = float(rng.uniform(0.05, 0.15))
        made.drawn["smoothing"] = round(made.smoothing, 3)
        return made

    def at(self, t: Training) -> None:
        self.usual = F.cross_entropy

        def smoothed(*args: Any, **kwargs: Any) -> Tensor:
            return self.usual(*args, **(kwargs | {"label_smoothing": self.smoothing}))

        F.cross_entropy = smoothed

    def undo(self) -> None:
        if hasattr(self, "usual"):
            F.cross_entropy = self.usual


class MaskingBegins(Trap):
    """From a step on bands of the input are masked, as augmentation does: of a signal a stretch of its channels, of a text some tokens."""

    name = "input-masking-begins"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        batch = training.batch(0)
        if not ({"frames", "pixels"} & set(batch) or training.notes.get("tokens")) or "noise" in batch:
            return None
        share = float(rng.uniform(0.08, 0.2))
        made = cls(step=moment(rng, training), drawn={"share": round(share, 3)})
        made.share, made.seed = share, int(rng.integers(1 << 20))
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step:
            return batch
        random = generator(self.seed, step)
        name = next((n for n in ("frames", "pixels", "input_ids") if n in batch), "input_ids")
        x = batch[name]
        if name == "input_ids":
            return batch | {name: x.masked_fill(torch.rand(x.shape, generator=random) < self.share, 0)}
        width = max(1, round(self.share * x.shape[-1]))
        first = torch.randint(0, x.shape[-1] - width + 1, (len(x), *[1] * (x.ndim - 1)), generator=random)
        band = torch.arange(x.shape[-1])
        return batch | {name: x.masked_fill((band >= first) & (band < first + width), float(x.mean()))}


class LittleScored(Trap):
    """Now and then a batch in which only a few tokens are scored: long prompts, short answers."""

    name = "little-scored"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        batch = training.batch(0)
        if not training.notes.get("tokens") or "labels" not in batch or batch["labels"].ndim != 2:
            return None
        made = cls(step=moment(rng, training))
        made.seed, made.chance = int(rng.integers(1 << 31)), float(rng.uniform(0.15, 0.4))
        made.drawn["chance"] = round(made.chance, 3)
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step or (step > self.step and np.random.default_rng([self.seed, step]).random() > self.chance):
            return batch
        labels = batch["labels"]
        few = torch.rand(labels.shape, generator=generator(self.seed % 1000, step)) < 0.05
        few[0] |= not bool((labels[few] != IGNORED).any())
        return batch | {"labels": labels.masked_fill(~few, IGNORED)}
