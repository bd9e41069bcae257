"""From a training loop to what people see, through a real collector process."""

from __future__ import annotations

import http.server
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from typing import ClassVar

import pytest
import torch
from torch import nn

import fp8watch
from fp8watch.demo.collector import incidents, running_collector


@pytest.fixture(scope="module")
def collector(tmp_path_factory):
    with running_collector(tmp_path_factory.mktemp("collector"), 0) as url:
        yield url


@pytest.fixture(autouse=True)
def spool(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def wait_for_incident(url, run_id, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := incidents(url, run_id):
            return found
        time.sleep(0.1)
    raise AssertionError(f"no incident within {timeout_s} s")


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x, factor=1.0):
        return self.down(torch.relu(self.up(x))).pow(2).mean() * factor


def test_a_loss_that_is_nan_and_inf_is_readable_everywhere(collector):
    torch.manual_seed(0)
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fp8watch.attach(model, run="<script>alert(1)</script>", collector=collector, overhead_budget=None)
    for factor in (1.0, 1.0, math.inf, math.nan):
        optimizer.zero_grad()
        model(torch.randn(32, 64), factor).backward()
        watch.log(grad_norm=-math.inf)
        optimizer.step()
    assert watch.flush(20)
    run_id = watch.identity.run_id
    found = wait_for_incident(collector, run_id)
    assert [i["mode"] for i in found] == ["nan-in-loss"]
    assert found[0]["first_step"] == 2
    assert found[0]["verdict"] == "shared"
    series = json.loads(get(f"{collector}/api/v1/runs/{run_id}/scalars?name=loss&from=0&to=10&points=100"))
    assert series["values"][2:] == [None, None]
    assert [[i, k] for i, k in series["nonfinite"]] == [[2, "inf"], [3, "nan"]]
    metrics = get(f"{collector}/metrics")
    assert re.search(rf'fp8watch_loss{{run="[^"]*{run_id}[^"]*"}} NaN', metrics), metrics
    for page in ("/", f"/runs/{run_id}", f"/incidents/{found[0]['id']}"):
        html = get(collector + page)
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert" in html or page.startswith("/incidents")
    assert json.loads(get(f"{collector}/api/v1/runs/{run_id}"))["status"] == "running"
    watch.detach()
    assert json.loads(get(f"{collector}/api/v1/runs/{run_id}"))["status"] == "ended"


def test_at_the_defaults_each_step_arrives_and_between_samples_only_what_it_has(collector):
    """`every` as the budget raises it: amax and counts of each step, energies of the samples alone, gaps between."""
    torch.manual_seed(0)
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fp8watch.attach(model, collector=collector)
    watch._overhead.every = 64  # what a model as small as this gets anyway, on any machine
    watch._overhead._budget = None
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).backward()
        optimizer.step()
    assert watch.flush(20)
    run = f"{collector}/api/v1/runs/{watch.identity.run_id}"
    site = next(s["id"] for s in json.loads(get(f"{run}/sites"))["items"] if s["operand"] == "input")

    def measured(field):
        got = json.loads(get(f"{run}/series?site={site}&field={field}&points=1000"))
        return [step for step, value in zip(got["steps"], got["values"], strict=True) if value is not None]

    for field in ("amax_max", "num_underflow", "scale_inv_min", "num_elements"):
        assert measured(field) == list(range(40)), field
    samples = [0]
    for field in ("tile_sqnr_db", "kurtosis"):
        assert measured(field) == samples, field
    histogram = json.loads(get(f"{run}/sites/{site}/histogram?field=amax_hist"))
    assert histogram["steps"] == list(range(40))
    heat = json.loads(get(f"{run}/heatmap?field=tile_sqnr_db"))
    assert heat["steps"] == [0, 10, 21, 32], (
        "those in which an operand has its turn: no columns in which nothing was measured"
    )
    of_step = list(zip(*heat["values"], strict=True))
    assert all(v is not None for v in of_step[0]), "the first step shows what there is"
    assert all(0 < sum(v is not None for v in column) < len(column) for column in of_step[1:])
    assert get(f"{collector}/runs/{watch.identity.run_id}")
    watch.detach()


