"""Healthy changes of how a training is run: a penalty in the loss, weights that are pruned, rows of tables that are given to others, other
decay rates of the moments, a short batch at the end of each epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.data import generator
from proving.training import Training, Trap
from proving.traps._base import Simple, moment
from torch import Tensor, nn


class PenaltyInTheLoss(Trap):
    """From a step on the loss holds a penalty on the squares of all weights, as a person adds one against overfitting: a few percent of it."""

    name = "penalty-in-the-loss"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        made = cls(step=moment(rng, training))
        made.share, made.weight = float(rng.uniform(0.01, 0.05)), 0.0
        made.drawn["share"] = round(made.share, 3)
        return made

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        if step < self.step:
            return loss
        squares = torch.stack(
            [p.float().square().sum() for p in t.model.parameters() if p.ndim >= 2 and p.requires_grad]
        )
        if not self.weight:
            self.weight = self.share * max(abs(float(loss.detach())), 0.1) / float(squares.sum().detach())
        return loss + self.weight * squares.sum()


class PrunedGradually(Trap):
    """Every few steps some more of the smallest weights of each matrix are set to zero, and kept there, up to a third or a half."""

    name = "pruned-gradually"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.world_size > 1 or "adapter" in training.notes:
            return None
        made = cls(step=moment(rng, training))
        made.most, made.every, made.rounds = float(rng.uniform(0.3, 0.5)), int(rng.integers(3, 7)), 8
        made.drawn |= {"share": round(made.most, 3), "every": made.every}
        made.kept = {}
        return made

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if step < self.step:
            return
        turn, is_turn = divmod(step - self.step, self.every)
        for name in t.notes["linears"]:
            weight = t.model.get_submodule(name).weight
            if not weight.requires_grad:
                continue
            if is_turn == 0 and turn < self.rounds:
                share = self.most * (1 - (1 - (turn + 1) / self.rounds) ** 3)  # fast at first, slower towards the end
                limit = weight.abs().flatten().kthvalue(max(1, int(share * weight.numel()))).values
                self.kept[name] = weight.abs() > limit
            if name in self.kept:
                weight.mul_(self.kept[name])


class RowsGivenToOthers(Trap):
    """Every few steps the rows of a table that were seen least are given to new keys, and begin anew, as hash tables of recommenders do."""

    name = "rows-given-to-others"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        tables = [
            n for n in training.notes.get("embedding", ()) if isinstance(training.model.get_submodule(n), nn.Embedding)
        ]
        if not tables or training.world_size > 1:
            return None
        made = cls(step=moment(rng, training))
        made.tables, made.every = tables, int(rng.integers(3, 9))
        made.share, made.seed = float(rng.uniform(0.02, 0.1)), int(rng.integers(1 << 20))
        made.drawn |= {"share": round(made.share, 3), "every": made.every}
        made.seen = {}
        return made

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        for i, name in enumerate(self.tables):
            table: Any = t.model.get_submodule(name)
            if table.weight.grad is not None:
                seen = table.weight.grad.abs().sum(1) > 0
                self.seen[name] = 0.9 * self.seen.get(name, torch.zeros(len(seen))) + seen
            if step < self.step or (step - self.step) % self.every or name not in self.seen:
                continue
            known = self.seen[name].nonzero().flatten()  # what no key ever led to holds nothing
            least = known[self.seen[name][known].argsort()[: max(1, round(self.share * len(known)))]]
            fresh = torch.randn(len(least), table.weight.shape[1], generator=generator(self.seed, step, i))
            table.weight[least] = fresh * table.weight.std()


class MomentsDecayOtherwise(Simple):
    """Adam's decay rates are changed on purpose, as schedules of them do: a longer memory, or a shorter one."""

    name = "moments-decay-otherwise"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if "betas" not in training.optimizer.param_groups[0]:
            return None
        made = cls(step=moment(rng, training))
        made.betas = ((0.95, 0.995), (0.85, 0.98), (0.9, 0.9))[int(rng.integers(3))]
        made.drawn["betas"] = str(made.betas)
        return made

    def at(self, t: Training) -> None:
        for group in t.optimizer.param_groups:
            group["betas"] = self.betas


class ShortLastBatch(Trap):
    """Every epoch ends with what is left: a batch of one row or a few, in place of a full one."""

    name = "short-last-batch"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        batch = training.batch(0)
        if not isinstance(batch, dict) or "number" in batch or len({len(v) for v in batch.values()}) != 1:
            return None
        num = len(next(iter(batch.values())))
        if num < 3:
            return None
        made = cls(step=moment(rng, training))
        made.every, made.rows = int(rng.integers(8, 20)), int(rng.integers(1, max(2, num // 3) + 1))
        made.drawn |= {"every": made.every, "rows": made.rows}
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step or (step - self.step) % self.every:
            return batch
        return {name: value[: self.rows] for name, value in batch.items()}
