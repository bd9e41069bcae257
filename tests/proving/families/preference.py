"""Preference tuning in small: Phi of transformers with random weights (attention and MLP side by side behind one norm, half of each head
rotated, biases everywhere), pairs of a text that goes on and one that is garbled, DPO against a frozen reference with a part of the
likelihood of the better one, current scaling. The person plots margin and accuracy."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from proving.data import generator, text, windows
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers",)
TOKENS, PROMPT = 40, 12
BETA, LIKELIHOOD = 0.1, 0.5
WARM = 16

ROLES = {
    "blocks": r"model\.layers\.\d+",
    "attention": r"model\.layers\.\d+\.self_attn",
    "attention.q": r"model\.layers\.\d+\.self_attn\.q_proj",
    "attention.k": r"model\.layers\.\d+\.self_attn\.k_proj",
    "attention.v": r"model\.layers\.\d+\.self_attn\.v_proj",
    "attention.out": r"model\.layers\.\d+\.self_attn\.dense",
    "mlp.up": r"model\.layers\.\d+\.mlp\.fc1",
    "mlp.down": r"model\.layers\.\d+\.mlp\.fc2",
    "norm": r"model\.layers\.\d+\.input_layernorm|model\.final_layernorm",
    "embedding": r"model\.embed_tokens",
    "head": r"lm_head",
}


def pairs(seed: int, number: int, rows: int, share: float) -> dict[str, Tensor]:
    """Windows of text, and the same with a share of the bytes behind the prompt replaced by bytes from anywhere: int64 [rows, T + 1]."""
    chosen, random = windows(seed, number, rows, TOKENS + 1), generator(seed, number, 1)
    other = text()[torch.randint(0, len(text()), chosen.shape, generator=random)].long()
    garbled = torch.rand(chosen.shape, generator=random) < share
    garbled[:, :PROMPT] = False
    return {"chosen": chosen, "rejected": torch.where(garbled, other, chosen)}


def likelihood(model: nn.Module, rows: Tensor) -> Tensor:
    """Log-probability of what comes behind the prompt, summed over a row: [B, T + 1] -> [B]."""
    logits = model(input_ids=rows[:, :-1]).logits.float().log_softmax(-1)
    of_next: Tensor = logits.gather(-1, rows[:, 1:, None])[..., 0]
    return of_next[:, PROMPT - 1 :].sum(1)


class Preference:
    """DPO and a part of the likelihood; remembers margin and accuracy for the plots."""

    def __init__(self, reference: nn.Module) -> None:
        self.reference = reference
        self.plots: dict[str, float] = {}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        rows = torch.cat((batch["chosen"], batch["rejected"]))
        ours = likelihood(model, rows)
        with torch.no_grad():
            theirs = likelihood(self.reference, rows)
        better, worse = (BETA * (ours - theirs)).chunk(2)
        margin = better - worse
        self.plots = {"margin": float(margin.detach().mean()), "accuracy": float((margin > 0).float().mean())}
        loss: Tensor = -F.logsigmoid(margin).mean() - LIKELIHOOD * ours.chunk(2)[0].mean() / (TOKENS + 1 - PROMPT)
        return loss


def build(seed: int, rank: int = 0) -> Training:
    """2–3 layers of 128 with an MLP of 256, 4 pairs of 40 bytes."""
    from transformers import PhiConfig, PhiForCausalLM

    rng = parts.drawing("preference", seed)
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=int(rng.integers(2, 4)),
            num_attention_heads=4, max_position_embeddings=64, use_cache=False, tie_word_embeddings=False,
            pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    model.train()
    peak, share = parts.learning_rate(rng, 5e-4, 2e-3), float(rng.uniform(0.3, 0.6))
    loss = Preference(copy.deepcopy(model).requires_grad_(False).eval())
    t = Training(
        family="preference",
        model=model,
        optimizer=parts.adamw(model, peak, weight_decay=0.01, beta2=0.99),
        batch=lambda number: pairs(seed, number, 4, share),
        loss=loss,
        recipe="current",
        log=lambda t, step: dict(loss.plots),
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": True, "tokens": False},
    )
    t.schedule = lambda step: peak * min((step + 1) / WARM, 1.0 - 0.8 * step / t.steps)
    return t