def test_a_step_killed_by_sigkill_arrives_by_sync(collector, tmp_path):
    """Nothing that a step handed over is lost with the process."""
    script = textwrap.dedent(
        """
        import os, signal, torch, fp8watch
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = fp8watch.attach(model, overhead_budget=None)
        for _ in range(5):
            opt.zero_grad(); model(torch.randn(8, 32)).sum().backward(); opt.step()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    env = {**os.environ, "FP8WATCH_RUN": "killed", "FP8WATCH_SPOOL_DIR": str(tmp_path / "s")}
    died = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    for _ in range(2):  # sync is idempotent
        sync = [sys.executable, "-m", "fp8watch", "sync", "--spool-dir", str(tmp_path / "s"), "--collector", collector]
        out = subprocess.run(sync, env=env, capture_output=True, text=True)
        assert out.returncode == 0, out.stdout + out.stderr
        run = json.loads(get(f"{collector}/api/v1/runs/killed"))
        assert run["last_step"] == 4
        assert run["num_sites"] == 4


def test_a_collector_that_is_down_changes_nothing_but_a_counter():
    def train(**how):
        torch.manual_seed(0)
        model = Loss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watch = fp8watch.attach(model, overhead_budget=None, **how)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 64))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        watch.flush(1.0)
        health = watch.summary()["health"]
        watch.detach()
        return losses, health

    up, _ = train()
    down, health = train(collector="http://127.0.0.1:9")
    assert down == up
    assert health["acknowledged"] == 0
    assert health["produced"] == health["queued"] + health["spooled"] > 0
    assert health["retries"] > 0


class Receiver(http.server.BaseHTTPRequestHandler):
    """An incoming webhook that keeps what it got, and when."""

    got: ClassVar[queue.Queue] = queue.Queue()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.put((time.monotonic(), json.loads(body)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


def test_slack_hears_of_an_inf_within_seconds(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hook = f"http://127.0.0.1:{server.server_port}/services/T/B/secret"
    try:
        with running_collector(tmp_path, 0, FP8WATCH_SLACK_WEBHOOK_URL=hook) as url:
            model = Loss()
            watch = fp8watch.attach(model, run="slack & <co>", collector=url, overhead_budget=None)
            x = torch.randn(32, 64)
            x[3, 5] = math.inf
            with torch.no_grad():
                model.down.weight.zero_()  # the Inf stays where it is: the loss is finite
            model(x).backward()
            watch.step()
            assert watch.flush(20)
            committed = time.monotonic()
            at, message = Receiver.got.get(timeout=60)
            assert at - committed < 30  # the promise is 2 s; the rest is slack for a busy machine
            incident = incidents(url, watch.identity.run_id)[0]
            watch.detach()
        text = json.dumps(message)
        assert "up" in message["text"]
        assert "slack &amp; &lt;co&gt;" in text
        assert f"/incidents/{incident['id']}" in text
        assert "/runbooks/inf-laundering" in text
        assert Receiver.got.empty()
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("extra", ["server"])
def test_the_collector_runs_where_torch_is_not(extra, tmp_path):
    code = textwrap.dedent(
        """
        import sys
        sys.modules["torch"] = None
        from fp8watch.cli import main
        import fp8watch_server.app, fp8watch_server.cli, fp8watch_agent.sync
        sys.exit(main(["serve", "--help"]))
        """
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "--database-url" in out.stdout


class Unreadable(nn.Module):
    """Multiplies with a parameter in a way that nothing recognises, and has a Linear that is never called."""

    def __init__(self):
        super().__init__()
        self.q, self.spare = nn.Linear(64, 64), nn.Linear(64, 64)
        self.odd = nn.Parameter(torch.randn(64, 64) * 0.1)

    def forward(self, x):
        return torch.einsum("ij,kj->ik", self.q(x), self.odd).pow(2).mean()


def test_a_class_that_cannot_be_read_and_a_module_never_called_are_on_the_page(collector):
    model = Unreadable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fp8watch.attach(model, recipe="observe", collector=collector) as watch:
        for _ in range(3):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(32, 64)).backward()
                optimizer.step()
            watch.flush(20)
    (found,) = wait_for_incident(collector, watch.identity.run_id)
    assert found["title"] == "67 % of the GEMM FLOPs were announced as observed and send nothing"
    assert "odd (read by einsum, whose product is not recognised), not called: spare" in found["cause"]
    assert (found["mode"], found["severity"], found["verdict"]) == ("recipe-mismatch", "warning", "unknown")
    text = get(f"{collector}/runs/{watch.identity.run_id}")
    assert "read by einsum, whose product is not recognised" in text
    assert "67 % of the GEMM FLOPs were announced as observed and send nothing" in text
    assert "Not called in the first step" in text
    assert "spare" in text
