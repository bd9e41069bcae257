"""Forecasts of series: PatchTST of transformers with random weights reads each channel by itself in patches that overlap, with batch norms
in place of layer norms and a deviation that is taken out of each row, and says 32 values at once from all patches of it; squared error,
RMSprop under one cycle of the rate, delayed scaling. The series have seasons, a trend and noise that remembers."""

from __future__ import annotations

import math

import torch
from proving.data import generator
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers",)
CHANNELS, PAST, FUTURE, LATENT = 4, 96, 32, 2
RISES = 0.3

_BLOCK = r"model\.encoder\.layers\.\d+"
ROLES = {
    "blocks": _BLOCK,
    "attention": _BLOCK + r"\.self_attn",
    "attention.q": _BLOCK + r"\.self_attn\.q_proj",
    "attention.k": _BLOCK + r"\.self_attn\.k_proj",
    "attention.v": _BLOCK + r"\.self_attn\.v_proj",
    "attention.out": _BLOCK + r"\.self_attn\.out_proj",
    "mlp.up": _BLOCK + r"\.ff\.0",
    "mlp.down": _BLOCK + r"\.ff\.3",
    "norm": _BLOCK + r"\.norm_sublayer\d\.batchnorm",
    "embedding": r"model\.encoder\.embedder\.input_embedding",
}


class World:
    """Two seasons of its own for each channel; rows differ in how strong they are, where they begin and how the level moves."""

    def __init__(self, seed: int, rows: int) -> None:
        random = generator(seed, 0, 5)
        self.seed, self.rows = seed, rows
        self.period = 8 * 2 ** (2 * torch.rand(CHANNELS, LATENT, generator=random))
        self.remembers = 0.5 + 0.4 * torch.rand(CHANNELS, generator=random)

    def __call__(self, number: int) -> dict[str, Tensor]:
        random = generator(self.seed, number)
        time = torch.arange(PAST + FUTURE)[:, None, None]
        strong, begin = (torch.rand(self.rows, 1, CHANNELS, LATENT, generator=random) for _ in range(2))
        seasons = ((0.5 + strong) * (2 * math.pi * (time / self.period + begin)).sin()).sum(-1)
        trend = torch.randn(self.rows, 1, CHANNELS, generator=random) * time[..., 0] / PAST
        noise = 0.2 * torch.randn(self.rows, PAST + FUTURE, CHANNELS, generator=random)
        for i in range(1, PAST + FUTURE):
            noise[:, i] += self.remembers * noise[:, i - 1]
        whole = seasons + trend + noise + torch.randn(self.rows, 1, CHANNELS, generator=random)
        return {"frames": whole[:, :PAST].contiguous(), "future": whole[:, PAST:].contiguous()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(past_values=batch["frames"], future_values=batch["future"]).loss
    return found


def build(seed: int, rank: int = 0) -> Training:
    """2 layers of 128, 6 or 8 rows of 4 channels, 11 patches of 16."""
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    rng = parts.drawing("series", seed)
    model = PatchTSTForPrediction(
        PatchTSTConfig(
            num_input_channels=CHANNELS, context_length=PAST, patch_length=16, patch_stride=8, prediction_length=FUTURE,
            d_model=128, num_hidden_layers=2, num_attention_heads=4, ffn_dim=256, scaling="std",
            pooling_type=None, use_cls_token=False, loss="mse", attention_dropout=0.0, positional_dropout=0.0,
            path_dropout=0.0, ff_dropout=float(rng.choice([0.0, 0.1])), head_dropout=0.0,
        )
    )  # fmt: skip
    model.train()
    peak, notes = parts.learning_rate(rng, 3e-4, 1e-3), parts.roles(model, ROLES)
    notes["linears"] = [name for name in notes["linears"] if name not in notes["embedding"]]  # no FP8 where it begins
    t = Training(
        family="series",
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=peak, alpha=0.98),
        batch=World(seed, int(rng.choice([6, 8]))),
        loss=loss,
        recipe="delayed",
        seed=seed,
        notes=notes | {"causal": False, "tokens": False},
    )

    def one_cycle(step: int) -> float:
        """Half a wave up to the peak, and half a wave down to nearly nothing."""
        top = RISES * t.steps
        done = step / top - 1 if step < top else (step - top) / (t.steps - top)
        return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))

    t.schedule = one_cycle
    return t
