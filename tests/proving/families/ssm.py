"""A gated linear recurrence (a state-space model with input-dependent decay): Linears around a scan, no attention. MXFP8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import next_bytes
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn


class Mixer(nn.Module):
    """h_t = a_t · h_{t−1} + (1 − a_t) · v_t with a_t of the input, for each channel; gated by silu(z_t)."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm = parts.RMSNorm(dim)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.decay_proj = nn.Linear(inner, inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)
        nn.init.uniform_(self.decay_proj.bias, 1.0, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        value = F.silu(self.conv(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        log_decay = F.logsigmoid(self.decay_proj(value))
        update = value * (-torch.expm1(log_decay))
        total = log_decay.cumsum(1)
        # [B, T, S, inner] of decays from s to t; T is short
        between = (total[:, :, None] - total[:, None, :]).masked_fill(
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)[None, :, :, None], float("-inf")
        )
        state = torch.einsum("btsd,bsd->btd", between.exp(), update)
        out: Tensor = x + self.out_proj(state * F.silu(gate))
        return out


ROLES = {
    "blocks": r"layers\.\d+",
    "recurrent": r"layers\.\d+\.(in_proj|decay_proj|out_proj)",
    "mlp.up": r"layers\.\d+\.in_proj",
    "mlp.down": r"layers\.\d+\.out_proj",
    "norm": r"layers\.\d+\.norm|norm",
    "embedding": r"tok_embeddings",
    "head": r"output",
}


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128, 4 × 32 bytes."""
    rng = parts.drawing("ssm", seed)
    model = parts.Decoder(256, 128, [Mixer(128, 128) for _ in range(int(rng.integers(2, 4)))])
    peak = parts.learning_rate(rng, 1e-3, 4e-3)
    t = Training(
        family="ssm",
        model=model,
        optimizer=parts.adamw(model, peak),
        batch=next_bytes(seed, 4, 32),
        loss=lambda m, b: parts.next_token_loss(m(b["input_ids"]), b["labels"]),
        recipe="mxfp8",
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
