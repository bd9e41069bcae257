"""A recurrent classifier: one GRU cell of Linears that is called for each row of a digit, trained with SGD and momentum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import images
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("sklearn",)


class Cell(nn.Module):
    """Gated recurrent unit: x [B, width], h [B, hidden] -> h."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(width, 3 * hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        reset_x, update_x, new_x = self.ih(x).chunk(3, -1)
        reset_h, update_h, new_h = self.hh(h).chunk(3, -1)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        return (1 - update) * new + update * h


class Reader(nn.Module):
    """Images [B, 8, 8] -> logits [B, 10]; eight calls of one cell."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Linear(8, hidden)
        self.cell = Cell(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        h = pixels.new_zeros(len(pixels), self.hidden)
        for row in self.embed(pixels).unbind(1):
            h = self.cell(row, h)
        out: Tensor = self.classifier(F.relu(self.mlp(self.norm(h))))
        return out


ROLES = {"recurrent": r"cell\.\w+", "mlp.up": r"mlp", "norm": r"norm", "embedding": r"embed", "head": r"classifier"}


def build(seed: int, rank: int = 0) -> Training:
    """128 or 256 units, 64 digits."""
    rng = parts.drawing("recurrent", seed)
    model = Reader(int(rng.choice([128, 256])))
    rate = parts.learning_rate(rng, 2e-2, 8e-2)
    return Training(
        family="recurrent",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4),
        batch=images(seed, 64),
        loss=lambda m, b: F.cross_entropy(m(b["pixels"]), b["labels"]),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False, "classes": 10},
    )
