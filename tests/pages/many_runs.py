"""Ten thousand runs as they come to be in a year, and what pages cost with them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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


class Work(NamedTuple):
    """What a database is asked for a page: the same on every machine, and at any hour."""

    statements: int
    rows: int
    """That are read."""
    steps: int
    """Of SQLite's virtual machine in thousands; of PostgreSQL rows, in thousands, that the nodes of its plans take in."""


def work_of(app: Any, paths: tuple[str, ...]) -> dict[str, Work]:
    """What each page costs the database; each statement is made once more to be counted."""
    with ThreadPoolExecutor(1) as pool:  # the loop of a browser's tests may run in the caller's thread
        return pool.submit(lambda: asyncio.run(_work_of(app, paths))).result()


async def _work_of(app: Any, paths: tuple[str, ...]) -> dict[str, Work]:
    transport, engine = httpx.ASGITransport(app=app), app.state.engine
    asked: list[tuple[str, Any]] = []
    sa.event.listen(engine, "before_cursor_execute", lambda c, cursor, sql, values, *_: asked.append((sql, values)))
    done: dict[str, Work] = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await client.get("/")
        for path in paths:
            asked.clear()
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert ('class="rowlink"' if not path.startswith("/compare") else "<option") in answer.text, path
            reads = [(sql, values) for sql, values in asked if sql.startswith(("SELECT", "WITH"))]
            done[path] = Work(len(reads), *_done(engine, reads))
    return done


def _done(engine: sa.Engine, reads: list[tuple[str, Any]]) -> tuple[int, int]:
    """Rows that statements give, and steps."""
    rows = taken = 0
    steps: list[int] = []
    with engine.connect() as conn:
        raw: Any = conn.connection.dbapi_connection
        cursor = raw.cursor()
        if engine.dialect.name == "sqlite":
            raw.set_progress_handler(lambda: steps.append(1), 1000)
            rows = sum(len(cursor.execute(sql, values).fetchall()) for sql, values in reads)
            raw.set_progress_handler(None, 0)
            return rows, len(steps)
        for sql, values in reads:
            cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {sql}", values)
            plan = cursor.fetchone()[0][0]["Plan"]
            rows, taken = rows + int(plan["Actual Rows"]), taken + _taken(plan)
        return rows, taken // 1000


def _taken(node: dict[str, Any]) -> int:
    """Rows that a node of a plan and those below it have looked at."""
    left = sum(n for name, n in node.items() if name.startswith("Rows Removed by"))
    return round((node["Actual Rows"] + left) * node["Actual Loops"]) + sum(map(_taken, node.get("Plans", [])))
