"""Every call of the observer fails once, in turn: training does not feel it, and each fault is one counted error."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from faults import nth
from support.agents import serve
from torch import nn

import fp8watch
import fp8watch.session.attach as attach_module
from fp8watch_agent.settings import AgentSettings

STEPS = 3
OBSERVES = (
    *("session/watch.py", "session/overhead_budget.py", "session/sites.py"),
    *("sketch/slab.py", "sketch/host_copy.py", "sketch/tile_map.py"),
)
"""Of the library, what only observes. attach itself and the GEMMs are the compute path: they raise like any module."""


class Run(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]
    errors: dict[str, int]
    balanced: bool


def training(collector: str | None, watched: AbstractContextManager[Any]) -> Run:
    """A small model, three steps, from attach to detach. What `watched` watches begins before attach."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 32)
    losses = []
    with watched:
        watch = fp8watch.attach(model, collector=collector, overhead_budget=None, tile_maps="all")
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            watch.log(aux=1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        watch.flush(0.5)
        watch.detach()
    recorder = watch._recorder
    health = recorder.health() if recorder is not None else None
    balanced = health is None or (health.records.balanced and health.maps.balanced)
    return Run(losses, [p.detach().clone() for p in model.parameters()], dict(watch.guard.errors), balanced)


def watched_by(where: str, fault: nth.Nth) -> AbstractContextManager[Any]:
    return nth.on_this_thread(fault) if where == "training" else nth.on_thread(fault, "fp8watch-sender")


def fail_each(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    """n = 1, 1 + stride, … until a run is clean."""
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
    small = SimpleNamespace(from_environ=lambda **k: replace(AgentSettings.from_environ(**k), ring_bytes=1 << 20))
    monkeypatch.setattr(attach_module, "AgentSettings", small)
    with monkeypatch.context() as m:
        m.setenv("FP8WATCH_DISABLED", "stats")
        alone = training(None, nullcontext())
    files = nth.sources(nth.AGENT)
    if where == "training":
        files += nth.named(OBSERVES)
    hit: set[str] = set()
    with serve() as collector:
        for n in itertools.count(1, stride):
            fault = nth.Nth(files, n)
            got = training(collector.url, watched_by(where, fault))
            assert got.losses == alone.losses, (n, fault.failed)
            assert all(torch.equal(a, b) for a, b in zip(got.weights, alone.weights, strict=True)), (n, fault.failed)
            assert got.balanced, (n, fault.failed)
            assert sum(got.errors.values()) == (fault.failed is not None), (n, fault.failed, got.errors)
            if fault.failed is None:
                break
            hit.add(fault.failed)
    print(f"{where}: {len(range(1, n, stride))} of {n - 1} calls failed, at {len(hit)} places")
    assert len(hit) >= 5, "the faults did not bite"


@pytest.mark.parametrize(("where", "stride"), [("training", 29), ("sender", 31)])
def test_every_so_many_calls_one_fails(where, stride, tmp_path, monkeypatch):
    fail_each(where, tmp_path, monkeypatch, stride)


@pytest.mark.heavy(30, "fp8watch/session", "agent/fp8watch_agent")
@pytest.mark.parametrize("where", ["training", "sender"])
def test_each_call_fails_once(where, tmp_path, monkeypatch):
    fail_each(where, tmp_path, monkeypatch, 1)
