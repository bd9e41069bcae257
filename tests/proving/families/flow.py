"""A normalising flow on readings of eight sensors in eight moments: half of the numbers says how the other half is stretched and moved, in
several couplings between fixed permutations, each number with a gain of its own before; the loss is the likelihood under a normal
distribution, in nats a reading, and falls below zero. Adam at a constant rate behind a warm-up, current scaling; no attention, no norms,
and no head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

SENSORS, MOMENTS, CAUSES = 8, 8, 3
NUMBERS = SENSORS * MOMENTS
WARM = 16

ROLES = {
    "blocks": r"couplings\.\d+",
    "mlp.up": r"couplings\.\d+\.(up|wide)",
    "mlp.down": r"couplings\.\d+\.down",
}


class Coupling(nn.Module):
    """x [B, 64] -> z [B, 64] and the logarithm of how much room it takes [B]."""

    order: Tensor

    def __init__(self, width: int, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order)
        self.gain, self.move = nn.Parameter(torch.zeros(NUMBERS)), nn.Parameter(torch.zeros(NUMBERS))
        self.up, self.wide = nn.Linear(NUMBERS // 2, width), nn.Linear(width, width)
        self.down = nn.Linear(width, NUMBERS)
        nn.init.normal_(self.down.weight, std=0.01)  # begins as nearly nothing but the gains

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (x[:, self.order] + self.move) * self.gain.exp()
        kept, changed = x.chunk(2, 1)
        hidden = F.silu(self.up(kept))
        stretch, shift = self.down(hidden + F.silu(self.wide(hidden))).float().chunk(2, 1)
        stretch = 1.5 * (stretch / 1.5).tanh()
        return torch.cat((kept, changed * stretch.exp() + shift), 1), stretch.sum(1) + self.gain.sum()


class Flow(nn.Module):
    """x [B, 64] -> log-probability [B]."""

    def __init__(self, width: int, num: int, random: torch.Generator) -> None:
        super().__init__()
        orders = [torch.randperm(NUMBERS, generator=random) for _ in range(num)]
        self.couplings = nn.ModuleList(Coupling(width, order) for order in orders)

    def forward(self, x: Tensor) -> Tensor:
        room = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, more = coupling(x)
            room = room + more
        out: Tensor = room - 0.5 * (x.square() + math.log(2 * math.pi)).sum(1)
        return out


class World:
    """Three causes swing, each at its own pace, and every sensor sees a mixture of them and saturates."""

    def __init__(self, seed: int, rows: int) -> None:
        random = generator(seed, 0, 6)
        self.seed, self.rows = seed, rows
        self.pace = 0.3 + 1.2 * torch.rand(CAUSES, generator=random)
        self.mixed = 1.5 * torch.randn(CAUSES, SENSORS, generator=random)

    def __call__(self, number: int) -> dict[str, Tensor]:
        random = generator(self.seed, number)
        strong, begin = (torch.rand(self.rows, 1, CAUSES, generator=random) for _ in range(2))
        causes = (0.5 + strong) * (self.pace * torch.arange(MOMENTS)[:, None] + 2 * math.pi * begin).sin()
        seen = 1.5 * (causes @ self.mixed).tanh()
        return {"frames": seen + 0.05 * torch.randn(seen.shape, generator=random)}


def build(seed: int, rank: int = 0) -> Training:
    """4–6 couplings, 128 or 160 wide, 64 windows."""
    rng = parts.drawing("flow", seed)
    model = Flow(int(rng.choice([128, 160])), int(rng.integers(4, 7)), generator(seed, 0, 7))
    peak = parts.learning_rate(rng, 1e-3, 3e-3)
    return Training(
        family="flow",
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=peak, betas=(0.9, 0.98)),
        batch=World(seed, 64),
        loss=lambda m, b: -m(b["frames"].flatten(1)).mean() / NUMBERS,
        recipe="current",
        clip_norm=5.0,
        schedule=lambda step: peak * min(1.0, (step + 1) / WARM),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False},
    )
