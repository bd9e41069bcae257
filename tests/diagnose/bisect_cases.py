"""Trainings with a planted culprit: what a bisection is given. Each fails by what one or two operands lose in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, BLOCKS = 64, 8


class Block(nn.Module):
    """Residual, two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x + down(relu(up(x)))."""
        return x + self.down(torch.relu(self.up(x)))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def _spoilt(linear: nn.Linear, lost: list[float], what: str) -> None:
    """One huge element in an operand: with one scale for the tensor the others are lost."""

    def outlier(x: Tensor) -> Tensor:
        spoilt = x.clone()
        spoilt.view(-1)[0] = 1e12 * float(x.abs().max()) if what == "grad_output" else 3e5
        return spoilt

    def before(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (outlier(given[0]),) if what == "input" else given

    def after(module: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        exact = nn.functional.linear(given[0], module.weight, module.bias)
        lost.append(float((out - exact)[1:].detach().abs().mean() / exact[1:].detach().abs().mean()))
        if what == "grad_output":
            out.register_hook(outlier)
        return out

    if what == "weight":
        with torch.no_grad():
            linear.weight[0, 0] = 3e5
    linear.register_forward_pre_hook(before)
    linear.register_forward_hook(after)


def _forward(trial: Any, at: list[tuple[int, str]], what: str, limit: float = 0.1, fails: Any = max) -> bool:
    model = _model()
    lost: list[float] = []
    for block, name in at:
        _spoilt(getattr(model[block], name), lost, what)
    trial.attach(model, recipe="current")
    model(torch.randn(32, WIDTH))
    return bool(fails(lost) > limit)


def an_input(trial: Any) -> bool:
    """An outlier in the input of 5.down."""
    return _forward(trial, [(5, "down")], "input")


def an_input_at_the_front(trial: Any) -> bool:
    """An outlier in the input of 0.up."""
    return _forward(trial, [(0, "up")], "input")


def two_inputs(trial: Any) -> bool:
    """Outliers in the inputs of 1.up and 6.down: both must leave."""
    return _forward(trial, [(1, "up"), (6, "down")], "input")


def only_together(trial: Any) -> bool:
    """Outliers in the inputs of 2.up and 5.down: it fails where both compute in FP8, so that either may leave."""
    return _forward(trial, [(2, "up"), (5, "down")], "input", fails=min)


def a_gradient(trial: Any) -> bool:
    """An outlier in grad_output of 3.up: dgrad and wgrad are lost, fprop is sound."""
    return _backward(trial, [])


def one_layer(trial: Any) -> bool:
    """Outliers in input and grad_output of 3.up: each GEMM is lost by itself, and no operand alone saves all three."""
    return _backward(trial, ["input"])


def _backward(trial: Any, also: list[str]) -> bool:
    model = _model()
    target, lost = model[3].up, [0.0]
    for what in also:
        _spoilt(target, lost, what)
    _spoilt(target, [], "grad_output")
    seen: list[Tensor] = []

    def keep(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(given[0] * 1)
        seen[0].retain_grad()
        return (seen[0],)

    target.register_forward_pre_hook(keep)
    trial.attach(model, recipe="current")
    model(torch.randn(32, WIDTH)).square().mean().backward()
    flushed = [float((grad[1:] == 0).float().mean()) for grad in (target.weight.grad, seen[0].grad)]
    return max(lost) > 0.1 or max(flushed) > 0.9


def losses_of_training(trial: Any) -> list[float]:
    """A training whose loss passes the limit where 2.down computes in FP8: its output is scaled up."""
    model = _model()
    lost: list[float] = []
    _spoilt(model[2].down, lost, "input")
    trial.attach(model, recipe="current")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    for _ in range(2):
        loss = model(torch.randn(32, WIDTH)).square().mean()
        optimizer.step()
        losses.append(float(loss.detach()) * 0 + lost[-1])
    return losses


def shared(trial: Any) -> float:
    """It fails in high precision too."""
    model = _model()
    trial.attach(model)
    model(torch.randn(4, WIDTH))
    return float("nan")


def sound(trial: Any) -> float:
    """It does not fail."""
    trial.attach(_model())
    return 1.0


def raises(trial: Any) -> float:
    """It raises where 4.up computes in FP8, as a check of a trainer does."""
    model = _model()
    trial.attach(model)
    if trial.in_fp8(model[4].up, "4.up"):
        raise FloatingPointError("loss is nan")
    return 1.0


def on_ranks(trial: Any) -> bool:
    """Only rank 1 fails, by the input of 7.up."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        failed = _forward(trial, [(7, "up")], "input")
        return failed and dist.get_rank() == 1
    finally:
        dist.destroy_process_group()


def never_attaches(trial: Any) -> bool:
    """Nothing is put on the FP8 path."""
    return True
