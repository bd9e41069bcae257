"""Runs of a small model through the agent's rows, the wire and the detectors."""

from __future__ import annotations

import pytest
import torch
from attach.conftest import refused_nothing  # noqa: F401 - of whatever a test looks at
from scaled_mm.strict import scaled_mm as strict
from support.collector_checks import CollectorChecks
from torch import nn

import fp8watch
import fp8watch.session.start as start_module
from fp8watch.kernels import scaled_mm
from fp8watch_agent.health import Health
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import facts_of


@pytest.fixture(autouse=True)
def no_onednn():
    """Where a processor has AMX, oneDNN multiplies float8 with one scale by its reference loop: a hundred times as long as torch's own way
    around it."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


class Line:
    """In place of a recorder: what it is handed goes over the wire into an engine at once."""

    def __init__(self, settings, session, *_, **__):
        self.sites, self.findings, self.rows, self.facts, self.logs = {}, [], [], {}, []
        self.collector = CollectorChecks(session)
        self.engine = DetectionEngine({})
        self.spool_dir = settings.spool_dir

    def register_sites(self, sites):
        self.collector.sites(sites)
        self.sites |= facts_of(sites)
        self.engine.add_sites(self.sites)

    def record_step(self, step, site_ids, rows, logs, batch_id, experts=None):
        batch = self.collector.step(step, site_ids, rows, logs, batch_id, experts)
        self.logs.append(dict(logs))
        self.rows.append({int(i): row for i, row in zip(site_ids, rows.copy(), strict=True)})
        self.findings += self.engine.observe(batch)

    def record_more(self, site_ids, rows):
        raise AssertionError("one rank merges nothing")

    def record_tile_maps(self, maps):
        self.collector.maps(maps)

    def hurry(self):
        pass

    def wanted_captures(self):
        return frozenset()

    def update_facts(self, facts):
        self.collector.facts(facts)
        self.facts.update(facts)

    def set_gauge(self, name, value):
        pass

    def health(self):
        return Health(state="kept")

    def flush(self, timeout_s):
        return True

    def close(self, timeout_s=2.0):
        pass

    def said(self):
        """(mode, severity, step, module, operand, direction) of what was found, consequences left out."""
        found = [f for f in self.findings if not f.extra.get("consequence")]
        return [
            (
                f.mode,
                f.severity,
                f.step,
                *((s.module, s.operand, s.direction) if (s := self.sites.get(f.site)) else (None,) * 3),
            )
            for f in found
        ]


class Small(nn.Module):
    """Three Linears behind each other; returns a 0-d loss."""

    def __init__(self, width=160):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 272), nn.Linear(272, 144, bias=False), nn.Linear(144, width)

    def forward(self, x):
        return (x + self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))).square().mean()


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Train a small model for some steps, attached at the defaults; returns what was found, and the watch.

    `share` is that of the canary; 1 gives a module a turn in each step.
    """
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(start_module, "Recorder", Line)
    made = []

    def run(steps, *, model=None, tokens=96, dtype=torch.float32, gemm="emulated", share=None, before=None, **how):
        if gemm == "scaled_mm":
            monkeypatch.setattr(torch, "_scaled_mm", strict)
            monkeypatch.setattr(scaled_mm, "probe", lambda device: None)
        torch.manual_seed(0)
        model = (Small() if model is None else model).to(dtype)
        watch = fp8watch.attach(model, gemm=gemm, **how)
        made.append(watch)
        if share is not None:
            watch._plan.canary.share = share
            watch._plan.canary.pace = lambda share: None
        if before is not None:
            before(watch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(tokens, 160, dtype=dtype)).backward()
            optimizer.step()
        assert not watch.guard.errors, watch.guard.errors
        return watch._recorder, watch

    yield run
    for watch in made:
        watch.detach()
