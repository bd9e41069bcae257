"""Healthy practices that people take up while a training runs: moments that begin anew with a short warm-up, layers that are skipped at random,
weights that are moved uphill a little before each gradient."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from proving.training import Training, Trap
from proving.traps._base import moment
from torch import Tensor, nn


class MomentsBegunAnew(Trap):
    """The optimizer's moments are thrown away on purpose and the rate warms up again from nothing over some steps, as low-rank adapters that are
    merged and begun again want it (ReLoRA, arXiv 2307.05695)."""

    name = "moments-begun-anew"
    length: int
    usual: list[float] | None

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if "betas" not in training.optimizer.param_groups[0] or training.world_size > 1:
            return None
        made = cls(step=moment(rng, training))
        made.length = int(rng.integers(6, 16))
        made.drawn["length"] = made.length
        made.usual = None
        return made

    def before_step(self, t: Training, step: int) -> None:
        if step == self.step:
            t.optimizer.state.clear()
            self.usual = [group["lr"] for group in t.optimizer.param_groups]
        if self.step <= step <= self.step + self.length and self.usual is not None:
            part = min(1.0, (step - self.step + 1) / (self.length + 1))
            for group, usual in zip(t.optimizer.param_groups, self.usual, strict=True):
                group["lr"] = part * (usual if t.schedule is None else group["lr"])


class LayersSkippedAtRandom(Trap):
    """From a step on each block is left out of some passes, and what enters it goes on as it is (stochastic depth, LayerDrop): there it has no
    gradient, as if it were dead."""

    name = "layers-skipped-at-random"
    blocks: list[str]
    share: float
    seed: int
    random: np.random.Generator
    forwards: dict[nn.Module, Any]
    """What each block had for its own `forward`, None where it had none."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        blocks = [str(name) for name in training.notes.get("blocks", ())]
        if len(blocks) < 2 or training.world_size > 1:
            return None
        made = cls(step=moment(rng, training))
        made.blocks, made.share, made.seed = blocks, float(rng.uniform(0.05, 0.2)), int(rng.integers(1 << 20))
        made.drawn["share"] = round(made.share, 3)
        made.random, made.forwards = np.random.default_rng(made.seed), {}
        return made

    def before_step(self, t: Training, step: int) -> None:
        if step == self.step:
            for name in self.blocks:
                block = t.model.get_submodule(name)
                self.forwards[block] = block.__dict__.get("forward")
                block.forward = functools.partial(self._skipped, block, block.forward)
        if step >= self.step:
            self.random = np.random.default_rng([self.seed, step])

    def _skipped(self, block: Any, forward: Any, *given: Any, **named: Any) -> Any:
        if block.training and torch.is_grad_enabled() and given and self.random.random() < self.share:
            return given[0]
        return forward(*given, **named)

    def undo(self) -> None:
        for block, forward in self.forwards.items():
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = forward
        self.forwards = {}


class SharpnessSought(Trap):
    """Each gradient is taken a little uphill of the weights, along the one before, and the update is made from where they were, as in
    sharpness-aware minimisation with one pass: what a forward pass reads is not what was stepped on last. No further than a tenth of the loss."""

    name = "sharpness-sought"
    radius: float
    loss: float
    gradient: list[tuple[Tensor, Tensor]]
    kept: list[tuple[Tensor, Tensor]]

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        made = cls(step=moment(rng, training))
        made.radius = float(rng.uniform(0.002, 0.01))
        made.drawn["radius"] = round(made.radius, 4)
        made.gradient, made.kept, made.loss = [], [], 0.0
        return made

    @torch.no_grad()
    def before_step(self, t: Training, step: int) -> None:
        if step < self.step or not self.gradient:
            return
        norm = torch.stack([g.norm() for _, g in self.gradient]).norm()
        self.kept = []
        if bool(norm.isfinite()) and float(norm) > 0:
            self.kept = [(p, p.detach().clone()) for p, _ in self.gradient]
            for p, g in self.gradient:
                p.add_(g, alpha=min(self.radius, 0.1 * self.loss / float(norm)) / float(norm))

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        self.loss = abs(float(loss.detach()))
        return loss

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        if step >= self.step - 1:
            trained: list[Tensor] = [p for p in t.model.parameters() if p.grad is not None]
            self.gradient = [(p, p.grad.detach().float().clone()) for p in trained if p.grad is not None]

    @torch.no_grad()
    def before_update(self, t: Training, step: int) -> None:
        for p, was in self.kept:
            p.copy_(was)
        self.kept = []
