"""Runs in a process of its own: a training that is forked, reloaded, attached and detached, and then exits.

Arguments: folder, URL of the collector, URL of one that swallows everything, number of forks. Tells what it found.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fp8watch


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def forks(num_forks: int, url: str) -> dict[str, object]:
    """Children of an attached process train on, say nothing, and end; the parent is not touched."""
    model, optimizer = make()
    watch = fp8watch.attach(model, collector=url, overhead_budget=None)
    bad = 0
    for _ in range(num_forks):
        pid = os.fork()
        if pid == 0:
            step(model, optimizer, torch.ones(8, 32))
            watch.log(loss=1.0)
            quiet = watch.summary()["health"].get("produced", 0) == 0
            watch.detach()
            os._exit(0 if quiet and not watch.guard.errors else 1)
        bad += os.waitpid(pid, 0)[1] != 0
        step(model, optimizer, torch.ones(8, 32))
    watch.flush(10)
    health = watch.summary()["health"]
    watch.detach()
    return {"bad_children": bad, "steps": health["steps"], "acknowledged": health["acknowledged"] == health["produced"]}


def workers(url: str) -> dict[str, object]:
    """A DataLoader forks its workers behind attach, again in each epoch."""
    model, optimizer = make()
    watch = fp8watch.attach(model, collector=url, overhead_budget=None)
    data = DataLoader(TensorDataset(torch.randn(32, 32)), batch_size=8, num_workers=2)
    for _ in range(2):
        for (x,) in data:
            step(model, optimizer, x)
    watch.flush(10)
    health = watch.summary()["health"]
    watch.detach()
    return {"steps": health["steps"], "acknowledged": health["acknowledged"] == health["produced"]}


def cycles(url: str) -> dict[str, object]:
    """Attached and detached ten times, each twice: nothing is left behind."""
    model, optimizer = make()
    seen = []
    for _ in range(10):
        watch = fp8watch.attach(model, collector=url, overhead_budget=None)
        again = fp8watch.attach(model, collector=url, overhead_budget=None)
        step(model, optimizer, torch.ones(8, 32))
        again.detach()
        watch.detach()
        watch.detach()
        seen.append((num_files(), threading.active_count(), type(model[0]).__name__))
    return {"files": seen[-1][0] - seen[1][0], "threads": seen[-1][1] - seen[1][1], "module": seen[-1][2]}


def exits(blackhole: str) -> dict[str, object]:
    """Detach with a collector that swallows everything; the same happens at exit."""
    model, optimizer = make()
    watch = fp8watch.attach(model, collector=blackhole, overhead_budget=None)
    for _ in range(5):
        step(model, optimizer, torch.ones(8, 32))
    transport = watch._recorder._sender.uploader.transport
    while not transport.num_requests:  # until the sender is in the middle of one
        time.sleep(0.01)
    began = time.monotonic()
    watch.detach()
    return {"detach_s": time.monotonic() - began}


def main() -> None:
    os.environ["FP8WATCH_SPOOL_DIR"] = sys.argv[1]
    url, blackhole, num_forks = sys.argv[2], sys.argv[3], int(sys.argv[4])
    told = {"forks": forks(num_forks, url), "workers": workers(url), "cycles": cycles(url), "exits": exits(blackhole)}
    print(json.dumps(told))
