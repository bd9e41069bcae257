"""A real run with a failure in it: a training process, a collector process on PostgreSQL, a Prometheus that scrapes it."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import torch
import yaml
from collector.kit import Agent, Serving, make_site
from support.database import fresh_database

import fp8watch
from dashboards.boards import ROOT
from fp8watch.demo.model import ByteModel
from fp8watch_server.db import schema
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.store.compactor import Compactor

STEPS, FAULT_STEP = 24, 14
FAULT_MODULE = "layers.1.mlp.down_proj"
TOKEN = "fp8w_" + "0" * 64
PATIENCE_S = 60
CONFIG = ROOT / "dashboards" / "prometheus" / "prometheus.yml"


@dataclass
class RealRun:
    """What the proof asks."""

    engine: sa.Engine
    run_id: str
    url: str
    client: httpx.Client
    go_on: Callable[[], Any]  # one more batch comes in, of the second run
    prometheus: str | None = None


class _Receiver(http.server.BaseHTTPRequestHandler):
    """A webhook that says yes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _receiver() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def until(there: Callable[[], Any], what: str) -> Any:
    """Ask until there is an answer."""
    deadline = time.monotonic() + PATIENCE_S
    while not (got := there()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.1)
    return got


def _train(url: str) -> str:
    """A small transformer; one activation becomes Inf for one step, and one gradient for another."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # so small a model gains nothing by several, and on a busy machine they wait for each other
    torch.manual_seed(0)
    model = ByteModel(dim=64, num_layers=2, num_heads=2, hidden=128, max_tokens=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def overflow(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0].clone()
        x[0, 3, 5] = float("inf")
        return (x,)

    watch = fp8watch.attach(
        model, run="proof: 'a' <b>", collector=url, tile_maps="all", overhead_budget=None, optimizer=optimizer
    )
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, num_threads)
        stack.enter_context(watch)
        for step in range(STEPS):
            tokens = torch.randint(0, 256, (4, 17))
            broken = model.get_submodule(FAULT_MODULE).register_forward_pre_hook(overflow)
            if step != FAULT_STEP:
                broken.remove()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            broken.remove()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            watch.log(grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
        assert watch.flush(PATIENCE_S)
        return str(watch.identity.run_id)


def _lossy_agent(client: httpx.Client) -> Callable[[], Any]:
    """A second run, whose agent had to give records up; another step of it."""
    site, steps = make_site(), itertools.count(3)
    health = {"dropped_ring_full": 3.0, "overhead_ratio": 0.004, "produced": 9.0, "acknowledged": 6.0}
    agent = Agent(client, run="jobs/7 & 8").register([site], name="")
    agent.send([site], [1, 2], health=health)
    return lambda: agent.send([site], [next(steps)], health=health)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def binary(name: str) -> str:
    """A program of Prometheus's package; skipped where it is not, which CI does not allow."""
    found = shutil.which(name)
    if found is None:
        if os.environ.get("FP8WATCH_REQUIRE_PROMTOOL"):
            pytest.fail(f"{name} must be here: it is in Debian's package prometheus or prometheus-alertmanager")
        pytest.skip(f"{name} is not here: apt-get install prometheus, or unpack it from that package")
    return found


@contextlib.contextmanager
def scraping(folder: Path, collector: str) -> Iterator[str]:
    """A Prometheus with the configuration that is shipped; only addresses and pace are others."""
    config = yaml.safe_load(CONFIG.read_text())
    (job,) = config["scrape_configs"]
    config["global"] |= {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    job["static_configs"] = [{"targets": [urllib.parse.urlsplit(collector).netloc]}]
    (folder / "token").write_text(TOKEN)
    job["authorization"]["credentials_file"] = str(folder / "token")
    config["rule_files"] = [
        str(ROOT / "dashboards" / "prometheus" / name.rpartition("/")[2]) for name in config["rule_files"]
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        binary("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    command += [f"--web.listen-address={url.removeprefix('http://')}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: _is_ready(url) or process.poll() is not None, "a ready Prometheus")
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(prometheus: str, path: str, **params: Any) -> Any:
    """An answer of Prometheus's API."""
    with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(params)}", timeout=30) as answer:
        return json.load(answer)["data"]


def _compacted(engine: sa.Engine, compactor: Compactor) -> bool:
    """Whether no batch of records is left outside of the blocks; batches that the detectors have not seen stay there."""
    compactor.round()
    with engine.connect() as conn:
        return not conn.scalar(
            sa.select(sa.func.count()).select_from(schema.hot_batch).where(schema.hot_batch.c.step_min.is_not(None))
        )


@contextlib.contextmanager
def real_run(folder: Path) -> Iterator[RealRun]:
    """Everything, running; the data compacted."""
    with contextlib.ExitStack() as stack:
        database_url = stack.enter_context(fresh_database("postgresql"))
        hook = stack.enter_context(_receiver())
        env = {"FP8WATCH_DATABASE_URL": database_url, "FP8WATCH_WEBHOOK_URL": hook, "FP8WATCH_TOKEN": TOKEN}
        command = [sys.executable, "-m", "fp8watch", "serve", "--port", "0"]
        serving = stack.enter_context(Serving(folder, command=command, **env))
        engine = make_engine(database_url)
        stack.callback(engine.dispose)
        client = httpx.Client(base_url=serving.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)
        stack.enter_context(client)
        prometheus = None
        if shutil.which("prometheus"):
            prometheus = stack.enter_context(scraping(folder, serving.url))
        before = {k: os.environ.get(k) for k in ("FP8WATCH_TOKEN", "FP8WATCH_SPOOL_DIR")}
        os.environ.update(FP8WATCH_TOKEN=TOKEN, FP8WATCH_SPOOL_DIR=str(folder / "spool"))
        try:
            run_id = _train(serving.url)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        go_on = _lossy_agent(client)
        listed = f"/api/v1/runs/{run_id}/incidents"
        until(lambda: client.get(listed).json()["items"], "an incident")
        compactor = Compactor(engine, clock=lambda: time.time() + 1e6)
        until(lambda: _compacted(engine, compactor), "all batches seen by the detectors and put into blocks")
        yield RealRun(engine, run_id, serving.url, client, go_on, prometheus)
        serving.kill(15)
