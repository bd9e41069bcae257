"""Qwen3-MoE of transformers with random weights: fused experts, q and k norms, the router's auxiliary loss."""

from __future__ import annotations

from proving.data import next_bytes
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers",)

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
    "router": r"model\.layers\.\d+\.mlp\.gate",
}


def build(seed: int, rank: int = 0) -> Training:
    """3 layers of 128, the first dense, 4–8 experts, 4 × 48 bytes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    rng = parts.drawing("qwen_moe", seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=int(rng.choice([4, 8])),
            num_experts_per_tok=2, mlp_only_layers=[0], max_position_embeddings=64, output_router_logits=True,
            router_aux_loss_coef=0.01, norm_topk_prob=True, tie_word_embeddings=False, use_cache=False,
            pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    model.train()
    peak = parts.learning_rate(rng, 1e-3, 3e-3)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        found: Tensor = model(input_ids=batch["input_ids"], labels=labels, shift_labels=labels).loss
        return found

    t = Training(
        family="qwen_moe",
        model=model,
        optimizer=parts.adamw(model, peak),
        batch=next_bytes(seed, 4, 48),
        loss=loss,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps)
    return t
