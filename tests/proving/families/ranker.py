"""Click prediction as recommenders do it: numbers and hashed categories of a long tail, large tables, a bottom MLP, cross layers, a top
MLP with biases, a binary loss, Adagrad at a constant rate after a warm-up, and calibration on the plots. No attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NUMBERS, TABLES, TABLE_ROWS, WIDTH = 16, 6, 2048, 32
WARM = 24


class Cross(nn.Module):
    """x0 ⊙ (W·x + b) + x: products of features, one degree more with each layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        out: Tensor = first * self.linear(x) + x
        return out


class Ranker(nn.Module):
    """Numbers [B, 16] and rows of the tables [B, 6] -> logits [B]."""

    def __init__(self, hidden: int, crosses: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(TABLE_ROWS, WIDTH) for _ in range(TABLES))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.3)
        self.bottom1, self.bottom2 = nn.Linear(NUMBERS, 128), nn.Linear(128, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        dim = WIDTH * (TABLES + 1)
        self.crosses = nn.ModuleList(Cross(dim) for _ in range(crosses))
        self.top1, self.top2 = nn.Linear(dim, hidden), nn.Linear(hidden, 64)
        self.click = nn.Linear(64, 1)

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        known = self.norm(self.bottom2(F.relu(self.bottom1(numbers))))
        first = torch.cat((known, *(table(rows[:, i]) for i, table in enumerate(self.tables))), 1)
        x = first
        for cross in self.crosses:
            x = cross(first, x)
        out: Tensor = self.click(F.relu(self.top2(F.relu(self.top1(x)))))[:, 0]
        return out


ROLES = {
    "blocks": r"crosses\.\d+",
    "mlp.up": r"bottom1|top1",
    "mlp.down": r"bottom2|top2",
    "norm": r"norm",
    "embedding": r"tables\.\d+",
    "head": r"click",
}


class World:
    """Who clicks on what: a preference of each row of each table, products of two of them, and a curve of the numbers."""

    def __init__(self, seed: int, batch: int) -> None:
        random = generator(seed, 0, 3)
        self.seed, self.batch = seed, batch
        self.own = torch.randn(TABLES, TABLE_ROWS, generator=random)
        self.taste = torch.randn(TABLES, TABLE_ROWS, 4, generator=random)
        self.curve = torch.randn(NUMBERS, generator=random)

    def __call__(self, number: int) -> dict[str, Tensor]:
        random = generator(self.seed, number)
        numbers = torch.randn(self.batch, NUMBERS, generator=random).mul(0.5).exp().log1p()
        tail = torch.rand(self.batch, TABLES, generator=random) ** 8  # few rows make up most of what is seen
        rows = (tail * TABLE_ROWS).long()
        which = torch.arange(TABLES)
        taste = self.taste[which, rows]
        logit = 2.0 * self.own[which, rows].sum(1) / math.sqrt(TABLES) + 0.5 * (taste[:, 0] * taste[:, 1]).sum(1)
        logit = logit + 2.0 * torch.sin(0.4 * numbers @ self.curve) - 1.0
        clicks = (torch.rand(self.batch, generator=random) < logit.sigmoid()).float()
        return {"numbers": numbers, "rows": rows, "clicks": clicks}


class Loss:
    """Binary cross-entropy; remembers how many clicks were foreseen for each that came."""

    def __init__(self) -> None:
        self.plots: dict[str, float] = {}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(batch["numbers"], batch["rows"]).float()
        foreseen = float(found.detach().sigmoid().mean())
        self.plots = {"calibration": foreseen / max(float(batch["clicks"].mean()), 1e-3)}
        return F.binary_cross_entropy_with_logits(found, batch["clicks"])


def build(seed: int, rank: int = 0) -> Training:
    """6 tables of 2048 × 32, 2–3 cross layers of 224, 256 rows."""
    rng = parts.drawing("ranker", seed)
    model = Ranker(int(rng.choice([128, 192])), int(rng.integers(2, 4)))
    rate, loss = parts.learning_rate(rng, 0.02, 0.05), Loss()
    return Training(
        family="ranker",
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=rate, initial_accumulator_value=0.01),
        batch=World(seed, 256),
        loss=loss,
        clip_norm=10.0,
        schedule=lambda step: rate * min(1.0, (step + 1) / WARM),
        log=lambda t, step: dict(loss.plots),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False},
    )
