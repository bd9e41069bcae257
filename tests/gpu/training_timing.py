"""How long a step takes, watched and not, by turns of blocks of steps; nothing runs beside it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from training_loops import adamw
from training_models import Lm, Wide, tokens
from training_registry import scenario
from training_run import Run

import fp8watch

LEFT_OUT = 20
"""Steps of a watched block before it is timed: in the first 16 every module has its turn."""


def _block(run: Run, step: Any, steps: int, left_out: int) -> dict[str, float]:
    device, host, events = [], [], []
    for i in range(steps + left_out):
        began = time.perf_counter()
        if run.cuda:
            events.append([torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)])
            events[-1][0].record()
        step(i)
        if run.cuda:
            events[-1][1].record()
        host.append((time.perf_counter() - began) * 1e3)
    if run.cuda:
        torch.cuda.synchronize()
        device = [a.elapsed_time(b) for a, b in events]
    of = (device or host)[left_out:]
    return {
        "median_ms": round(statistics.median(of), 4), "mean_ms": round(statistics.fmean(of), 4),
        "first_ms": round(statistics.fmean((device or host)[2:16] or host), 4), "host_ms": round(statistics.median(host[left_out:]), 4),
    }  # fmt: skip


def _compare(run: Run, model: nn.Module, forward: Any, ways: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    optimizer: Any = adamw(model, fused=run.cuda)

    def step(i: int) -> None:
        forward(i).backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Any] = {}
    _block(run, step, run.size(5, 2), 0)
    found["alone 1"] = _block(run, step, steps, 5)
    for way, arguments in ways.items():
        watch = fp8watch.attach(model, run=f"{run.name}-{way}", run_id=f"{run.name}-{way}", **arguments)
        found[way] = _block(run, step, steps, LEFT_OUT)
        said = watch.summary()
        found[way] |= {k: said[k] for k in ("every", "light_every", "overhead_ratio", "internal_errors", "num_steps")}
        watch.detach()
        found[f"alone behind {way}"] = _block(run, step, steps, 5)
    alone = [v["median_ms"] for k, v in found.items() if k.startswith("alone")]
    middle = statistics.median(alone)
    found["alone / alone"] = [round(a / middle, 3) for a in alone]
    found["watched / alone"] = {way: round(found[way]["median_ms"] / middle, 3) for way in ways}
    found["mean / alone"] = {way: round(found[way]["mean_ms"] / middle, 3) for way in ways}
    return found


WAYS: dict[str, dict[str, Any]] = {"defaults": {}, "observe": {"recipe": "observe"}, "emulated": {"gemm": "emulated"}}


@scenario(("defaults",), held=False, deterministic=False, alone=True, timeout_s=120)
def timing_decoder(run: Run) -> None:
    """A decoder of bfloat16, 1024 wide, 2048 tokens a step: launches cost what products do."""
    model = Lm(run.size(1024, 64), run.size(6, 2)).to(run.device, torch.bfloat16)
    data = tokens(run.device, 4, run.size(512, 32), 8)
    ways = WAYS | ({} if run.cuda else {"reference": {"backend": "reference"}})
    run.notes["times"] = _compare(run, model, lambda i: model(*data[i % 8]), ways, run.size(60, 5))
    run.ended = -1


@scenario(("defaults",), held=False, deterministic=False, alone=True, timeout_s=120)
def timing_wide(run: Run) -> None:
    """8192 tokens, 4096 wide: products cost most."""
    n, d = run.size(8192, 64), run.size(4096, 64)
    model = Wide(d, 2 * d, d, 2 * d, d).to(run.device, torch.bfloat16)
    x = torch.randn(n, d, device=run.device, dtype=torch.bfloat16)
    run.notes["times"] = _compare(run, model, lambda i: model(x), WAYS, run.size(40, 5))
    run.ended = -1


@scenario(("defaults",), held=False, deterministic=False, alone=True, timeout_s=150)
def timing_compiled(run: Run) -> None:
    """The decoder compiled."""
    model = Lm(run.size(1024, 64), run.size(6, 2)).to(run.device, torch.bfloat16)
    data = tokens(run.device, 4, run.size(512, 32), 8)
    model.compile()
    ways = {k: v for k, v in WAYS.items() if k != "emulated"}
    run.notes["times"] = _compare(run, model, lambda i: model(*data[i % 8]), ways, run.size(40, 5))
    run.ended = -1
