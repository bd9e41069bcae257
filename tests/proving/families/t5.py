"""Encoder–decoder of transformers: T5 with gated GELU, spans of text to be restored, padded rows, an inverse square root schedule."""

from __future__ import annotations

import torch
from proving.data import IGNORED, generator, windows
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers",)
VOCAB, PAD, MASK = 288, 257, 258

ROLES = {
    "blocks": r"(encoder|decoder)\.block\.\d+",
    "attention": r".*\.(SelfAttention|EncDecAttention)",
    "attention.q": r".*Attention\.q",
    "attention.k": r".*Attention\.k",
    "attention.v": r".*Attention\.v",
    "attention.out": r".*Attention\.o",
    "mlp.gate": r".*DenseReluDense\.wi_0",
    "mlp.up": r".*DenseReluDense\.wi_1",
    "mlp.down": r".*DenseReluDense\.wo",
    "norm": r".*layer_norm",
    "embedding": r"shared",
    "head": r"lm_head",
}


def build(seed: int, rank: int = 0) -> Training:
    """1 + 2 layers of 128, 6 rows of 32–48 bytes with a span of 8–16 masked out."""
    from transformers import T5Config, T5ForConditionalGeneration

    rng = parts.drawing("t5", seed)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=128, d_kv=32, d_ff=256, num_layers=1, num_decoder_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", dropout_rate=float(rng.choice([0.0, 0.1])), pad_token_id=PAD,
            eos_token_id=256, decoder_start_token_id=PAD, tie_word_embeddings=True, use_cache=False,
        )
    )  # fmt: skip
    model.train()
    peak = parts.learning_rate(rng, 1e-3, 3e-3)

    def batch(number: int) -> dict[str, Tensor]:
        tokens = windows(seed, number, 6, 48)
        random = generator(seed, number, 1)
        length = torch.randint(32, 49, (6, 1), generator=random)
        span = torch.randint(8, 17, (6, 1), generator=random)
        begin = (torch.rand(6, 1, generator=random) * (length - span)).long()
        place = torch.arange(48)
        hidden = (place >= begin) & (place < begin + span)
        target = tokens.gather(1, (begin + torch.arange(16)).clamp(max=47))
        return {
            "input_ids": tokens.masked_fill(hidden, MASK).masked_fill(place >= length, PAD),
            "attention_mask": (place < length).long(),
            "labels": target.masked_fill(torch.arange(16) >= span, IGNORED),
        }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    t = Training(
        family="t5",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.01, beta2=0.999),
        batch=batch,
        loss=loss,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": True, "vocab": VOCAB},
    )
    t.schedule = lambda step: peak * min((step + 1) / 30, (30 / (step + 1)) ** 0.5)
    return t
