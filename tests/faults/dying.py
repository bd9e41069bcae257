"""Runs in a process of its own: trainings that end badly in step BAD, each in a child of its own.

Arguments: folder; then the manners. Each child spools to a folder of its manner, without a collector.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import fp8watch

BAD = 3
MANNERS = ("exception", "sigterm", "sigkill", "skipped")


def train(manner: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=manner == "skipped")
    watch = fp8watch.attach(model, overhead_budget=None)
    for step in range(BAD + 1):
        optimizer.zero_grad()
        x = torch.randn(16, 32)
        if step == BAD:
            x[3, 5] = torch.nan
        scaler.scale(model(x).pow(2).mean()).backward()
        if step == BAD and manner == "exception":
            raise FloatingPointError("loss is not finite")
        if step == BAD and manner == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        scaler.step(optimizer)
        scaler.update()
        if step == BAD and manner == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
    watch.detach()


def in_a_child(action: Callable[[], None]) -> int:
    """Wait status of a child that ends as the interpreter would end it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    for manner in sys.argv[2:]:
        os.environ["FP8WATCH_SPOOL_DIR"] = str(Path(sys.argv[1]) / manner)
        os.environ["FP8WATCH_RUN"] = f"dying-{manner}"
        status = in_a_child(lambda manner=manner: train(manner))  # type: ignore[misc]
        print(manner, os.waitstatus_to_exitcode(status), flush=True)
