"""Llama in torchtitan's names: RMSNorm, rotary positions, grouped queries, SwiGLU, untied head."""

from __future__ import annotations

from proving.data import next_bytes
from proving.families import parts
from proving.training import Training


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128 or 192, 4 × 64 bytes."""
    rng = parts.drawing("llama", seed)
    model = parts.llama(rng)
    peak = parts.learning_rate(rng, 1e-3, 4e-3)
    t = Training(
        family="llama",
        model=model,
        optimizer=parts.adamw(model, peak),
        batch=next_bytes(seed, 4, 64),
        loss=lambda m, b: parts.next_token_loss(m(b["input_ids"]), b["labels"]),
        seed=seed,
        notes=parts.roles(model, parts.LLAMA_ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
