"""Trainings with a planted culprit: what a bisection is given. Each fails by what one or two operands lose in FP8."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
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


def _attached(trial: Any) -> bool:
    """Whether 4.up computes in FP8."""
    model = _model()
    trial.attach(model)
    return bool(trial.in_fp8(model[4].up, "4.up"))


def a_flag_of_torch(trial: Any) -> Tensor:
    """What torch.isnan(loss).any() is."""
    return torch.tensor(_attached(trial))


def a_flag_of_numpy(trial: Any) -> Any:
    """What np.isnan(losses).any() is."""
    return np.bool_(_attached(trial))


def flags_of_ranks(trial: Any) -> Any:
    """One failed."""
    return np.array([False, _attached(trial)])


def losses_of_numpy(trial: Any) -> Any:
    """As np.float32 in a list."""
    return [np.float32(2.0), np.float32("nan" if _attached(trial) else 1.0)]


def an_array_of_losses(trial: Any) -> Any:
    """In float16."""
    return np.array([2.0, math.nan if _attached(trial) else 1.0], np.float16)


def losses_while_it_trains(trial: Any) -> Any:
    """A generator that raises as a trainer does."""
    failed = _attached(trial)
    yield 2.0
    if failed:
        raise FloatingPointError("loss is nan")


def forgets_to_return(trial: Any) -> None:
    """It trains, and says nothing."""
    _attached(trial)


def no_losses(trial: Any) -> list[float]:
    """It trains for no step."""
    _attached(trial)
    return []


def returns_a_word(trial: Any) -> str:
    """No loss."""
    return f"failed: {_attached(trial)}"


def misnames(trial: Any) -> float:
    """A mistake in the program, behind attach."""
    _attached(trial)
    return lsos  # type: ignore[name-defined,no-any-return]  # noqa: F821


def misses_a_file(trial: Any) -> str:
    """Its checkpoint is not there."""
    _attached(trial)
    return Path("no/such/checkpoint").read_text()


def is_out_of_memory(trial: Any) -> bool:
    """As on a full device: high precision needs more than FP8."""
    if not _attached(trial):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return True


def is_out_of_host_memory(trial: Any) -> bool:
    """As torch says it of the host."""
    if not _attached(trial):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory")
    return True


def never_attaches(trial: Any) -> bool:
    """Nothing is put on the FP8 path."""
    return True
