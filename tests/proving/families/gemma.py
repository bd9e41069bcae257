"""Gemma 3 of transformers with random weights, fine-tuned on prompts and answers: grouped queries with normed q and k, a sliding window in
every other layer, sandwich norms, a tied head, padded rows of which the prompt is not scored, two micro-batches, a constant rate with
a linear end."""

from __future__ import annotations

import torch
from proving.data import IGNORED, generator, next_bytes, padded
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers",)
KV_HEADS, TOKENS, WINDOW = 2, 40, 16
WARM, END = 16, 0.3

ROLES = {
    "blocks": r"model\.layers\.\d+",
    "attention": r"model\.layers\.\d+\.self_attn",
    "attention.q": r"model\.layers\.\d+\.self_attn\.q_proj",
    "attention.k": r"model\.layers\.\d+\.self_attn\.k_proj",
    "attention.v": r"model\.layers\.\d+\.self_attn\.v_proj",
    "attention.out": r"model\.layers\.\d+\.self_attn\.o_proj",
    "mlp.gate": r"model\.layers\.\d+\.mlp\.gate_proj",
    "mlp.up": r"model\.layers\.\d+\.mlp\.up_proj",
    "mlp.down": r"model\.layers\.\d+\.mlp\.down_proj",
    "norm": r"model\.layers\.\d+\.\w+_layernorm|model\.norm",
    "embedding": r"model\.embed_tokens",
    "head": r"lm_head",
}


def answered(seed: int, number: int, batch: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """The first part of each row is its prompt: read, and not scored."""
    rows, tokens = batch["labels"].shape
    length = (tokens * share * (0.5 + torch.rand(rows, 1, generator=generator(seed, number, 2)))).long()
    return batch | {"labels": batch["labels"].masked_fill(torch.arange(tokens) < length, IGNORED)}


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128 with an MLP of 256 or 384, 2 × 4 rows of 16–40 bytes."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    rng = parts.drawing("gemma", seed)
    layers = int(rng.integers(2, 4))
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=256, hidden_size=128, intermediate_size=int(rng.choice([256, 384])), num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=32, query_pre_attn_scalar=32,
            layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
            sliding_window=WINDOW, max_position_embeddings=64, tie_word_embeddings=True, use_cache=False,
            pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    model.train()
    peak, prompt = parts.learning_rate(rng, 1e-3, 3e-3), float(rng.uniform(0.2, 0.35))
    rows = padded(next_bytes(seed, 4, TOKENS), seed, pad=0)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return parts.next_token_loss(logits, batch["labels"])

    t = Training(
        family="gemma",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.05, beta2=0.98),
        batch=lambda number: answered(seed, number, rows(number), prompt),
        loss=loss,
        accumulate=2,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": True, "vocab": 256, "kv_heads": KV_HEADS},
    )
    t.schedule = lambda step: peak * min((step + 1) / WARM, 1.0, (t.steps - step) / (END * t.steps))
    return t
