"""A neural codec in small: waves of a few partials in frames, an encoder of residual MLPs and attention, a residual quantiser of three
codebooks behind a bottleneck with gradients straight through it, a decoder likewise; absolute and squared error, spectra, and what ties
vectors to their codes. Current scaling; the person plots how many codes are in use."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

FRAME, FRAMES, CODES, STAGES, NARROW = 64, 12, 64, 3, 16
COMMITMENT, SPECTRUM = 0.25, 0.2
WARM = 12


class Attention(nn.Module):
    """Every frame sees every other: x [B, T, dim] -> the same."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts.rotate(q), parts.rotate(k), v)
        out: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Norm, attention, norm, MLP, each added with a gain that begins small."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, 4)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.gain1, self.gain2 = (nn.Parameter(torch.full((dim,), 0.3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain1 * self.attn(self.norm1(x))
        out: Tensor = x + self.gain2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class Codebooks(nn.Module):
    """Each stage takes the nearest of 64 vectors to what the stages before have left: z [B, T, 16] -> codes' sum, ties, shares in use."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(STAGES, CODES, NARROW) * 0.5 ** torch.arange(STAGES)[:, None, None])

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, float]:
        left, taken, ties, in_use = z.float(), torch.zeros_like(z, dtype=torch.float32), z.new_zeros(()), 0.0
        for vectors in self.vectors:
            nearest = torch.cdist(left.detach().flatten(0, 1), vectors.detach()).argmin(1)
            code = vectors[nearest].view_as(left)
            ties = ties + F.mse_loss(code, left.detach()) + COMMITMENT * F.mse_loss(left, code.detach())
            taken, left = taken + code, left - code.detach()
            in_use += len(nearest.unique()) / CODES / STAGES
        return z + (taken - z).detach(), ties, in_use


class Codec(nn.Module):
    """Frames [B, T, 64] -> frames as they are heard again, ties, share of the codes in use."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.frames, self.narrow = nn.Linear(FRAME, dim), nn.Linear(dim, NARROW)
        self.encoder = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.codebooks = Codebooks()
        self.wide, self.wave = nn.Linear(NARROW, dim), nn.Linear(dim, FRAME)
        self.decoder = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor, float]:
        x = self.frames(frames)
        for layer in self.encoder:
            x = layer(x)
        codes, ties, in_use = self.codebooks(self.narrow(self.norm1(x)))
        x = self.wide(codes)
        for layer in self.decoder:
            x = layer(x)
        return self.wave(self.norm2(x)), ties, in_use


ROLES = {
    "blocks": r"(encoder|decoder)\.\d+",
    "attention": r"(encoder|decoder)\.\d+\.attn",
    "attention.qkv": r"(encoder|decoder)\.\d+\.attn\.in_proj",
    "attention.out": r"(encoder|decoder)\.\d+\.attn\.out_proj",
    "mlp.up": r"(encoder|decoder)\.\d+\.fc1|wide",
    "mlp.down": r"(encoder|decoder)\.\d+\.fc2|narrow",
    "norm": r"(encoder|decoder)\.\d+\.norm\d|norm\d",
    "embedding": r"frames",
}


def waves(seed: int, number: int, rows: int) -> dict[str, Tensor]:
    """Tones of four partials that swell and fade, under a little noise: frames [rows, T, 64]."""
    random = generator(seed, number)
    time = torch.arange(FRAME * FRAMES) / (FRAME * FRAMES)
    pitch = 6 * 2 ** (2.5 * torch.rand(rows, 1, 1, generator=random))
    size, phase, swell = (torch.rand(rows, 4, 1, generator=random) for _ in range(3))
    partials = torch.arange(1, 5)[:, None]
    tone = (2 * math.pi * (pitch * partials * time + phase)).sin() * (0.2 + size) / partials
    tone = (tone * (0.6 + 0.4 * (2 * math.pi * (time + swell)).sin())).sum(1)
    return {"frames": (tone + 0.02 * torch.randn(tone.shape, generator=random)).unflatten(1, (FRAMES, FRAME))}


class Loss:
    """What is heard again against what was said; remembers its parts for the plots."""

    def __init__(self) -> None:
        self.plots: dict[str, float] = {}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        heard, ties, in_use = model(batch["frames"])
        heard, right = heard.float(), batch["frames"]
        spectra = [torch.fft.rfft(x.flatten(1), norm="ortho").abs() for x in (heard, right)]
        wave = (heard - right).abs().mean() + (heard - right).square().mean()
        self.plots = {"reconstruction": float(wave.detach()), "codes_in_use": in_use}
        loss: Tensor = wave + SPECTRUM * (spectra[0] - spectra[1]).abs().mean() + ties
        return loss


def build(seed: int, rank: int = 0) -> Training:
    """1–2 layers of 128 on each side, 16 waves of 12 frames."""
    rng = parts.drawing("codec", seed)
    model, loss = Codec(128, int(rng.integers(1, 3))), Loss()
    peak = parts.learning_rate(rng, 6e-4, 2e-3)
    t = Training(
        family="codec",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.01, beta2=0.99),
        batch=lambda number: waves(seed, number, 16),
        loss=loss,
        recipe="current",
        clip_norm=5.0,
        log=lambda t, step: dict(loss.plots),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False},
    )
    t.schedule = lambda step: peak * min(1.0, (step + 1) / WARM) * 0.995**step
    return t
