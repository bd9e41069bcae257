"""Energies of small molecules by message passing: kinds and places of bodies, filters of their distances, messages summed over all neighbours,
an energy for each body and their sum as the answer; a Huber loss, Adam with a decay by the step, no norms in the blocks. No attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

BODIES, KINDS, WAVES, FAR = 10, 6, 32, 3.0
WARM = 16


class Message(nn.Module):
    """x [B, N, dim] and waves of the distances [B, N, N, 32] -> x and what the neighbours say."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.filter1, self.filter2 = nn.Linear(WAVES, width), nn.Linear(width, width)
        self.said = nn.Linear(dim, width, bias=False)
        self.up, self.down = nn.Linear(width, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, waves: Tensor, near: Tensor) -> Tensor:
        filters = self.filter2(F.silu(self.filter1(waves))) * near[..., None]
        heard = (filters * self.said(x)[:, None]).sum(2)
        out: Tensor = x + self.down(F.silu(self.up(heard)))
        return out


class Graph(nn.Module):
    """Kinds [B, N] and places [B, N, 3] -> energies [B]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(KINDS, dim)
        self.blocks = nn.ModuleList(Message(dim, 64) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.own = nn.Linear(dim, 64)
        self.energy = nn.Linear(64, 1)

    def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
        far = distances(places)
        waves = (-((far[..., None] - torch.linspace(0.0, FAR, WAVES)) / (FAR / WAVES)).square()).exp()
        near = 0.5 * (1 + (math.pi * far / FAR).clamp(max=math.pi).cos())
        near = near * (1 - torch.eye(far.shape[-1]))
        x = self.kinds(kinds)
        for block in self.blocks:
            x = block(x, waves, near)
        out: Tensor = self.energy(F.silu(self.own(self.norm(x))))[..., 0].sum(1)
        return out


ROLES = {
    "blocks": r"blocks\.\d+",
    "mlp.up": r"blocks\.\d+\.(up|filter1)",
    "mlp.down": r"blocks\.\d+\.(down|filter2)",
    "norm": r"norm",
    "embedding": r"kinds",
    "head": r"energy",
}


def distances(places: Tensor) -> Tensor:
    """Of each body from each: [B, N, 3] -> [B, N, N], never quite 0."""
    return ((places[:, :, None] - places[:, None]).square().sum(-1) + 1e-6).sqrt()


class World:
    """Which kinds attract each other, how strongly and how far; energies in units of their own deviation, measured with an error."""

    def __init__(self, seed: int, batch: int) -> None:
        random = generator(seed, 0, 3)
        self.seed, self.batch = seed, batch
        depth = torch.randn(KINDS, KINDS, generator=random)
        self.depth, self.width = depth + depth.t(), 0.6 + 0.6 * torch.rand(KINDS, KINDS, generator=random)
        self.own = torch.randn(KINDS, generator=random)
        self.mean, self.deviation = 0.0, 1.0
        known = self.energies(*self.drawn(random, 512))
        self.mean, self.deviation = float(known.mean()), float(known.std())

    def drawn(self, random: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        """Kinds and places."""
        kinds = torch.randint(0, KINDS, (rows, BODIES), generator=random)
        return kinds, 1.1 * torch.randn(rows, BODIES, 3, generator=random)

    def energies(self, kinds: Tensor, places: Tensor) -> Tensor:
        """Of all pairs and of each body alone, cut off smoothly."""
        pair = kinds[:, :, None], kinds[:, None]
        wells = self.depth[pair] * (-(distances(places) / self.width[pair]).square()).exp()
        wells = wells * (1 - torch.eye(BODIES))
        whole: Tensor = wells.sum((1, 2)) / 2 + self.own[kinds].sum(1)
        return (whole - self.mean) / self.deviation

    def __call__(self, number: int) -> dict[str, Tensor]:
        random = generator(self.seed, number)
        kinds, places = self.drawn(random, self.batch)
        energies = self.energies(kinds, places) + 0.2 * torch.randn(self.batch, generator=random)
        return {"kinds": kinds, "places": places, "energies": energies}


def build(seed: int, rank: int = 0) -> Training:
    """2–3 rounds of messages among 10 bodies, 128 or 160 wide, 40 molecules."""
    rng = parts.drawing("graph", seed)
    model = Graph(int(rng.choice([128, 160])), int(rng.integers(2, 4)))
    peak, halves = parts.learning_rate(rng, 1e-3, 3e-3), float(rng.uniform(60, 120))
    return Training(
        family="graph",
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=peak),
        batch=World(seed, 40),
        loss=lambda m, b: F.huber_loss(m(b["kinds"], b["places"]).float(), b["energies"]),
        clip_norm=10.0,
        schedule=lambda step: peak * min(1.0, (step + 1) / WARM) * 0.5 ** (step / halves),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False},
    )
