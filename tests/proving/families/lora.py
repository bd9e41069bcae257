"""LoRA by peft on a Llama of transformers that was trained for a while: frozen base, small adapters, another domain of text."""

from __future__ import annotations

from functools import lru_cache

from proving.data import next_bytes, padded
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers", "peft")
BASE_STEPS = 80

_BASE = r"base_model\.model\.model\.layers\.\d+"
ROLES = {
    "blocks": _BASE,
    "attention": _BASE + r"\.self_attn",
    "attention.q": _BASE + r"\.self_attn\.q_proj(\.base_layer)?",
    "attention.k": _BASE + r"\.self_attn\.k_proj",
    "attention.v": _BASE + r"\.self_attn\.v_proj(\.base_layer)?",
    "attention.out": _BASE + r"\.self_attn\.o_proj",
    "mlp.gate": _BASE + r"\.mlp\.gate_proj",
    "mlp.up": _BASE + r"\.mlp\.up_proj",
    "mlp.down": _BASE + r"\.mlp\.down_proj",
    "norm": _BASE + r"\.\w+_layernorm|base_model\.model\.model\.norm",
    "embedding": r"base_model\.model\.model\.embed_tokens",
    "head": r"base_model\.model\.lm_head",
    "adapter": r".*\.lora_[AB]\.default",
}


def _config() -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


@lru_cache(maxsize=1)
def base_weights() -> dict[str, Tensor]:
    """The model that is fine-tuned, trained once on the first half of the text and kept in build/proving/base."""
    from transformers import LlamaForCausalLM

    return parts.trained_once("llama", lambda: LlamaForCausalLM(_config()), BASE_STEPS, 999)


def build(seed: int, rank: int = 0) -> Training:
    """Rank 4–16 on q and v, or on all Linears of a block; 4 × 48 bytes, padded."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    rng = parts.drawing("lora", seed)
    base = LlamaForCausalLM(_config())
    base.load_state_dict(base_weights())
    where = [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]]
    adapted = LoraConfig(
        r=int(rng.choice([4, 8, 16])), lora_alpha=16, lora_dropout=0.0, target_modules=where[int(rng.integers(2))]
    )
    model = get_peft_model(base, adapted)
    model.train()
    peak = parts.learning_rate(rng, 1e-3, 5e-3)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return parts.next_token_loss(logits, batch["labels"])

    t = Training(
        family="lora",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.0, beta2=0.999),
        batch=padded(next_bytes(seed, 4, 48, (0.5, 1.0)), seed, pad=0),
        loss=loss,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": True, "vocab": 256},
    )
    t.schedule = parts.warm_cosine(peak, t.steps, warm=10, floor=0.0)
    return t
