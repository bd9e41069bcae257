"""A small training that runs each night, broken in one of some ways: python -m browser.nightly RUN_ID RECIPE FAULT.

Faults, at step 70: `outlier` grows the input of one layer 4,096 times for three steps, `inf` puts one Inf into it, `none` does nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import fp8watch

STEPS, FAULT_STEP, WIDTH = 100, 70, 256
BROKEN = "blocks.1.up"
NAME = "nightly 2M"


class Block(torch.nn.Module):
    """Up, ReLU, down, with what went in added."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, WIDTH] -> [tokens, WIDTH]."""
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, WIDTH] -> [tokens, WIDTH]."""
        for block in self.blocks:
            x = block(x)
        return x


def main(run_id: str, recipe: str, fault: str) -> None:
    """Train, and break."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    teacher = torch.randn(WIDTH, WIDTH) / 16
    step = 0

    def broken(_module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = args[0].clone()
        if fault == "inf" and step == FAULT_STEP:
            x.data[5, 7] = float("inf")
        if fault == "outlier" and FAULT_STEP <= step < FAULT_STEP + 3:
            x.data[:, 7] *= 4096.0
        return (x,)

    model.get_submodule(BROKEN).register_forward_pre_hook(broken)
    with fp8watch.attach(
        model, run=NAME, run_id=run_id, recipe=recipe, optimizer=optimizer, overhead_budget=None
    ) as watch:
        for step in range(STEPS):
            x = torch.randn(WIDTH, WIDTH)
            loss = (model(x) - x @ teacher).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            watch.log(loss=loss.detach())
            if step % 25 == 24:
                watch.checkpoint_saved()


if __name__ == "__main__":
    main(*sys.argv[1:])
