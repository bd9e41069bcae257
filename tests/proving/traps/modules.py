"""Healthy events of parts of a model: frozen and unfrozen, dropout, a router that collapses and heals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from proving.training import Training, Trap
from proving.traps._base import Spanned
from torch import Tensor, nn


class Frozen(Spanned):
    """The first block is frozen for a while, then trained again."""

    name = "frozen-and-unfrozen"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        # DDP and peft decide at the start what is trained
        if "blocks" not in training.notes or training.world_size > 1 or "adapter" in training.notes:
            return None
        return super().draw(rng, training)

    def _set(self, t: Training, trained: bool) -> None:
        for p in t.model.get_submodule(t.notes["blocks"][0]).parameters():
            p.requires_grad_(trained)

    def begin(self, t: Training) -> None:
        self._set(t, False)

    def end(self, t: Training) -> None:
        self._set(t, True)


class FrozenEmbedding(Trap):
    """The embedding is frozen from the start, as in many fine-tunings."""

    name = "frozen-embedding"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if "embedding" not in training.notes or training.world_size > 1 or "adapter" in training.notes:
            return None
        return cls(step=0)

    def started(self, t: Training) -> None:
        for p in t.model.get_submodule(t.notes["embedding"][0]).parameters():
            p.requires_grad_(False)


class RouterHeals(Spanned):
    """For some steps the router sends nearly all to one expert, then the balance comes back."""

    name, shortest, longest = "router-collapse-heals", 3, 10

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        return super().draw(rng, training) if "router" in training.notes else None

    def begin(self, t: Training) -> None:
        router = t.model.get_submodule(t.notes["router"][0])
        assert isinstance(router.weight, Tensor)
        with torch.no_grad():
            self.kept = router.weight.clone()
            router.weight[0] += 0.1 * router.weight.norm() / math.sqrt(router.weight.shape[1])

    def end(self, t: Training) -> None:
        router = t.model.get_submodule(t.notes["router"][0])
        assert isinstance(router.weight, Tensor)
        with torch.no_grad():
            router.weight.copy_(self.kept)


class DropoutToggled(Spanned):
    """Dropout on the embedding is switched on, and off again."""

    name = "dropout-toggled"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        return super().draw(rng, training) if "embedding" in training.notes else None

    def begin(self, t: Training) -> None:
        def drop(module: nn.Module, args: Any, out: Any) -> Any:
            return nn.functional.dropout(out, 0.1, module.training) if isinstance(out, Tensor) else out

        self.handle = t.model.get_submodule(t.notes["embedding"][0]).register_forward_hook(drop)

    def end(self, t: Training) -> None:
        self.handle.remove()
