"""What people do to runs: tags, a note, archive, delete.

Shapes:     PATCH, DELETE -> one transaction
Thread:     query pool
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fp8watch_server.api import bodies
from fp8watch_server.api.routes import not_found
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.http.databases import engine_for
from fp8watch_server.http.errors import JsonResponse
from fp8watch_server.incidents import deleted_run
from fp8watch_server.store import queries
from fp8watch_server.store.registrations import MAX_TAG_CHARS, MAX_TAGS, set_tags

router = APIRouter(prefix="/api/v1", tags=["change"])

Tag = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TAG_CHARS)]
RULE = "{tags: at most 50 of 1 to 100 characters, note: at most 8000 characters, archived: true or false}"


class RunChange(msgspec.Struct):
    """PATCH /api/v1/runs/{run}: what is not named stays as it is."""

    tags: Annotated[list[Tag], msgspec.Meta(max_length=MAX_TAGS)] | None = None
    """All of its tags."""
    note: Annotated[str, msgspec.Meta(max_length=8000)] | None = None
    archived: bool | None = None
    """Out of the list and kept; it comes back by itself when the run goes on."""


@router.patch("/runs/{run_id:path}")
async def change_run(request: Request, run_id: str) -> Response:
    """Change the tags, the note, or whether it is archived."""
    body = await bodies.read(request, RunChange, "run", RULE)
    return await run_in_threadpool(_change, request, run_id, body)


def _change(request: Request, run_id: str, body: RunChange) -> Response:
    c, now = t.run.c, time.time()
    mine = (c.run_id == run_id, c.tenant == t.DEFAULT_TENANT)
    values: dict[str, Any] = {"edited_at": now}
    if body.note is not None:
        values["note"] = body.note
    if body.archived is not None:
        values["archived_at"] = now if body.archived else None
    with writing(engine_for(request)) as conn:
        if conn.execute(sa.update(t.run).where(*mine).values(**values)).rowcount == 0:
            raise not_found("run", run_id)
        if body.tags is not None:
            set_tags(conn, run_id, body.tags)
        return JsonResponse(queries.run(conn, run_id))


@router.delete("/runs/{run_id:path}")
def delete_run(request: Request, run_id: str) -> Response:
    """Delete a run with everything that belongs to it; what was told of it is over. One that still sends registers again, and begins anew."""
    with writing(engine_for(request)) as conn:
        gone = deleted_run.delete_run(conn, run_id, time.time(), request.app.state.settings.public_url)
    if not gone:
        raise not_found("run", run_id)
    request.app.state.on_change()
    return Response(status_code=204)
