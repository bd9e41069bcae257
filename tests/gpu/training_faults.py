"""Trainings of 200 steps that are broken at step 120: what they leave in the spool is for the detectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from training_loops import adamw
from training_models import Lm, tokens
from training_registry import scenario
from training_run import Run

STEPS, ONSET = 200, 120
WHERE = "layers.1.mlp.down_proj"
Fault = Callable[[Lm, torch.optim.Optimizer, int], None]


def _module(model: Lm) -> nn.Linear:
    found = model.get_submodule(WHERE)
    assert isinstance(found, nn.Linear)
    return found


def inf_weight(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """An Inf in one weight."""
    if step == ONSET:
        with torch.no_grad():
            _module(model).weight[5, 7] = float("inf")


def nan_activation(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A NaN in one input, of one step."""

    def broken(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0].clone()
        x[0, 3, 9] = float("nan")
        return (x,)

    if step == ONSET:
        handle = _module(model).register_forward_pre_hook(broken)
        model.register_forward_hook(lambda *_: handle.remove())


def _without_small(g: Tensor, share: float) -> Tensor:
    magnitude = g.detach().float().abs().flatten()
    limit = magnitude.kthvalue(max(int(share * magnitude.numel()), 1)).values
    return torch.where(g.abs() <= limit, torch.zeros_like(g), g)


def flushed_activation_gradient(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """95 % of the gradient that comes to one module become zero."""

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: _without_small(g, 0.95))

    if step == ONSET:
        _module(model).register_forward_hook(hook)


def flushed_weight_gradient(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """95 % of the gradients of all weights become zero on their way to the optimizer."""

    def before(*_: Any) -> None:
        for p in model.parameters():
            if p.grad is not None and p.ndim == 2:
                p.grad.copy_(_without_small(p.grad, 0.95))

    if step == ONSET:
        optimizer.register_step_pre_hook(before)


def outlier_channel(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One channel of an input grows by a fifth in each step, to 200 times what it was."""

    def grown(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0].clone()
        x[..., 9] *= min(1.2 ** (now[0] - ONSET), 200.0)
        return (x,)

    now = getattr(model, "_now", [step])
    now[0] = step
    if step == ONSET:
        model._now = now  # type: ignore[assignment]
        _module(model).register_forward_pre_hook(grown)


def bit_flip(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One exponent bit of one bfloat16 weight."""
    if step == ONSET:
        with torch.no_grad():
            bits = _module(model).weight.view(torch.int16)
            bits[11, 13] ^= 1 << 10


def low_bit_flip(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The sign of one bfloat16 weight."""
    if step == ONSET:
        with torch.no_grad():
            _module(model).weight[11, 13] *= -1


def rate(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate is 30 times what it was."""
    if step == ONSET:
        for group in optimizer.param_groups:
            group["lr"] *= 30


def healthy(model: Lm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Nothing."""


FAULTS: dict[str, Fault] = {
    f.__name__.replace("_", "-"): f
    for f in (
        healthy, inf_weight, nan_activation, flushed_activation_gradient, flushed_weight_gradient, outlier_channel,
        bit_flip, low_bit_flip, rate,
    )
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "": {},
    "+observe": {"recipe": "observe"},
    "+delayed": {"gemm": "emulated", "recipe": "delayed"},
}


def fault_arguments(mode: str) -> dict[str, Any]:
    """Of attach: the name of a fault may end with how it is attached."""
    return next(dict(RECIPES[end]) for end in sorted(RECIPES, reverse=True) if mode.endswith(end))


@scenario(
    (*FAULTS, "healthy+observe", "inf-weight+observe", "rate+observe", "healthy+delayed", "outlier-channel+delayed"),
    steps=STEPS, held=False, deterministic=False, timeout_s=120, weight=4,
)  # fmt: skip
def faults(run: Run) -> None:
    """A fault at step 120."""
    mode = run.name.split("@")[1]
    fault = FAULTS[mode.split("+")[0]]
    model = Lm(run.size(128, 64), 3).to(run.device, torch.bfloat16)
    run.attach(model)
    optimizer, data = adamw(model, fused=run.cuda), tokens(run.device, 8, run.size(128, 32), 50)
    for i in run.each():
        fault(model, optimizer, i)
        loss = model(*data[i % 50])
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.notes |= {"fault": mode, "step": ONSET if fault is not healthy else None, "where": WHERE, "what": fault.__doc__}
