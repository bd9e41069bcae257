"""Optimizers that people write themselves: LAMB, Lookahead around momentum, Muon, Adafactor with row-wise Adagrad for tables, and Lion.

Each keeps its state by parameter in `state`, so that checkpoints carry it, and reads `lr` from its groups at every step.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Own(torch.optim.Optimizer):
    """One parameter at a time: subclasses say what its state begins with, and how a gradient changes it."""

    settings: ClassVar[dict[str, Any]] = {}
    """Settings of a group, and what they are where the group does not say."""

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **self.settings, **settings})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(self.begin(p, group))
                    self.update(p, p.grad, state, group)

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """State of a parameter before its first update."""
        raise NotImplementedError

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change p and its state in place."""
        raise NotImplementedError


def adam_direction(gradient: Tensor, state: dict[str, Any], betas: tuple[float, float], eps: float = 1e-8) -> Tensor:
    """Adam's update without its rate; `state` holds exp_avg, exp_avg_sq and how many steps."""
    state["num_steps"] += 1
    state["exp_avg"].lerp_(gradient, 1 - betas[0])
    state["exp_avg_sq"].lerp_(gradient.square(), 1 - betas[1])
    first = state["exp_avg"] / (1 - betas[0] ** state["num_steps"])
    second = state["exp_avg_sq"] / (1 - betas[1] ** state["num_steps"])
    out: Tensor = first / (second.sqrt() + eps)
    return out


def moments(p: Tensor) -> dict[str, Any]:
    """Of Adam."""
    return {"num_steps": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class Lamb(Own):
    """Adam whose update of a matrix has the matrix's own norm (arXiv 1904.00962); vectors take Adam's as it is."""

    settings: ClassVar[dict[str, Any]] = {"weight_decay": 0.01, "betas": (0.9, 0.999)}

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return moments(p)

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        direction = adam_direction(gradient, state, group["betas"], 1e-6)
        if p.ndim < 2:
            p.sub_(direction, alpha=0.1 * group["lr"])
            return
        direction += group["weight_decay"] * p
        trust = float(p.norm() / direction.norm().clamp(min=1e-12))
        p.sub_(direction, alpha=group["lr"] * min(trust, 10.0))


class Lookahead(Own):
    """Nesterov momentum; every `every` steps the weights go a part of the way from slow weights, which follow (arXiv 1907.08610)."""

    settings: ClassVar[dict[str, Any]] = {"momentum": 0.9, "weight_decay": 0.0, "every": 6, "part": 0.5}

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"num_steps": 0, "momentum_buffer": torch.zeros_like(p), "slow": p.clone()}

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["num_steps"] += 1
        gradient = gradient + group["weight_decay"] * p
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        p.sub_(gradient + group["momentum"] * buffer, alpha=group["lr"])
        if state["num_steps"] % group["every"] == 0:
            p.copy_(state["slow"].lerp_(p, group["part"]))


def orthogonal(x: Tensor, num_steps: int = 5) -> Tensor:
    """The nearest matrix with equal singular values, roughly: Newton–Schulz steps of a quintic."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x if x.shape[0] <= x.shape[1] else x.t()
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(num_steps):
        gram = wide @ wide.t()
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.t()


class Muon(Own):
    """Groups with `matrices` take their momentum's orthogonal part, all others Adam's update."""

    settings: ClassVar[dict[str, Any]] = {
        "matrices": False,
        "momentum": 0.95,
        "betas": (0.8, 0.95),
        "weight_decay": 0.0,
    }

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p)} if group["matrices"] else moments(p)

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["matrices"]:
            buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            direction = orthogonal(gradient.lerp(buffer, group["momentum"]))
            direction = direction * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        else:
            direction = adam_direction(gradient, state, group["betas"], 1e-10)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])


class Adafactor(Own):
    """Second moments of a matrix as those of its rows times those of its columns (arXiv 1804.04235), no first one; groups with
    `rows` are tables with one Adagrad sum a row."""

    settings: ClassVar[dict[str, Any]] = {"rows": False, "clip_rms": 1.0}

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if group["rows"]:
            return {"sum": torch.zeros_like(p[:, 0])}
        if p.ndim == 2:
            return {"num_steps": 0, "row": torch.zeros_like(p[:, 0]), "column": torch.zeros_like(p[0])}
        return {"num_steps": 0, "square": torch.zeros_like(p)}

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = gradient.square() + 1e-30
        if group["rows"]:
            state["sum"].add_(square.mean(1))
            p.sub_(gradient / (state["sum"].sqrt()[:, None] + 1e-8), alpha=group["lr"])
            return
        state["num_steps"] += 1
        part = float(state["num_steps"]) ** -0.8
        if p.ndim == 2:
            row, column = state["row"].lerp_(square.mean(1), part), state["column"].lerp_(square.mean(0), part)
            direction = gradient / (torch.outer(row, column) / row.mean()).sqrt()
        else:
            direction = gradient / state["square"].lerp_(square, part).sqrt()
        rms = float(direction.square().mean().sqrt())
        p.sub_(direction, alpha=group["lr"] / max(1.0, rms / group["clip_rms"]))


class Lion(Own):
    """The sign of a momentum that is nearer to the gradient than the one that is kept (arXiv 2302.06675)."""

    settings: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.98), "weight_decay": 0.0}

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(p)}

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        near, far = group["betas"]
        direction = state["exp_avg"].lerp(gradient, 1 - near).sign_()
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        state["exp_avg"].lerp_(gradient, 1 - far)
