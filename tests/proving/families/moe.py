"""A mixture of experts in plain Linears, as first versions are written: top-2 of 4–6 experts, a balance loss, a z-loss, one shared trunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving.data import next_bytes
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn


class Experts(nn.Module):
    """Each token goes to its two best experts. `extra_loss` holds balance and z-loss of the last forward pass."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(parts.SwiGLU(dim, hidden) for _ in range(num_experts))
        self.extra_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        logits = self.router(flat).float()
        weights, chosen = logits.softmax(-1).topk(self.top, dim=-1)
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        balance = len(self.experts) * (share * logits.softmax(-1).mean(0)).sum()
        self.extra_loss = 0.01 * balance + 1e-3 * logits.logsumexp(-1).pow(2).mean()
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


def loss_with_extras(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy, balance and z-loss."""
    loss = parts.next_token_loss(model(batch["input_ids"]), batch["labels"])
    return loss + sum(m.extra_loss for m in model.modules() if isinstance(m, Experts))


def build(seed: int, rank: int = 0) -> Training:
    """2 layers of 128, 4 × 64 bytes."""
    rng = parts.drawing("moe", seed)
    num_experts = int(rng.integers(4, 7))
    model = parts.Decoder(256, 128, [parts.Block(128, 4, 2, Experts(128, 128, num_experts)) for _ in range(2)])
    peak = parts.learning_rate(rng, 1e-3, 3e-3)
    t = Training(
        family="moe",
        model=model,
        optimizer=parts.adamw(model, peak),
        batch=next_bytes(seed, 4, 64),
        loss=loss_with_extras,
        seed=seed,
        notes=parts.roles(model, parts.LLAMA_ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
