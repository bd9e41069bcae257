"""A real collector with SQLite in a folder, and what it says of a run by its API. No threads: the process that asks also forks."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import urllib3

START_S = 300.0
"""A quiet machine needs two."""
_http = urllib3.PoolManager(retries=urllib3.Retry(2), timeout=urllib3.Timeout(20))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`fp8watch serve` on a free port of loopback, at its defaults; yields its URL."""
    said = folder / "collector.out"
    env = {**os.environ, "FP8WATCH_DATABASE_URL": f"sqlite:///{folder / 'fp8watch.sqlite'}", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "fp8watch", "serve", "--host", "127.0.0.1", "--port", "0"]
    with said.open("wb") as out, (folder / "collector.err").open("wb") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=env, start_new_session=True)
    try:
        yield _url(process, said, folder)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], said: Path, folder: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://[\d.]+:\d+", said.read_text())
        if found:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                if _http.request("GET", f"{found[0]}/readyz").status == 200:
                    return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the collector did not start: {(folder / 'collector.err').read_text()[-2000:]}")


def run(url: str, run_id: str) -> dict[str, Any] | None:
    """What the collector knows of the run, None before it knows anything."""
    answer = _http.request("GET", f"{url}/api/v1/runs/{quote(run_id, safe='')}")
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise RuntimeError(f"the collector answered {answer.status}: {answer.data[:300]!r}")
    found: dict[str, Any] = msgspec.json.decode(answer.data)
    return found


def incidents(url: str, run_id: str) -> list[dict[str, Any]]:
    """Incidents of a run, the first step first."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answer = _http.request("GET", f"{url}/api/v1/runs/{quote(run_id, safe='')}/incidents{cursor}")
        if answer.status != 200:
            raise RuntimeError(f"the collector answered {answer.status}: {answer.data[:300]!r}")
        page = msgspec.json.decode(answer.data)
        found += page["items"]
        if not page.get("next"):
            return sorted(found, key=lambda i: (i["first_step"], str(i["opened_at"])))
        cursor = f"?cursor={quote(page['next'], safe='')}"


def opened_steps(folder: Path, run_id: str) -> dict[str, int]:
    """Incident -> newest step that it rested on when it was opened: `first_step` is its onset, which may lie before that."""
    query = (
        "select i.id, e.step from incident i join incident_event e on e.incident_id = i.id"
        " where i.run_id = ? and e.kind = 'opened'"
    )
    with _reading(folder) as base:
        return {incident: int(step) for incident, step in base.execute(query, (run_id,)) if step is not None}


def is_judged(folder: Path, run_id: str) -> bool:
    """Whether the detectors have seen every batch of the run that was committed; what they found is committed with that."""
    with _reading(folder) as base:
        [pending] = base.execute(
            "select count(*) from hot_batch where run_id = ? and detected = 0", (run_id,)
        ).fetchone()
    return not pending


def _reading(folder: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(f"file:{folder / 'fp8watch.sqlite'}?mode=ro", uri=True, timeout=30))


KEPT = ("mode", "title", "severity", "verdict", "first_step", "last_step", "origin", "place", "cause", "opened_at")


def brief(incident: dict[str, Any], opened: dict[str, int]) -> dict[str, Any]:
    """What a line of results keeps of an incident."""
    return {key: incident.get(key) for key in KEPT} | {"opened_step": opened.get(incident["id"])}
