"""Distillation in small: Bloom of transformers with random weights (no positions but a bias that falls with the distance, fused qkv head by
head, a norm behind the embedding, a tied head) learns from a frozen teacher that was trained for a while: what the teacher says of each
next byte, and the byte itself. BF16 by autocast, Lion, a constant rate with an end along a root. The person plots how
far the two are apart."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from proving.data import next_bytes
from proving.families import parts
from proving.families.optimizers import Lion
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers",)
TEACHER_STEPS, TAUGHT = 240, 0.8
WARM, END = 12, 0.25

ROLES = {
    "blocks": r"transformer\.h\.\d+",
    "attention": r"transformer\.h\.\d+\.self_attention",
    "attention.qkv": r"transformer\.h\.\d+\.self_attention\.query_key_value",
    "attention.out": r"transformer\.h\.\d+\.self_attention\.dense",
    "mlp.up": r"transformer\.h\.\d+\.mlp\.dense_h_to_4h",
    "mlp.down": r"transformer\.h\.\d+\.mlp\.dense_4h_to_h",
    "norm": r"transformer\.h\.\d+\.\w+_layernorm|transformer\.(word_embeddings_layernorm|ln_f)",
    "embedding": r"transformer\.word_embeddings",
    "head": r"lm_head",
}


def _bloom(layers: int) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        vocab_size=256, hidden_size=128, n_layer=layers, n_head=4, use_cache=False, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = BloomForCausalLM(config)
    return model


@lru_cache(maxsize=1)
def teacher_weights() -> dict[str, Tensor]:
    """Trained once on the first half of the text and kept in build/proving/base."""
    return parts.trained_once("bloom", lambda: _bloom(2), TEACHER_STEPS, 998)


class Distillation:
    """What the teacher says, and a little of the byte itself; remembers how far student and teacher are apart for the plots."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher.requires_grad_(False).eval()
        self.plots: dict[str, float] = {}

    def taught(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the teacher: [B, T] -> [B, T, vocabulary]."""
        with torch.no_grad():
            logits: Tensor = self.teacher(input_ids=tokens).logits.float()
        return logits.log_softmax(-1)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch["input_ids"]).logits
            taught = self.taught(batch["input_ids"])
        learnt = logits.float().log_softmax(-1)
        apart = F.kl_div(learnt.flatten(0, 1), taught.flatten(0, 1), reduction="batchmean", log_target=True)
        alike = (learnt.argmax(-1) == taught.argmax(-1)).float().mean()
        self.plots = {"teacher_kl": float(apart.detach()), "agreement": float(alike)}
        return TAUGHT * apart + (1 - TAUGHT) * parts.next_token_loss(logits, batch["labels"])


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128, a teacher of 2, 6 × 48 bytes."""
    rng = parts.drawing("distil", seed)
    model = _bloom(int(rng.integers(2, 4)))
    model.train()
    teacher = _bloom(2)
    teacher.load_state_dict(teacher_weights())
    loss = Distillation(teacher)
    peak = parts.learning_rate(rng, 1.5e-4, 4e-4)
    decays = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1}]
    t = Training(
        family="distil",
        model=model,
        optimizer=Lion([*decays, {"params": [p for p in model.parameters() if p.ndim < 2]}], lr=peak),
        batch=next_bytes(seed, 6, 48),
        loss=loss,
        log=lambda t, step: dict(loss.plots),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": True, "vocab": 256, "distillation": loss},
    )
    t.schedule = lambda step: (
        peak * min((step + 1) / WARM, 1.0 - max(0.0, 1 - (t.steps - step) / (END * t.steps)) ** 0.5)
    )
    return t
