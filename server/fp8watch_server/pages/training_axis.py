"""What the training chart may be drawn over besides steps: the clock of training, and tokens where they were logged.

Shapes:     steps of a chart -> knots [[step, seconds since 1970], …]; name of the logged tokens, or None
Thread:     any: one database connection a request
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.store import queries
from fp8watch_server.store.fields import FieldError

TOKENS = ("tokens_seen", "num_input_tokens_seen", "consumed_tokens", "total_tokens", "num_tokens", "tokens")
"""Names under which trainers log how many tokens they have seen; the first that there is counts."""
MAX_KNOTS, MAX_PANELS = 300, 6


def token_name(conn: Connection, run_id: str) -> str | None:
    """The name under which this run logs its tokens."""
    c = t.logged.c
    there = set()
    for name in TOKENS:
        where = (c.run_id == run_id, c.tenant == t.DEFAULT_TENANT, c.name == name)
        if conn.execute(sa.select(c.name).where(*where).limit(1)).first() is not None:
            there.add(name)
    return next((name for name in TOKENS if name in there), None)


def times(conn: Connection, run_id: str, steps: Sequence[int]) -> list[list[float]]:
    """[[step, time]] of some of the steps, time never falling: of a step that was computed twice, the later time."""
    every = max(1, -(-len(steps) // MAX_KNOTS))
    wanted = sorted({*steps[::every], *steps[-1:]})
    c = t.scalar.c
    where = (c.run_id == run_id, c.tenant == t.DEFAULT_TENANT, c.step.in_(wanted), c.time.is_not(None))
    rows = conn.execute(sa.select(c.step, sa.func.max(c.time)).where(*where).group_by(c.step).order_by(c.step))
    out: list[list[float]] = []
    for step, at in rows:
        out.append([int(step), max(float(at), out[-1][1] if out else float(at))])
    return out


def tokens(conn: Connection, run_id: str, low: int | None, high: int | None, points: int) -> list[list[float]]:
    """[[step, tokens]] where a count of tokens was logged that never falls; a count of each step alone is none."""
    name = token_name(conn, run_id)
    if name is None:
        return []
    series = queries.scalars(conn, run_id, name, low, high, points)
    pairs = [[int(s), float(v)] for s, v in zip(series["steps"], series["values"], strict=True) if v is not None]
    rises = all(a[1] <= b[1] for a, b in itertools.pairwise(pairs))
    return pairs if len(pairs) > 1 and rises and pairs[-1][1] > pairs[0][1] else []


def asked_panels(text: str | None) -> list[str]:
    """Names of further panels, from a JSON list; what is none is left out."""
    try:
        names = json.loads(text or "[]")
    except ValueError:
        return []
    found = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
    return list(dict.fromkeys(found))[:MAX_PANELS]


def further(
    conn: Connection, run_id: str, names: Sequence[str], low: int | None, high: int | None, points: int
) -> dict[str, Any]:
    """Series of logged names; those that the run does not have are left out: an address may be old."""
    out = {}
    for name in names:
        try:
            out[name] = queries.scalars(conn, run_id, name, low, high, points)
        except FieldError:
            continue
    return out
