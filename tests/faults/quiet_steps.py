"""Runs in a process of its own: trains, and tells what the training thread asked of the system while it did.

Arguments: a JSON of {"steps", "cases": [{"name", "collector", "file_bytes"}]}; answers with one JSON line a case.
"""

from __future__ import annotations

import _socket
import collections
import io
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8watch
from fp8watch_agent.ring import Ring

WARM_STEPS = 5
IO_TYPES = (_socket.socket, io.FileIO, io.BufferedWriter, io.BufferedReader, io.BufferedRandom)
WAITS = ("wait", "wait_for", "join")  # of threading: events, conditions, threads
IO_MODULES = ("posix", "mmap", "fcntl", "_socket", "select", "_ssl")


class Audit:
    """Audit events of one thread. A hook cannot be taken away again: that is why this is a process of its own."""

    def __init__(self) -> None:
        self.events: collections.Counter[str] = collections.Counter()
        self.armed = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: Any) -> None:
        if self.armed and threading.get_ident() == self.armed:
            self.events[event] += 1


def calls_into_the_system(calls: collections.Counter[str]) -> Any:
    """A profile function: audit says nothing of `sock.send`, and /proc counts no sockets."""

    def hook(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name in WAITS and frame.f_code.co_filename == threading.__file__:
            calls[f"{frame.f_code.co_name} for another thread"] += 1
        if event != "c_call":
            return
        owner = getattr(arg, "__self__", None)
        if isinstance(owner, IO_TYPES) or getattr(arg, "__module__", None) in IO_MODULES or arg is time.sleep:
            calls[f"{arg.__name__} in {Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    return hook


def system_counts() -> dict[str, int]:
    """Reads, writes and voluntary context switches of this thread."""
    text = Path("/proc/thread-self/io").read_text() + Path("/proc/thread-self/status").read_text()
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {
        "io": int(values["syscr"]) + int(values["syscw"]),
        "switches": int(values["voluntary_ctxt_switches"]),
    }


def train(case: dict[str, Any], num_steps: int, audit: Audit) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 32)
    os.environ["FP8WATCH_DISABLED"] = "stats" if case["name"] == "no observer" else ""
    watch = fp8watch.attach(model, collector=case["collector"], overhead_budget=None, tile_maps="every:10")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if case["file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["file_bytes"], limit[1]))

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        watch.log(aux=1.0)
        optimizer.step()

    try:
        for _ in range(WARM_STEPS):
            step()
        before = system_counts()
        audit.events.clear()
        audit.armed = threading.get_ident()
        for _ in range(num_steps):
            step()
        audit.armed = 0
        after = system_counts()
        calls: collections.Counter[str] = collections.Counter()
        sys.setprofile(calls_into_the_system(calls))
        for _ in range(num_steps // 10):
            step()
        sys.setprofile(None)
        watch.flush(0.3)
        health = watch.summary()["health"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if watch._recorder is not None:
        watch._recorder.close(0.2)  # what a collector that swallows everything may cost at the end is not the question
    watch.detach()
    return {
        "name": case["name"],
        "events": dict(audit.events),
        "calls": dict(calls),
        "health": health,
        "errors": dict(watch.guard.errors),
        **{k: after[k] - before[k] for k in after},
    }


def plant() -> None:
    """Let each hand-over send a byte, as a client without a thread of its own would."""
    near, far = _socket.socketpair()
    original = Ring.push

    def push(ring: Ring, *args: Any) -> None:
        near.send(b"x")
        far.recv(1)
        original(ring, *args)

    Ring.push = push  # type: ignore[method-assign]


def main() -> None:
    plan = json.loads(sys.argv[1])
    audit = Audit()
    for case in plan["cases"]:
        if case["name"] == "planted":
            plant()
        print(json.dumps(train(case, plan["steps"], audit)), flush=True)
