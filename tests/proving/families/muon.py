"""A GPT as speed runs train it: Muon for matrices and Adam for the rest, norms without gains, normed q and k, squared ReLU, capped
logits, output projections that begin at zero, a constant rate and a linear end, no clipping."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import next_bytes
from proving.families import parts
from proving.families.optimizers import Muon
from proving.training import Training
from torch import Tensor, nn

CAP = 15.0


def normed(x: Tensor) -> Tensor:
    """By its RMS over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.c_q, self.c_k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.c_v, self.c_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (f(x).view(batch, tokens, self.num_heads, -1).transpose(1, 2) for f in (self.c_q, self.c_k, self.c_v))
        q, k = normed(parts.rotate(q)), normed(parts.rotate(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attn = SelfAttention(dim, num_heads)
        self.c_fc, self.c_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(normed(x))
        out: Tensor = x + self.c_proj(F.relu(self.c_fc(normed(x))).square())
        return out


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, 256]."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(256, dim)
        self.h = nn.ModuleList(Block(dim, 4) for _ in range(layers))
        self.lm_head = nn.Linear(dim, 256, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.zeros_(p)
            elif name == "lm_head.weight":
                nn.init.normal_(p, std=0.001)
            elif name == "wte.weight":
                nn.init.normal_(p)
            else:
                nn.init.uniform_(p, -((3 / p.shape[1]) ** 0.5), (3 / p.shape[1]) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = normed(self.wte(tokens))
        for block in self.h:
            x = block(x)
        out: Tensor = CAP * torch.tanh(self.lm_head(normed(x)) / CAP)
        return out


ROLES = {
    "blocks": r"h\.\d+",
    "attention": r"h\.\d+\.attn",
    "attention.q": r"h\.\d+\.attn\.c_q",
    "attention.k": r"h\.\d+\.attn\.c_k",
    "attention.v": r"h\.\d+\.attn\.c_v",
    "attention.out": r"h\.\d+\.attn\.c_proj",
    "mlp.up": r"h\.\d+\.c_fc",
    "mlp.down": r"h\.\d+\.c_proj",
    "embedding": r"wte",
    "head": r"lm_head",
}


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128, 6 × 48 bytes."""
    rng = parts.drawing("muon", seed)
    model = GPT(128, int(rng.integers(2, 4)))
    rate, decay = parts.learning_rate(rng, 0.01, 0.03), float(rng.choice([0.0, 0.1]))
    groups = [
        {"params": list(model.h.parameters()), "matrices": True, "weight_decay": decay},
        {"params": [model.wte.weight], "lr_scale": 5.0},
        {"params": [model.lm_head.weight], "lr_scale": 0.2},
    ]
    t = Training(
        family="muon",
        model=model,
        optimizer=Muon(groups, lr=rate),
        batch=next_bytes(seed, 6, 48),
        loss=lambda m, b: parts.next_token_loss(m(b["input_ids"]), b["labels"]),
        clip_norm=None,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": True, "vocab": 256, "rotary": True},
    )
    t.schedule = lambda step: rate * min(1.0, (t.steps - step) / (0.4 * t.steps))
    return t
