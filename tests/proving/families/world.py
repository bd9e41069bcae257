"""A small world model: frames of two bodies that are pushed around, a stochastic latent for each, a causal transformer as its dynamics,
reconstruction and a KL term with free nats, delayed scaling. Nothing is classified; the loss is a sum of squares."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

SIZE, TIMES, LATENT = 12, 10, 32
FREE_NATS, KL_WEIGHT = 1.0, 0.5


class Dynamics(nn.Module):
    """Norm, causal attention, norm, MLP: what is known of the next latent from those before."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = parts.RMSNorm(dim, 1e-4), parts.RMSNorm(dim, 1e-4)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, dim))
        out: Tensor = x + self.fc2(F.silu(self.fc1(self.norm2(x))))
        return out


class World(nn.Module):
    """Frames [B, T, pixels] and actions [B, T, 2] -> frames as they are read back, posteriors and priors [B, T, 2 · latent]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(SIZE * SIZE, 2 * dim)
        self.posterior = nn.Linear(2 * dim, 2 * LATENT)
        self.action = nn.Linear(2, dim)
        self.mix = nn.Linear(LATENT, dim)
        self.time = nn.Parameter(0.02 * torch.randn(TIMES, dim))
        self.blocks = nn.ModuleList(Dynamics(dim, 4) for _ in range(layers))
        self.norm = parts.RMSNorm(dim, 1e-4)
        self.prior = nn.Linear(dim, 2 * LATENT)
        self.decoder1 = nn.Linear(LATENT, 2 * dim)
        self.decoder2 = nn.Linear(2 * dim, SIZE * SIZE)

    def forward(self, frames: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        posterior = self.posterior(F.silu(self.encoder(frames)))
        mean, log_std = posterior.chunk(2, -1)
        latent = mean + torch.randn_like(mean) * log_std.clamp(-5, 2).exp()
        x = self.mix(latent) + self.action(actions) + self.time
        for block in self.blocks:
            x = block(x)
        read = self.decoder2(F.silu(self.decoder1(latent)))
        return read, posterior, self.prior(self.norm(x))


ROLES = {
    "blocks": r"blocks\.\d+",
    "attention": r"blocks\.\d+",
    "attention.qkv": r"blocks\.\d+\.qkv",
    "attention.out": r"blocks\.\d+\.proj",
    "mlp.up": r"blocks\.\d+\.fc1|encoder|decoder1",
    "mlp.down": r"blocks\.\d+\.fc2|posterior|decoder2",
    "norm": r"blocks\.\d+\.norm\d|norm",
    "embedding": r"encoder",
    "head": r"prior",
}


def pushed(seed: int, number: int, rows: int) -> dict[str, Tensor]:
    """Two bodies on a torus, of which one is pushed by an action a frame: frames [rows, T, pixels] in −0.5…0.5 or so."""
    random = generator(seed, number)
    actions = torch.randn(rows, TIMES, 2, generator=random)
    speed = torch.randn(rows, 1, 2, 2, generator=random) + F.pad(0.5 * actions.cumsum(1)[:, :, None], (0, 0, 0, 1))
    place = (SIZE * torch.rand(rows, 1, 2, 2, generator=random) + speed.cumsum(1)) % SIZE
    grid = torch.arange(SIZE)
    away = (place[..., None] - grid + SIZE / 2) % SIZE - SIZE / 2
    shape = (-away.square() / torch.tensor([3.0, 1.5])[:, None, None]).exp()
    frames = (shape[..., 0, :, None] * shape[..., 1, None, :]).sum(2)
    frames = frames + 0.05 * torch.randn(frames.shape, generator=random) - 0.1
    return {"frames": frames.flatten(2), "actions": actions}


def divergence(of: Tensor, beside: Tensor) -> Tensor:
    """KL of diagonal normals, summed over the latent: [..., 2 · latent] twice -> [...]."""
    (mean, log_std), (other, other_log_std) = (x.float().chunk(2, -1) for x in (of, beside))
    log_std, other_log_std = log_std.clamp(-5, 2), other_log_std.clamp(-5, 2)
    ratio = (2 * (log_std - other_log_std)).exp()
    far = ((mean - other) / other_log_std.exp()).square()
    out: Tensor = 0.5 * (ratio + far - 1 - ratio.log()).sum(-1)
    return out


class Loss:
    """Squares of what is read back, and how far each latent is from what was known of it; remembers both for the plots."""

    def __init__(self) -> None:
        self.plots: dict[str, float] = {}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        read, posterior, prior = model(batch["frames"], batch["actions"])
        squares = (read.float() - batch["frames"]).square().sum(-1).mean()
        kl = divergence(posterior[:, 1:], prior[:, :-1]).mean()
        self.plots = {"reconstruction": float(squares.detach()), "kl": float(kl.detach())}
        return squares + KL_WEIGHT * kl.clamp(min=FREE_NATS)


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128, 16 rows of 10 frames."""
    rng = parts.drawing("world", seed)
    model = World(128, int(rng.integers(2, 4)))
    rate, loss = parts.learning_rate(rng, 5e-4, 1.5e-3), Loss()
    return Training(
        family="world",
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate, eps=1e-6),
        batch=lambda number: pushed(seed, number, 16),
        loss=loss,
        recipe="delayed",
        clip_norm=100.0,
        schedule=lambda step: rate * min(1.0, (step + 1) / 12) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / 400))),
        log=lambda t, step: dict(loss.plots),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": False},
    )
