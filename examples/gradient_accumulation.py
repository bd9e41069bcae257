"""Gradient accumulation: several backward passes make one step, and one record of each operand.

    python examples/gradient_accumulation.py

Statistics of the micro-batches are merged: extremes are those of all of them, counts are sums. The step ends at
`optimizer.step()`, so its loss is the mean that is logged just before.
"""

import argparse

import torch
from torch import nn

import fp8watch

MICRO_BATCHES = 4


def main() -> None:
    """Train for some steps of four micro-batches and print the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    num_steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(MICRO_BATCHES, 64, 128)
    target = x.roll(1, dims=2)

    with fp8watch.attach(model, run="gradient accumulation") as watch:
        for step in range(num_steps):
            optimizer.zero_grad()
            total = torch.zeros(())
            for i in range(MICRO_BATCHES):
                loss = nn.functional.mse_loss(model(x[i]), target[i]) / MICRO_BATCHES
                loss.backward()
                total += loss.detach()  # stays on the device: fp8watch reads it when the step ends
            watch.log(loss=total)  # this model returns no loss, so fp8watch cannot see it by itself
            optimizer.step()
            if step % 5 == 0 or step == num_steps - 1:
                print(f"step {step} loss {total.item():.4f}")
        print(f"run {watch.identity.run_id}: {watch.summary()['num_steps']} steps recorded")


if __name__ == "__main__":
    main()
