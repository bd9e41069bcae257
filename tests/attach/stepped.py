"""A small model with a table and Linears, steps of its training, and the optimizers that people use."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 64


class Deep(nn.Module):
    """A table and four Linears; returns a loss."""

    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.again, self.spoil = again, False
        self.register_buffer("aim", torch.randn(DIM))

    def block(self, x):
        for layer in self.layers[:2]:
            x = x + torch.relu(layer(x))
        return x

    def run(self, x, seen):
        seen.append(1)
        return self.block(x.roll(1, 0) if self.spoil and len(seen) > 1 else x)

    def forward(self, tokens):
        x = self.table(tokens)
        x = checkpoint(self.run, x, [], use_reentrant=False) if self.again else self.block(x)
        for layer in self.layers[2:]:
            x = x + torch.relu(layer(x))
        return (x - self.aim).square().mean()  # not to be had with smaller weights


def steps(model, optimizer, num, *, first=0, before=None, after=None, clear=True, micro=1):
    """Training on other tokens in each step."""
    for step in range(first, first + num):
        if clear:
            optimizer.zero_grad()
        for i in range(micro):
            g = torch.Generator().manual_seed(100 * step + i)
            model(torch.randint(64, (4, 16), generator=g)).backward()
        if before is not None:
            before(step)
        optimizer.step()
        if after is not None:
            after(step)


def adam(model, **kwargs):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **kwargs)


OPTIMIZERS = {
    "AdamW": adam,
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.1),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
}
