"""What `fp8watch diagnose` and `calibrate` are run on: `training_subject:build`."""

from __future__ import annotations

from typing import Any

import torch
from training_models import Lm, tokens


def build() -> tuple[Any, ...]:
    """A decoder, its batches, what gives its loss, and its optimizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Lm(256 if device == "cuda" else 64, 2).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, iter(tokens(device, 4, 64, 30)), lambda m, batch: m(*batch), optimizer
