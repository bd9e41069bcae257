"""Modules that multiply with parameters of their own, in the ways in which libraries do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

E, K, N = 4, 64, 96


class Experts(nn.Module):
    """Two products with the matrices of experts, of which each token sees one.

    Args:
        way: how they are multiplied: grouped, loop, gathered, gathered_turned, dense.
        transposed: the parameters are [E, K, N].
        tail: rows behind the last expert's that belong to nobody, and hold NaN.
    """

    def __init__(self, way="grouped", transposed=False, tail=0):
        super().__init__()
        self.way, self.transposed, self.tail = way, transposed, tail
        shapes = [(E, K, N), (E, N, K)] if transposed else [(E, N, K), (E, K, N)]
        self.up = nn.Parameter(torch.randn(*shapes[0]) * 0.1)
        self.down = nn.Parameter(torch.randn(*shapes[1]) * 0.1)
        self.up_bias = nn.Parameter(torch.zeros(E, N))

    def product(self, x, w, ids, ends):
        if self.way == "dense":
            return torch.bmm(x.view(E, -1, x.shape[-1]), w if self.transposed else w.mT).flatten(0, 1)
        if self.way == "grouped":
            y = F.grouped_mm(x, w if self.transposed else w.transpose(-2, -1), offs=ends)
            if self.tail:
                y = torch.cat((y[: int(ends[-1])], torch.full_like(y[int(ends[-1]) :], float("nan"))))
            return y
        if self.way == "gathered":
            return torch.bmm(x.unsqueeze(1), w[ids] if self.transposed else w[ids].mT).squeeze(1)
        if self.way == "gathered_turned":
            return torch.bmm(w[ids].mT if self.transposed else w[ids], x.unsqueeze(-1)).squeeze(-1)
        parts = []
        for e in range(E):
            mine = x[ids == e]
            if len(mine):
                parts.append(mine @ w[e] if self.transposed else F.linear(mine, w[e]))
        return torch.cat(parts)

    def forward(self, x, ids):
        ids, order = ids.sort()
        x = x[order]
        ends = torch.bincount(ids, minlength=E).cumsum(0).to(torch.int32)
        if self.way.startswith("gathered"):  # as tokens come
            x, ids = x.flip(0), ids.flip(0)
        if self.tail:
            x = torch.cat((x, torch.full((self.tail, x.shape[1]), float("nan"))))
        y = torch.relu(self.product(x, self.up, ids, ends))
        y = self.product(y, self.down, ids, ends)
        return y[: len(y) - self.tail] if self.tail else y


class Moe(nn.Module):
    """Experts between two Linears; returns a 0-d loss."""

    def __init__(self, **kwargs):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(K, K), Experts(**kwargs), nn.Linear(K, K)

    def forward(self, x, ids=None):
        if ids is None:
            ids = torch.arange(len(x)) * 7 % (E - 1)  # the last has no tokens
        if self.experts.way == "dense":
            ids = torch.arange(len(x)) % E
        return self.last(self.experts(self.first(x), ids)).pow(2).mean()


class Conv1D(nn.Module):
    """A Linear whose weight lies the other way round."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.1)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Fused(nn.Module):
    """A projection as a Parameter, cast before it is read, and one that is read from the left."""

    def __init__(self):
        super().__init__()
        self.wqkv = nn.Parameter(torch.randn(3 * K, K) * 0.1)
        self.mix = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.cls_token = nn.Parameter(torch.randn(32, K))

    def forward(self, x):
        q, k, v = F.linear((x + self.cls_token).bfloat16(), self.wqkv.to(torch.bfloat16)).float().chunk(3, dim=-1)
        return (self.mix @ (q * k + v)).pow(2).mean()


class Attention(nn.Module):
    """Self-attention and cross-attention of torch."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(K, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(K, 4, 2 * K, batch_first=True, dropout=0.0)

    def forward(self, x):
        x = x.view(2, -1, K)
        x = self.attention(x, x, x)[0]
        x = self.attention(x, x + 1, x + 1)[0]
        return self.layer(x).pow(2).mean()


class Small(nn.Module):
    """Conv1D twice; returns a 0-d loss."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Conv1D(K, N), Conv1D(N, K)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).pow(2).mean()


class EmbeddingHead(nn.Module):
    """A Linear, and a head that is the transpose of an embedding; returns a 0-d loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(N, K), nn.Linear(K, K)

    def forward(self, x):
        ids = torch.arange(len(x)) % N
        return F.cross_entropy(F.linear(torch.relu(self.up(x + self.embed(ids))), self.embed.weight), ids)


class Odd(nn.Module):
    """Linears whose sizes are no multiples of 16, so that rows of codes have to be padded; returns a 0-d loss."""

    def __init__(self):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(K, 75), nn.Linear(75, 50, bias=False), nn.Linear(50, K)

    def forward(self, x):
        return self.down(torch.relu(self.middle(torch.relu(self.up(x))))).pow(2).mean()
