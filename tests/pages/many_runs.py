"""Ten thousand runs as they come to be in a year, and what pages cost with them."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing


def fill(engine: sa.Engine, num_runs: int, num_incidents: int, now: float) -> None:
    """Runs as they come to be in a year: most ended, some running, some that fell silent; incidents in every second."""
    of_run, sessions, tags, incidents, scalars = [], [], [], [], []
    for i in range(num_runs):
        key = {"run_id": f"run-{i:05d}", "tenant": "default"}
        ended, seen = i % 10 != 0, now - (400 if i % 20 == 10 else 0)
        of_run.append(
            {**key, "name": f"llama-{i % 7}b-seed-{i:05d}", "recipe": ("blockwise", "mxfp8")[i % 2], "attempt": 1}
            | {"created_at": now - i, "last_seen_at": seen, "last_step": i, "last_step_attempt": 1, "world_size": 1}
        )
        stuck = {"no_step_ended": "no step has ended"} if i == 30 else {"left_out": "x" * 200}
        session = {
            "session": f"{i:032x}",
            "rank": 0,
            "attempt": 1,
            "world_size": 1,
            "mesh": {},
            "pid": 1,
            "versions": {},
        }
        session |= dict.fromkeys(("recipe", "fingerprint", "backend"), "x")
        session |= {"host": f"node-{i % 40}", "facts": stuck, "registered_at": now, "last_seen_at": seen}
        sessions.append({**key, **session, "ended": ended})
        tags += [{**key, "tag": f"sweep-{i % 12}"}]
        scalars += [
            {**key, "attempt": 1, "rank": 0, "step": s, "seq": 0, "status": 0, "loss": 2.0, "loss_class": 0}
            for s in range(i, i + 2)
            if i % 20 == 0
        ]
    for k in range(num_incidents):
        place = {"module": f"layers.{k % 32}.mlp.up", "operand": "input", "ranks": [0]}
        row: dict[str, Any] = {"run_id": f"run-{(2 * k) % num_runs:05d}", "tenant": "default", "id": f"{k:032x}"}
        row |= {"mode": f"mode-{k % 24}", "severity": ("info", "warning", "critical")[k % 3], "place": place}
        row |= dict.fromkeys(("title", "verdict", "cause", "fingerprint"), "x")
        row |= dict.fromkeys(("attempt", "first_step", "last_step", "num_events", "num_sites"), 1)
        row |= {key: [] for key in ("sites", "evidence", "fix", "alternatives")}
        row |= {"status": "open" if k % 47 == 0 else "resolved", "seen_at": None if k % 10 == 1 else now}
        row |= {"opened_at": now - k, "updated_at": now - k, "origin": True, "cause_id": f"{k % 200:016x}"}
        row |= {"owner": "ann" if k % 100 == 7 else ""}
        incidents.append(row)
    with writing(engine) as conn:
        for table, rows in (
            (t.run, of_run), (t.session, sessions), (t.run_tag, tags), (t.incident, incidents), (t.scalar, scalars)
        ):  # fmt: skip
            conn.execute(sa.insert(table), rows)


def cpu_of(app: Any, paths: tuple[str, ...]) -> dict[str, float]:
    """CPU seconds that each page takes, the quicker of twice, without the collector's threads; with those of PostgreSQL."""
    with ThreadPoolExecutor(1) as pool:  # the loop of a browser's tests may run in the caller's thread
        return pool.submit(lambda: asyncio.run(_cpu_of(app, paths))).result()


async def _cpu_of(app: Any, paths: tuple[str, ...]) -> dict[str, float]:
    transport = httpx.ASGITransport(app=app)
    postmaster = _postmaster(app.state.engine)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await client.get("/")
        spent: dict[str, float] = {}
        for path in (*paths, *paths):
            began, of_database = time.process_time(), _cpu_of_children(postmaster)
            answer = await client.get(path)
            cpu_s = round(time.process_time() - began + _cpu_of_children(postmaster) - of_database, 3)
            spent[path] = min(cpu_s, spent.get(path, cpu_s))
            assert answer.status_code == 200, path
            assert ('class="rowlink"' if not path.startswith("/compare") else "<option") in answer.text, path
    return spent


def _postmaster(engine: sa.Engine) -> int:
    """Process of the PostgreSQL server, where it runs here; else 0."""
    if engine.dialect.name != "postgresql":
        return 0
    with engine.connect() as conn:
        folder = Path(conn.exec_driver_sql("SHOW data_directory").scalar_one())
    try:
        return int((folder / "postmaster.pid").read_text().split()[0])
    except OSError:
        return 0


def _cpu_of_children(parent: int) -> float:
    """CPU seconds of the processes that a process has started and that live."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat") if parent else ():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
