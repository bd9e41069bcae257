"""Incident actions: acknowledge, resolve, and silences.

Shapes:     POST, DELETE -> one transaction with its event and, where one is due, its message
Thread:     query pool
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fp8watch_server.api.routes import Conn, listed, not_found
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.http.errors import JsonResponse, Problem
from fp8watch_server.store import queries

router = APIRouter(prefix="/api/v1", tags=["change"])

MAX_SILENCE_S = 365 * 86400.0


@router.post("/incidents/{incident_id}/ack")
def acknowledge_incident(request: Request, incident_id: str) -> Response:
    """Somebody looks after it. Idempotent; a resolved incident stays resolved."""
    return _set_status(request, incident_id, "acknowledged", from_=("open",))


@router.post("/incidents/{incident_id}/resolve")
def resolve_incident(request: Request, incident_id: str) -> Response:
    """It is over. Idempotent."""
    return _set_status(request, incident_id, "resolved", from_=("open", "acknowledged"))


def _set_status(request: Request, incident_id: str, status: str, from_: tuple[str, ...]) -> Response:
    now = time.time()
    c, e = t.incident.c, t.incident_event.c
    with writing(request.app.state.engine) as conn:
        row = conn.execute(sa.select(t.incident).where(c.id == incident_id, c.tenant == t.DEFAULT_TENANT)).first()
        if row is None:
            raise not_found("incident", incident_id)
        if row.status in from_:
            values: dict[str, Any] = {"status": status, "updated_at": now}
            if status == "resolved":
                values["resolved_at"] = now
            conn.execute(sa.update(t.incident).where(c.run_id == row.run_id, c.id == incident_id).values(**values))
            of_incident = (e.run_id == row.run_id, e.tenant == row.tenant, e.incident_id == incident_id)
            seq = conn.execute(sa.select(sa.func.coalesce(sa.func.max(e.seq), 0) + 1).where(*of_incident)).scalar_one()
            event = {"run_id": row.run_id, "tenant": row.tenant, "incident_id": incident_id, "seq": seq}
            event |= {"kind": status, "at": now, "step": row.last_step, "detail": {"by": "api"}}
            conn.execute(sa.insert(t.incident_event), [event])
            if status == "resolved":
                state = request.app.state
                state.detection.queue_resolved(conn, {**row._mapping, **values}, now, state.settings.public_url)
        answer = JsonResponse(queries.incident(conn, incident_id))
    request.app.state.on_change()
    return answer


class SilenceBody(msgspec.Struct):
    """POST /api/v1/silences: what not to send messages about, and for how long."""

    duration_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SILENCE_S)]
    run_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    mode: Annotated[str, msgspec.Meta(max_length=100)] = ""
    module: Annotated[str, msgspec.Meta(max_length=512)] = ""
    comment: Annotated[str, msgspec.Meta(max_length=2000)] = ""


@router.get("/silences")
def get_silences(conn: Conn) -> Response:
    """Silences that have not run out."""
    return listed(queries.silences(conn))


@router.post("/silences")
async def post_silence(request: Request) -> Response:
    """Send no messages about a run, a mode or a module for a while. Incidents are kept all the same."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > 64 << 10:
            raise Problem(413, "a body above 64 KiB", rule="at most 64 KiB", remedy="shorten the comment")
    try:
        got = msgspec.json.decode(bytes(body), type=SilenceBody)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise Problem(
            422, f"silence: {e}", rule="{duration_s, run_id, mode, module, comment}", remedy="correct the value"
        ) from e
    now = time.time()
    row = {"run_id": got.run_id, "tenant": t.DEFAULT_TENANT, "id": uuid.uuid4().hex, "mode": got.mode}
    stored: dict[str, Any] = {**row, "module": got.module, "comment": got.comment, "created_at": now}
    stored["expires_at"] = now + got.duration_s

    def store() -> None:
        with writing(request.app.state.engine) as conn:
            conn.execute(sa.insert(t.silence), [stored])

    await run_in_threadpool(store)
    return JsonResponse({k: v for k, v in stored.items() if k != "tenant"}, 201)


@router.delete("/silences/{silence_id}")
def delete_silence(request: Request, silence_id: str) -> Response:
    """End a silence."""
    c = t.silence.c
    with writing(request.app.state.engine) as conn:
        gone = conn.execute(sa.delete(t.silence).where(c.id == silence_id, c.tenant == t.DEFAULT_TENANT))
    if gone.rowcount == 0:
        raise not_found("silence", silence_id)
    return Response(status_code=204)
