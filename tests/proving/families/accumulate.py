"""Gradient accumulation: rows of different lengths, padded and masked in the loss, two or three micro-batches a step, plain Adam,
delayed scaling."""

from __future__ import annotations

import torch
from proving.data import next_bytes, padded
from proving.families import parts
from proving.training import Training


def build(seed: int, rank: int = 0) -> Training:
    """A Llama on 2–3 micro-batches of 4 × 40 bytes."""
    rng = parts.drawing("accumulate", seed)
    model = parts.llama(rng)
    peak = parts.learning_rate(rng, 5e-4, 2e-3)
    t = Training(
        family="accumulate",
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=peak),
        batch=padded(next_bytes(seed, 4, 40), seed, pad=0),
        loss=lambda m, b: parts.next_token_loss(m(b["input_ids"]), b["labels"]),
        recipe="delayed",
        accumulate=int(rng.integers(2, 4)),
        clip_norm=None,
        seed=seed,
        notes=parts.roles(model, parts.LLAMA_ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
