"""What a diagnosis said of an incident: a limited body in, one row of incident_event, and a verdict where there was none.

Shapes:     JSON -> one row of incident_event
Thread:     query pool

The training process sends it, so the scope is `ingest`.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fp8watch_server.api import bodies
from fp8watch_server.api.routes import not_found
from fp8watch_server.auth import grant
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.http.databases import engine_for
from fp8watch_server.http.errors import JsonResponse, Problem
from fp8watch_server.store import queries

MAX_BYTES = 1 << 20

T = TypeVar("T")


async def decoded(request: Request, of: type[T], what: str, made_by: str) -> T:
    """The body as one of `of`.

    Args:
        what: its name in messages.
        made_by: what makes it, in the rule of messages.

    Raises:
        Problem: 413 above MAX_BYTES, 422 where it is something else, or has text that a database cannot hold.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BYTES:
            raise Problem(413, f"a {what} above 1 MiB", rule="at most 1 MiB", remedy="send a shorter one")
    return bodies.checked(bytes(body), of, what, f"the JSON of {made_by}", "send it as it was made")


async def note(request: Request, incident_id: str, kind: str, detail: Any, verdict: str | None) -> Response:
    """Keep it as an event of the incident; answers with the incident. An unknown verdict becomes `verdict`, if there is one."""
    granted = grant.of(request.scope)
    answer = await run_in_threadpool(_store, request, incident_id, kind, detail, verdict, granted)
    request.app.state.on_change()
    return answer


def _store(
    request: Request, incident_id: str, kind: str, detail: Any, verdict: str | None, granted: grant.Grant
) -> Response:
    c, e, now = t.incident.c, t.incident_event.c, time.time()
    with writing(engine_for(request)) as conn:
        mine = (c.id == incident_id, c.tenant == t.DEFAULT_TENANT)
        row = conn.execute(sa.select(t.incident).where(*mine).with_for_update()).first()
        if row is None:
            raise not_found("incident", incident_id)
        granted.require(row.run_id)
        values: dict[str, Any] = {"updated_at": now}
        if row.verdict == "unknown" and verdict is not None:
            values["verdict"] = verdict
        conn.execute(sa.update(t.incident).where(c.run_id == row.run_id, *mine).values(**values))
        of_incident = (e.run_id == row.run_id, e.tenant == row.tenant, e.incident_id == incident_id)
        seq = conn.execute(sa.select(sa.func.coalesce(sa.func.max(e.seq), 0) + 1).where(*of_incident)).scalar_one()
        event = {"run_id": row.run_id, "tenant": row.tenant, "incident_id": incident_id, "seq": seq, "kind": kind}
        event |= {"at": now, "step": row.last_step, "detail": msgspec.to_builtins(detail)}
        conn.execute(sa.insert(t.incident_event), [event])
        return JsonResponse(queries.incident(conn, incident_id), 201)
