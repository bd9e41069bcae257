"""Transformer Engine's modules, observed with the recipe that they compute in.

    python examples/transformer_engine_layers.py

Needs the package transformer_engine[pytorch] and a GPU that it can block-scale on (Hopper or later, CUDA 12.9 or later).
Without the package it ends with status 1 and says so. This file is not called transformer_engine.py, because its own
import would then find it.
"""

import argparse
import sys

import torch
from torch import Tensor, nn

import fp8watch

try:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling
except (ImportError, OSError, RuntimeError) as e:  # not installed, a shared library missing, another CUDA
    sys.exit(f"this example needs Transformer Engine: pip install 'transformer_engine[pytorch]' ({e})")


class Model(nn.Module):
    """Returns the mean squared error."""

    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(dim, 2 * dim)
        self.proj = te.Linear(2 * dim, dim)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """x, target [batch, dim] -> 0-d loss."""
        return nn.functional.mse_loss(self.proj(self.qkv(x)), target)


def main() -> None:
    """Train for some steps in FP8 and print the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    num_steps = parser.parse_args().steps
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 256, device=device, requires_grad=True)
    target = x.detach().roll(1, dims=1)

    with fp8watch.attach(model, run="Transformer Engine") as watch:  # without recipe=: modules keep the one they have
        for step in range(num_steps):
            optimizer.zero_grad()
            with te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
                loss = model(x, target)
            loss.backward()
            optimizer.step()
            if step % 5 == 0 or step == num_steps - 1:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"run {watch.identity.run_id}: {watch.summary()['num_sites']} sites observed")


if __name__ == "__main__":
    main()
