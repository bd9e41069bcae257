"""A training that is stopped and goes on in a new process from its checkpoint, healthy or not."""

from __future__ import annotations

from proving.data import next_bytes
from proving.families import parts
from proving.training import Training


def build(seed: int, rank: int = 0) -> Training:
    """A Llama on 4 × 64 bytes; the second leg begins at a drawn step."""
    rng = parts.drawing("resume", seed)
    model = parts.llama(rng)
    peak = parts.learning_rate(rng, 1e-3, 3e-3)
    t = Training(
        family="resume",
        model=model,
        optimizer=parts.adamw(model, peak),
        batch=next_bytes(seed, 4, 64),
        loss=lambda m, b: parts.next_token_loss(m(b["input_ids"]), b["labels"]),
        resume_at=int(rng.integers(58, 70)),
        seed=seed,
        notes=parts.roles(model, parts.LLAMA_ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
