"""Runs the Python blocks of docs/training.md, each with a small model of its own, and prints what the watch saw."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def blocks() -> dict[str, str]:
    """Heading -> the code under it."""
    return dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))


def names(folder: Path) -> dict[str, Any]:
    """What the page takes for granted: a model, an optimizer, data."""
    import torch
    from torch import nn

    import fp8watch

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(16, 32), torch.randn(16, 32)) for _ in range(4)]
    given = {"torch": torch, "fp8watch": fp8watch, "model": model, "optimizer": optimizer, "batches": batches}
    given |= {"loss_of": nn.functional.mse_loss, "micro_batches": lambda step: batches}
    given |= {"evaluate": lambda model: model(batches[0][0]).mean(), "checkpoint": folder / "checkpoint.pt"}
    given |= {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "scaler": torch.amp.GradScaler("cpu")}
    given["saved"] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    given["saved"]["fp8watch"] = {"run_id": "resumed", "step": 7}
    return given


def run(heading: str, code: str, folder: Path) -> dict[str, Any]:
    """What the watch of a block says."""
    given = names(folder)
    if heading == "GradScaler":
        given["batches"][1][1][0] = float("inf")  # a target: the loss and the gradients are not finite
    if "attach(" not in code:
        given["watch"] = given["fp8watch"].attach(given["model"])
    exec(compile(code, heading, "exec"), given)
    watch = given["watch"]
    said = watch.summary() | {"repr": repr(watch), "source": watch.identity.source}
    watch.detach()
    return said


def main() -> None:
    """{heading: summary} as JSON on the last line."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        said = {heading: run(heading, code, Path(folder)) for heading, code in blocks().items()}
        sys.stdout.write(json.dumps(said, default=str) + "\n")
