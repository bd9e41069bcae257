"""Speech recognition in small: spectra of letters that follow a text, a convolutional stem, conformer blocks (half MLP, attention,
convolution, half MLP) with dropout, a CTC loss, an inverse square root schedule, MXFP8."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator, windows
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

SYMBOLS, BANDS, SPELLED = 24, 32, 7
"""Letters besides the blank, mel bands, and letters of a row."""
FRAMES, SHORTEST, LONGEST = 48, 4, 6
"""Frames of a row, and of a letter."""


class Attention(nn.Module):
    """x [B, T, dim], keep [B, 1, 1, T] -> [B, T, dim]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linear_q, self.linear_k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.linear_v, self.linear_out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.linear_q, self.linear_k, self.linear_v)
        )
        out: Tensor = self.linear_out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(-2)
        )
        return out


class Convolution(nn.Module):
    """Pointwise with a gate, depthwise along the time, pointwise: Linears around a depthwise convolution."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pointwise1, self.pointwise2 = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.depthwise = nn.Conv1d(dim, dim, 5, padding=2, groups=dim)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = F.glu(self.pointwise1(x), dim=-1) * keep
        out: Tensor = self.pointwise2(F.silu(self.depthwise(y.transpose(1, 2)).transpose(1, 2)))
        return out


class Half(nn.Module):
    """An MLP, added at half."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 0.5 * self.down(F.silu(self.up(x)))
        return out


class Conformer(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.feed_forward1, self.feed_forward2 = Half(dim), Half(dim)
        self.self_attn, self.conv = Attention(dim, 4), Convolution(dim)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(dim) for _ in range(4))
        self.norm_out, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        x = x + self.dropout(self.feed_forward1(self.norm1(x)))
        x = x + self.dropout(self.self_attn(self.norm2(x), there[:, None, None]))
        x = x + self.dropout(self.conv(self.norm3(x), there[..., None]))
        out: Tensor = self.norm_out(x + self.dropout(self.feed_forward2(self.norm4(x))))
        return out


class Recognizer(nn.Module):
    """Spectra [B, frames, bands] and their lengths [B] -> log-probabilities [B, frames / 2, symbols + 1], blank first."""

    def __init__(self, dim: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv1d(BANDS, dim, 3, stride=2, padding=1)
        self.proj = nn.Linear(dim, dim)
        self.position = nn.Parameter(0.02 * torch.randn(FRAMES // 2, dim))
        self.encoder = nn.ModuleList(Conformer(dim, dropout) for _ in range(layers))
        self.ctc_head = nn.Linear(dim, SYMBOLS + 1)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        x = self.proj(F.relu(self.stem(frames.transpose(1, 2))).transpose(1, 2)) + self.position
        there = torch.arange(x.shape[1]) < lengths[:, None] // 2
        for block in self.encoder:
            x = block(x, there)
        out: Tensor = self.ctc_head(x).float().log_softmax(-1)
        return out


ROLES = {
    "blocks": r"encoder\.\d+",
    "attention": r"encoder\.\d+\.self_attn",
    "attention.q": r"encoder\.\d+\.self_attn\.linear_q",
    "attention.k": r"encoder\.\d+\.self_attn\.linear_k",
    "attention.v": r"encoder\.\d+\.self_attn\.linear_v",
    "attention.out": r"encoder\.\d+\.self_attn\.linear_out",
    "mlp.up": r"encoder\.\d+\.feed_forward\d\.up",
    "mlp.down": r"encoder\.\d+\.feed_forward\d\.down",
    "norm": r"encoder\.\d+\.norm\w*",
    "embedding": r"stem",
    "head": r"ctc_head",
}


def spoken(seed: int, number: int, rows: int) -> dict[str, Tensor]:
    """Bytes of some text are steps along an alphabet; each letter is a few frames of its own spectrum, by a speaker with a gain and a
    tilt, under noise."""
    steps, random = 1 + windows(seed, number, rows, SPELLED) % (SYMBOLS - 1), generator(seed, number, 1)
    letters = steps.cumsum(1) % SYMBOLS  # no letter twice in a row: CTC would need a blank between
    alphabet = torch.randn(SYMBOLS, BANDS, generator=torch.Generator().manual_seed(1))
    span = torch.randint(SHORTEST, LONGEST + 1, (rows, SPELLED), generator=random)
    ends = span.cumsum(1)
    lengths = ends[:, -1]
    which = torch.searchsorted(ends, torch.arange(FRAMES).expand(rows, -1).contiguous(), right=True)
    gain = 0.7 + 0.6 * torch.rand(rows, 1, 1, generator=random)
    tilt = torch.linspace(-0.5, 0.5, BANDS) * torch.randn(rows, 1, 1, generator=random)
    frames = gain * alphabet[letters.gather(1, which.clamp(max=SPELLED - 1))] + tilt
    frames = frames + 1.5 * torch.randn(frames.shape, generator=random)
    there = torch.arange(FRAMES) < lengths[:, None]
    return {"frames": frames * there[..., None], "lengths": lengths, "labels": letters + 1}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """CTC, by letter."""
    found = model(batch["frames"], batch["lengths"]).transpose(0, 1)
    spelled = torch.full((len(batch["labels"]),), SPELLED)
    return F.ctc_loss(found, batch["labels"], batch["lengths"] // 2, spelled, zero_infinity=True)


def build(seed: int, rank: int = 0) -> Training:
    """2 blocks of 128, 8 rows of 28–42 frames."""
    rng = parts.drawing("speech", seed)
    model = Recognizer(128, 2, float(rng.choice([0.05, 0.1])))
    peak, warm = parts.learning_rate(rng, 1e-3, 2e-3), int(rng.integers(20, 36))
    t = Training(
        family="speech",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.01, beta2=0.98),
        batch=lambda number: spoken(seed, number, 8),
        loss=loss,
        recipe="mxfp8",
        clip_norm=5.0,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False},
    )
    t.schedule = lambda step: peak * min((step + 1) / warm, math.sqrt(warm / (step + 1)))
    return t
