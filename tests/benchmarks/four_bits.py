"""Final loss of a small language model under NVFP4 beside float32 and blockwise: no clock, the mean of the last 50 of 300 steps.

PYTHONPATH=tests .venv/bin/python tests/benchmarks/four_bits.py [--seeds N] [--steps N]

Two layers of 64 features on the demo's text, 512 tokens a step; statistics are off, and change nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in (".", "agent", "server", "tests")]

import fp8watch  # noqa: E402
from benchmarks.operating_point import refuse_other_settings  # noqa: E402
from fp8watch.demo.model import ByteModel  # noqa: E402
from fp8watch.demo.text import batches, load_text  # noqa: E402
from fp8watch.recipe import Recipe, blockwise, nvfp4  # noqa: E402

LAST = 50
OFF = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
RECIPES: dict[str, Recipe | None] = {
    "float32": None,
    "blockwise": blockwise(environ={}),
    "nvfp4": nvfp4(environ={}),
    "nvfp4, to nearest": nvfp4(environ={}, disable_stochastic_rounding=True),
    "nvfp4, all three off": nvfp4(environ={}, **OFF),
}


def mean_loss(recipe: Recipe | None, seed: int, steps: int) -> float:
    """Mean loss of the last steps, in nats."""
    torch.manual_seed(seed)
    model = ByteModel(dim=64, num_layers=2, hidden=192)
    watch = None if recipe is None else fp8watch.attach(model, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    losses = []
    for step, (tokens, targets) in zip(range(steps), batches(load_text(), 8, 64, seed=seed + 7), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 40) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    if watch is not None:
        watch.detach()
    return sum(losses[-LAST:]) / LAST


def main() -> None:
    """Print a row for each recipe and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    refuse_other_settings()
    os.environ["FP8WATCH_DISABLED"] = "stats"
    torch.set_num_threads(1)
    for seed in range(given.seeds):
        exact = math.nan
        for name, recipe in RECIPES.items():
            loss = mean_loss(recipe, seed, given.steps)
            exact = loss if recipe is None else exact
            print(f"seed {seed}  {name:22} {loss:.4f} nats  {loss / exact - 1:+.2%}", flush=True)


if __name__ == "__main__":
    main()
