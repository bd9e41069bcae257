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
from urllib.parse import quote

import msgspec
import urllib3

START_TIMEOUT_S = 60
_http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(10))


@contextlib.contextmanager
def running_collector(folder: Path, port: int, **environment: str) -> Iterator[str]:
    """Run a collector on loopback, with a SQLite database in `folder` unless `environment` names another; yields its URL, stops it at the end.

    `environment` is added to this process's own for the collector.

    Raises:
        RuntimeError: it did not come up; the text is what it said.
    """
    log = folder / "collector.log"
    command = [sys.executable, "-m", "fp8watch", "serve", "--host", "127.0.0.1", "--port", str(port)]
    env = {
        **os.environ,
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
            raise RuntimeError(f"the collector did not start:\n{log.read_text(errors='replace')[-2000:]}")
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
    raise RuntimeError(f"{url}/readyz did not answer 200 within {START_TIMEOUT_S} s")


def incidents(url: str, run_id: str) -> list[dict[str, Any]]:
    """Incidents of a run, the oldest first; empty while the run is unknown."""
    answer = _http.request("GET", f"{url}/api/v1/runs/{quote(run_id, safe='')}/incidents")
    if answer.status == 404:
        return []
    if answer.status != 200:
        raise RuntimeError(f"the collector answered {answer.status}: {answer.data[:300]!r}")
    items: list[dict[str, Any]] = msgspec.json.decode(answer.data)["items"]
    return sorted(items, key=lambda i: (i["first_step"], str(i["opened_at"])))


def detected_step(url: str, run_id: str) -> int:
    """Last step of a run at the collector; −1 before the first."""
    answer = _http.request("GET", f"{url}/api/v1/runs/{quote(run_id, safe='')}")
    if answer.status != 200:
        return -1
    step = msgspec.json.decode(answer.data).get("last_step")
    return -1 if step is None else int(step)
