"""Healthy habits that people take up while a training runs: noise on gradients, updates that are skipped, logits that are held small, samples
that are mixed, rates by depth, weights of queries and keys that are held."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.data import generator
from proving.faults._base import role, trained
from proving.training import Training, Trap
from proving.traps._base import Simple, moment
from torch import Tensor


class GradientNoiseBegins(Trap):
    """From a step on each gradient has normal noise added, a part of its own size and less with every step (arXiv 1511.06807)."""

    name = "gradient-noise-begins"
    share: float
    seed: int

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.world_size > 1:
            return None
        made = cls(step=moment(rng, training))
        made.share, made.seed = float(rng.uniform(0.1, 0.5)), int(rng.integers(1 << 20))
        made.drawn["share"] = round(made.share, 3)
        return made

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        if step < self.step:
            return
        share = self.share * (1 + step - self.step) ** -0.55
        for i, p in enumerate(t.model.parameters()):
            if p.grad is not None:
                noise = torch.randn(p.grad.shape, generator=generator(self.seed, step * 4096 + i))
                p.grad.add_((noise * p.grad.float().square().mean().sqrt() * share).to(p.grad.dtype))


class LargeGradientsSkipped(Trap):
    """From a step on an update is left out where the gradient is larger than nearly all of the last ones, as long runs do against spikes."""

    name = "large-gradients-skipped"
    quantile: float
    norms: list[float]

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.scaler is not None or training.world_size > 1:
            return None
        made = cls(step=moment(rng, training))
        made.quantile, made.norms = float(rng.uniform(0.8, 0.95)), []
        made.drawn["quantile"] = round(made.quantile, 3)
        return made

    def after_backward(self, t: Training, step: int) -> None:
        self.norms.append(float(torch.stack([g.float().norm() for g in self._gradients(t)]).norm()))

    def before_update(self, t: Training, step: int) -> None:
        last = self.norms[-25:-1]
        if step >= self.step and last and self.norms[-1] > np.quantile(last, self.quantile):
            for p in t.model.parameters():
                p.grad = None

    @staticmethod
    def _gradients(t: Training) -> list[Tensor]:
        return [p.grad for p in t.model.parameters() if p.grad is not None]


class LogitsPenalised(Simple):
    """From a step on the loss holds a small part of the square of the logits' normaliser, which keeps it near nothing (z-loss, arXiv 2204.02311)."""

    name = "logits-penalised"
    head: str
    weight: float
    logits: Tensor | None
    handle: Any

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        heads = [n for n in role(training, "head") if getattr(training.model.get_submodule(n), "out_features", 0) > 1]
        if not heads:
            return None
        made = cls(step=moment(rng, training))
        made.head, made.weight, made.logits, made.handle = heads[-1], float(10 ** rng.uniform(-4.5, -3.3)), None, None
        made.drawn["weight"] = float(f"{made.weight:.3g}")
        return made

    def at(self, t: Training) -> None:
        def seen(module: Any, given: Any, out: Tensor) -> None:
            if out.requires_grad:
                self.logits = out

        self.handle = t.model.get_submodule(self.head).register_forward_hook(seen)

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        if step < self.step or self.logits is None:
            return loss
        logits, self.logits = self.logits, None
        return loss + self.weight * logits.float().logsumexp(-1).square().mean()

    def undo(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class SamplesMixed(Trap):
    """From a step on each sample has some of another one in it, in front or behind, and so has what is to be said of it where that is a number;
    a class is that of the larger part (mixup, arXiv 1710.09412)."""

    name = "samples-mixed"
    least: float
    seed: int

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        batch = training.batch(0)
        if not isinstance(batch, dict) or not {"frames", "pixels"} & set(batch) or "noise" in batch:
            return None
        made = cls(step=moment(rng, training))
        made.least, made.seed = float(rng.uniform(0.7, 0.9)), int(rng.integers(1 << 20))
        made.drawn["least"] = round(made.least, 3)
        return made

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        if step < self.step:
            return batch
        random, num = generator(self.seed, step), len(next(iter(batch.values())))
        other = torch.randperm(num, generator=random)
        own = self.least + (1 - self.least) * torch.rand(num, generator=random)

        def mixed(x: Tensor) -> Tensor:
            part = own.view(-1, *[1] * (x.ndim - 1))
            return part * x + (1 - part) * x[other]

        return {name: mixed(x) if x.is_floating_point() else x for name, x in batch.items()}


class RatesByDepth(Simple):
    """From a step on the rate falls from the last block to the first, each a part of the one behind it, as fine-tuning does."""

    name = "rates-by-depth"
    share: float
    blocks: list[str]

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        blocks = role(training, "blocks")
        if len(blocks) < 2 or training.resume_at or training.world_size > 1:
            return None
        made = cls(step=moment(rng, training))
        made.blocks, made.share = blocks, float(rng.uniform(0.6, 0.9))
        made.drawn["share"] = round(made.share, 3)
        return made

    def at(self, t: Training) -> None:
        behind: dict[int, int] = {}
        for number, name in enumerate(reversed(self.blocks)):
            behind |= {id(p): number for p in t.model.get_submodule(name).parameters()}
        groups = []
        for group in t.optimizer.param_groups:
            for number in sorted({behind.get(id(p), 0) for p in group["params"]}):
                part = self.share**number
                params = [p for p in group["params"] if behind.get(id(p), 0) == number]
                own = {"params": params, "lr_scale": group.get("lr_scale", 1.0) * part, "lr": group["lr"] * part}
                groups.append(group | own)
        t.optimizer.param_groups[:] = groups


class QueriesAndKeysClipped(Simple):
    """From a step on weights of queries and keys are scaled down after each update until they are no larger than a limit, against logits that
    grow (QK-clip, arXiv 2507.20534)."""

    name = "queries-and-keys-clipped"
    modules: list[str]
    share: float
    limits: dict[str, float]
    most = 0.01
    """What one step takes away."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        modules = trained(training, role(training, "attention.q", "attention.k"))
        if not modules or training.world_size > 1 or "adapter" in training.notes:
            return None
        made = cls(step=moment(rng, training))
        made.modules, made.share, made.limits = modules, float(rng.uniform(0.8, 0.97)), {}
        made.drawn["share"] = round(made.share, 3)
        return made

    def at(self, t: Training) -> None:
        self.limits = {name: self.share * float(self._weight(t, name).norm()) for name in self.modules}

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        for name, limit in self.limits.items():
            weight = self._weight(t, name)
            norm = float(weight.norm())
            if norm > limit:
                weight.mul_(max(1 - self.most, limit / norm))

    @staticmethod
    def _weight(t: Training, name: str) -> Tensor:
        weight = t.model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        return weight.detach()
