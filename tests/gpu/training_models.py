"""Small models that the trainings of this room train, and what they train on."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

VOCAB = 512


class Mlp(nn.Module):
    """Gate, up and down, as Llama has them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Causal, by `scaled_dot_product_attention`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, d))
        return out


class Block(nn.Module):
    """Attention and MLP behind norms."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def _keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Lm(nn.Module):
    """A decoder that returns its loss. `recompute`: None, "nonreentrant", "reentrant" or "selective"."""

    def __init__(self, dim: int = 256, layers: int = 3, *, tied: bool = False, recompute: str | None = None) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(1024, dim)
        self.layers = nn.ModuleList(Block(dim, max(dim // 64, 1)) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.recompute = recompute

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = self._layer(layer, x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.recompute is None or not self.training:
            out: Tensor = layer(x)
        elif self.recompute == "selective":
            out = checkpoint(
                layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(_keep)
            )
        else:
            out = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return out


class Wide(nn.Module):
    """Linears of any widths in a row; the loss is the mean square of the last one's output beside a target of zeros."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.float().square().sum() / max(x.numel(), 1)


class Graph(nn.Module):
    """Two layers of torch-geometric and a Linear."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv, SAGEConv

        self.conv1, self.conv2 = SAGEConv(dim, dim), GATConv(dim, dim // 4, heads=4)
        self.out = nn.Linear(dim, 16)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.conv1(x, edges))
        x = F.relu(self.conv2(x, edges))
        return F.cross_entropy(self.out(x).float(), labels)


class Conv(nn.Module):
    """Convolutions with batch norm, and a Linear behind them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.hidden, self.out = nn.Linear(4 * width, 4 * width), nn.Linear(4 * width, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.hidden(self.features(x).flatten(1)))
        return F.cross_entropy(self.out(x).float(), labels)


class Encoder(nn.Module):
    """`nn.TransformerEncoderLayer`s, with `nn.MultiheadAttention` inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(self.encoder(self.embed(ids)))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def tokens(device: str, rows: int, length: int, count: int, vocab: int = VOCAB) -> list[tuple[Tensor, Tensor]]:
    """Batches of a text that can be learned: the next token follows from the one before, or is drawn."""
    generator = torch.Generator().manual_seed(7)
    follows = torch.randint(0, vocab, (vocab,), generator=generator)
    out = []
    for _ in range(count):
        ids = torch.randint(0, vocab, (rows, length + 1), generator=generator)
        drawn = torch.rand(rows, length + 1, generator=generator) < 0.2
        for t in range(1, length + 1):
            ids[:, t] = torch.where(drawn[:, t], ids[:, t], follows[ids[:, t - 1]])
        out.append((ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)))
    return out
