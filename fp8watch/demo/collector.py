"""Runs the demo's collector as a subprocess and queries its API."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import urllib3

from fp8watch_agent.terminal.collector_client import Asking, Unknown, segment

START_TIMEOUT_S = 60
TIMEOUT_S = 10.0
_http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(TIMEOUT_S))


class NotStarted(RuntimeError):
    """The collector did not come up; the text is what it said."""


@contextlib.contextmanager
def running_collector(folder: Path, port: int, **environment: str) -> Iterator[str]:
    """Run a collector on loopback, with a SQLite database in `folder` unless `environment` names another; yields its URL, stops it at the end.

    `environment` is added to this process's own for the collector, but for the settings in it: those of a team's collector
    would send what the demo breaks to the team.

    Raises:
        NotStarted: it did not come up; the text is what it said.
    """
    log = folder / "collector.log"
    command = [sys.executable, "-m", "fp8watch", "serve", "--host", "127.0.0.1", "--port", str(port)]
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FP8WATCH_")},
        "FP8WATCH_DATABASE_URL": f"sqlite:///{folder / 'fp8watch.sqlite'}",
        "PYTHONUNBUFFERED": "1",
        **environment,
    }
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True, start_new_session=True
        )
    url: list[str] = []
    up = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found = [w.rstrip(".,;") for w in line.split() if w.startswith("http://")]
            if found and not url:
                url.append(found[0])
                up.set()
        up.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        up.wait(START_TIMEOUT_S)
        if not url:
            process.kill()
            process.wait()
            raise NotStarted(f"the collector did not start:\n{log.read_text(errors='replace')[-2000:]}")
        _wait_ready(url[0])
        yield url[0]
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        if process.stdout is not None:
            process.stdout.close()


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            if _http.request("GET", f"{url}/readyz").status == 200:
                return
        time.sleep(0.1)
    raise NotStarted(f"{url}/readyz did not answer 200 within {START_TIMEOUT_S} s")


def incidents(url: str, run_id: str) -> list[dict[str, Any]]:
    """Incidents of a run, the oldest first; empty while the run is unknown. Raises NotAnswered."""
    try:
        items: list[dict[str, Any]] = ask(url, f"/api/v1/runs/{segment(run_id)}/incidents")["items"]
    except Unknown:
        return []
    return sorted(items, key=lambda i: (i["first_step"], str(i["opened_at"])))


def detected_step(url: str, run_id: str) -> int:
    """Last step of a run at the collector; −1 before the first. Raises NotAnswered."""
    try:
        step = ask(url, f"/api/v1/runs/{segment(run_id)}").get("last_step")
    except Unknown:
        return -1
    return -1 if step is None else int(step)


def ask(url: str, path: str) -> Any:
    """A collector's answer, asked with the agent's token.

    Raises:
        NotAnswered: none, or a refusal; Unknown: it has no such thing.
        ValueError: the address is none.
    """
    asking = Asking(url, TIMEOUT_S)
    try:
        return msgspec.json.decode(asking.get(path))
    finally:
        asking.close()
