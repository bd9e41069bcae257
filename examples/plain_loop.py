"""A plain PyTorch loop with fp8watch: one line attaches it, one line tells it the gradient norm.

python examples/plain_loop.py
FP8WATCH_COLLECTOR=http://127.0.0.1:8420 python examples/plain_loop.py
"""

import argparse

import torch
from torch import Tensor, nn

import fp8watch


class Block(nn.Module):
    """A pre-norm MLP with a residual connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Returns the mean squared error, so fp8watch sees the loss by itself."""

    def __init__(self, dim: int = 128, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(dim) for _ in range(num_layers)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """x, target [batch, dim] -> 0-d loss."""
        return (self.layers(x) - target).pow(2).mean()


def main() -> None:
    """Train for some steps and print the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    num_steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 128)
    target = x.roll(1, dims=1)  # what the model learns: rotate its input by one feature

    with fp8watch.attach(model, run="plain loop") as watch:  # detaches at the end, and sends what is left
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = model(x, target)
            loss.backward()
            watch.log(grad_norm=nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # before the step it belongs to
            optimizer.step()  # ends the step for fp8watch as well
            if step % 10 == 0 or step == num_steps - 1:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"run {watch.identity.run_id}: {watch.url or 'spooled; send it with `fp8watch sync`'}")


if __name__ == "__main__":
    main()
