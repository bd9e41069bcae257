"""Small real trainings, recorded through the product into one collector: a good run, and others that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fp8watch
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text

STEPS, ONSET = 48, 32
ATTENTION, DOWN = "layers.0.attention.o_proj", "layers.1.mlp.down_proj"
Change = Callable[[nn.Module, torch.optim.Optimizer], Any]


def overflow(model: nn.Module, _optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """One activation is Inf, for one step."""

    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[0, 7, 30] = float("inf")
        return (x,)

    return model.get_submodule(DOWN).register_forward_pre_hook(hook).remove


def overwrite(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """One weight becomes 1, as a flipped bit of its exponent makes it."""
    model.get_submodule(ATTENTION).weight.data[5, 40] = 1.0  # type: ignore[index,operator]


def grow(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """The input of one Linear grows ×16 from here on."""
    model.get_submodule(DOWN).register_forward_pre_hook(lambda _module, args: (args[0] * 16,))


def faster(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The learning rate times 30."""
    for group in optimizer.param_groups:
        group["lr"] *= 30


def train(
    url: str,
    run_id: str,
    *,
    steps: int = STEPS,
    seed: int = 0,
    data_seed: int = 0,
    name_data: bool = True,
    recipe: str = "blockwise",
    every: int = 1,
    num_layers: int = 2,
    lr: float = 2e-3,
    change: Change | None = None,
) -> None:
    """One training; what is not named is as in every other."""
    torch.manual_seed(seed)
    model = ByteModel(dim=64, num_layers=num_layers, num_heads=2, hidden=128, max_tokens=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    stream = batches(load_text(), 4, 32, data_seed)
    with fp8watch.attach(
        model, run_id=run_id, recipe=recipe, every=every, overhead_budget=None, optimizer=optimizer, collector=url
    ) as watch:
        for step in range(steps):
            undo = change(model, optimizer) if change is not None and step == ONSET else None
            optimizer.zero_grad()
            model(*next(stream)).backward()
            watch.log(
                grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                batch_id=f"{data_seed}/{step}" if name_data else None,
            )
            optimizer.step()
            if callable(undo):
                undo()
        assert watch.flush(20)
