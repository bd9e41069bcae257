"""Models and a recorder that keeps what it is handed."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from support.collector_checks import CollectorChecks, refusals
from torch import nn

import fp8watch
import fp8watch.session.start as start_module
from fp8watch.session import step_boundary
from fp8watch_agent.health import Health
from fp8watch_agent.record import StepPresent, is_probe


@pytest.fixture(autouse=True)
def refused_nothing():
    """Whatever a test of a watch looks at: a collector takes all that it hands over."""
    refusals()
    yield
    assert not refusals()


class Kept:
    """What the Recorder was handed, in place of a sender."""

    def __init__(self, settings, session, *_, **__):
        self.settings, self.session, self.spool_dir = settings, session, settings.spool_dir
        self.sites, self.steps, self.maps, self.closed, self.facts = [], [], [], 0, {}
        self.experts = []  # of each step: site -> vector
        self.hurried = []  # number of steps that were not to wait
        self.collector = CollectorChecks(session)

    def register_sites(self, sites):
        self.collector.sites(sites)
        self.sites += sites

    def record_step(self, step, site_ids, rows, logs, batch_id, experts=None):
        self.collector.step(step, site_ids, rows, logs, batch_id, experts)
        self.steps.append((np.array(step), np.array(site_ids), rows.copy(), dict(logs), batch_id))
        self.experts.append(dict(experts or {}))

    def record_more(self, site_ids, rows):
        step, ids, before, *rest = self.steps[-1]
        self.collector.step(step, site_ids, rows)
        assert not set(ids.tolist()) & set(site_ids.tolist())
        self.steps[-1] = step, np.concatenate([ids, site_ids]), np.concatenate([before, rows]), *rest

    def record_tile_maps(self, maps):
        self.collector.maps(maps)
        self.maps += maps

    def hurry(self):
        self.hurried.append(len(self.steps))

    def wanted_captures(self):
        return frozenset()

    def update_facts(self, facts):
        self.collector.facts(facts)
        self.facts.update(facts)

    def set_gauge(self, name, value):
        self.gauge = (name, value)

    def health(self):
        return Health(state="kept")

    def flush(self, timeout_s):
        return True

    def close(self, timeout_s=2.0):
        self.closed += 1

    # what tests ask

    def of_operands(self, ids, rows):
        """The rows of sites that have an operand; probes have none."""
        operands = {site.id for site in self.sites if not is_probe(site.operand, site.recipe)}
        return rows[[int(i) in operands for i in ids]]

    def step(self, i):
        header, ids, rows, *_ = self.steps[i]
        by_id = {s.id: s for s in self.sites}
        return header, {
            (by_id[int(n)].module, by_id[int(n)].operand, by_id[int(n)].direction): rows[k] for k, n in enumerate(ids)
        }

    def losses(self):
        return [float(h["loss"]) if int(h["present"]) & StepPresent.LOSS else None for h, *_ in self.steps]


@pytest.fixture
def attach(monkeypatch, tmp_path):
    """`fp8watch.attach` with a kept recorder, at its defaults: after some measured steps it may choose a larger `every` on a
    busy machine, so a test that counts full statistics behind those says overhead_budget=None itself. Every watch is
    detached at the end, the dropped ones too: what the last one leaves wrapped would be there in the next test."""
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(start_module, "Recorder", Kept)
    made, dropped = [], weakref.WeakSet()

    def run(model, *, keep=True, **kwargs):
        watch = fp8watch.attach(model, **kwargs)
        if not keep:
            dropped.add(watch)
            return watch._recorder
        made.append(watch)
        return watch

    yield run
    for watch in (*made, *dropped):
        watch.detach()
    if not step_boundary._watches:
        while step_boundary._undo:
            step_boundary._undo.pop()()


class Mlp(nn.Module):
    """Two Linears and a head; returns a 0-d loss."""

    def __init__(self, dim=64, bias=True):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, bias=bias)
        self.down = nn.Linear(2 * dim, dim, bias=bias)
        self.lm_head = nn.Linear(dim, 16)

    def forward(self, x):
        return self.lm_head(self.down(torch.relu(self.up(x)))).pow(2).mean()


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return Mlp()


def train(model, steps=3, lr=1e-2, seed=1, batch=32, dim=64, optimizer=None):
    """Plain training; returns the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    g = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(batch, dim, generator=g))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(name="train")
def train_fixture():
    return train
