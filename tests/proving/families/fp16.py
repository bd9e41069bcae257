"""Mixed FP16 by autocast with a GradScaler on a Llama: the scale grows until steps are skipped."""

from __future__ import annotations

import torch
from proving.data import next_bytes
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128 or 192, 4 × 48 bytes; the scale doubles every 20–40 good steps."""
    rng = parts.drawing("fp16", seed)
    model = parts.llama(rng)
    peak = parts.learning_rate(rng, 1e-3, 3e-3)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            logits = model(batch["input_ids"])
        return parts.next_token_loss(logits, batch["labels"])

    t = Training(
        family="fp16",
        model=model,
        optimizer=parts.adamw(model, peak),
        batch=next_bytes(seed, 4, 48),
        loss=loss,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=int(rng.integers(20, 41))),
        seed=seed,
        notes=parts.roles(model, parts.LLAMA_ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
