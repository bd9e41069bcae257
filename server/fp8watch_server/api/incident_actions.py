"""What people do to incidents: acknowledge, look at, resolve, mark, assign, comment; and silences.

Shapes:     POST, DELETE -> one transaction for each incident, with its event and, where one is due, its message
Thread:     query pool

Most can be done to one incident, or to all incidents of a cause that ask for somebody: `/causes/{cause_id}/…`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fp8watch_server.api import bodies
from fp8watch_server.api.routes import listed, not_found
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.http.databases import away_header, connect_everywhere, engine_for, shards_of
from fp8watch_server.http.errors import JsonResponse
from fp8watch_server.incidents import triage
from fp8watch_server.store import queries

router = APIRouter(prefix="/api/v1", tags=["change"])

MAX_SILENCE_S = 365 * 86400.0
Row = Mapping[str, Any]
Change = Callable[[sa.Connection, Row, float], dict[str, Any] | None]


class OwnerBody(msgspec.Struct):
    """POST …/assign: whose it is, '' for nobody's."""

    owner: Annotated[str, msgspec.Meta(max_length=bodies.MAX_NAME_CHARS)]


class CommentBody(msgspec.Struct):
    """POST …/comment."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=8000)]


@router.post("/incidents/{incident_id}/ack")
def acknowledge_incident(request: Request, incident_id: str) -> Response:
    """Somebody looks after it. Idempotent; a resolved incident stays resolved."""
    return _act(request, incident_id, "ack")


@router.post("/incidents/{incident_id}/seen")
def see_incident(request: Request, incident_id: str) -> Response:
    """Somebody has looked at it. Idempotent. Takes back what a resolved one was closed as."""
    return _act(request, incident_id, "seen")


@router.post("/incidents/{incident_id}/resolve")
def resolve_incident(request: Request, incident_id: str) -> Response:
    """It is over. Idempotent."""
    return _act(request, incident_id, "resolve")


@router.post("/incidents/{incident_id}/fixed")
def fix_incident(request: Request, incident_id: str) -> Response:
    """It is over, and its cause is removed: when the cause opens again, in any run, it has regressed."""
    return _act(request, incident_id, "fixed")


@router.post("/incidents/{incident_id}/false-alarm")
def refute_incident(request: Request, incident_id: str) -> Response:
    """There was nothing wrong. It is kept, counted in /metrics, and listed by `fp8watch rules false-alarms`."""
    return _act(request, incident_id, "false-alarm")


@router.post("/incidents/{incident_id}/assign")
async def assign_incident(request: Request, incident_id: str) -> Response:
    """Say whose it is. Later incidents of the same cause are theirs, too."""
    owner, by = await _owner(request)
    return await run_in_threadpool(
        _change, request, incident_id, lambda conn, row, now: triage.assign(conn, row, owner, now, by=by)
    )


@router.post("/incidents/{incident_id}/comment")
async def comment_incident(request: Request, incident_id: str) -> Response:
    """Add what somebody found out to its timeline."""
    body = await bodies.read(request, CommentBody, "comment", '{"text"}: 1 to 8000 characters')
    by = bodies.author(request)
    return await run_in_threadpool(
        _change, request, incident_id, lambda conn, row, now: triage.comment(conn, row, body.text, now, by=by)
    )


@router.post("/causes/{cause_id}/assign")
async def assign_cause(request: Request, cause_id: str) -> Response:
    """Say whose all incidents of a cause are, in all runs."""
    owner, by = await _owner(request)
    return await run_in_threadpool(
        _change_all, request, cause_id, lambda conn, row, now: triage.assign(conn, row, owner, now, by=by), every=True
    )


@router.post("/causes/{cause_id}/{action}")
def act_on_cause(
    request: Request, cause_id: str, action: Literal["ack", "seen", "resolve", "fixed", "false-alarm"]
) -> Response:
    """The same to each incident of a cause that is open or was not seen yet, in all runs."""
    by = bodies.author(request)
    return _change_all(request, cause_id, lambda conn, row, now: triage.act(conn, row, action, now, by=by))


async def _owner(request: Request) -> tuple[str, str]:
    rule = f'{{"owner"}}: a name of at most {bodies.MAX_NAME_CHARS} characters, or "" for nobody'
    body = await bodies.read(request, OwnerBody, "owner", rule)
    return body.owner.strip(), bodies.author(request)


def _act(request: Request, incident_id: str, action: str) -> Response:
    by = bodies.author(request)
    return _change(request, incident_id, lambda conn, row, now: triage.act(conn, row, action, now, by=by))


def _change(request: Request, incident_id: str, change: Change) -> Response:
    with writing(engine_for(request)) as conn:
        row = _locked(conn, incident_id)
        if row is None:
            raise not_found("incident", incident_id)
        _apply(request, conn, row, change, time.time())
        answer = JsonResponse(queries.incident(conn, incident_id))
    request.app.state.on_change()
    return answer


def _locked(conn: sa.Connection, incident_id: str) -> dict[str, Any] | None:
    """An incident, for as long as the transaction lasts."""
    mine = (t.incident.c.id == incident_id, t.incident.c.tenant == t.DEFAULT_TENANT)
    row = conn.execute(sa.select(t.incident).where(*mine).with_for_update()).mappings().first()
    return None if row is None else dict(row)


def _change_all(request: Request, cause_id: str, change: Change, *, every: bool = False) -> Response:
    shards = shards_of(request.app)
    away = shards.away
    done = [_change_in(request, engine, cause_id, change, every) for engine in shards.answering()]
    num_incidents, num_changed = (sum(counts) for counts in zip(*done, strict=True))
    if not num_incidents:
        raise not_found("incident of the cause", cause_id)
    request.app.state.on_change()
    answer = {"cause_id": cause_id, "num_incidents": num_incidents, "num_changed": num_changed}
    return JsonResponse(answer, headers=away_header(away))


def _change_in(request: Request, engine: sa.Engine, cause_id: str, change: Change, every: bool) -> tuple[int, int]:
    """The same to the incidents of a cause in one database; how many it has, and how many were changed.

    A transaction each: detection locks incidents of a run as it comes to need them, and neither waits for the other with what the other
    wants in hand.
    """
    c = t.incident.c
    of_cause = (c.tenant == t.DEFAULT_TENANT, c.cause_id == cause_id)
    with engine.connect() as conn:
        of_it = sa.select(c.id, c.status, c.seen_at).where(*of_cause).order_by(c.opened_at.desc(), c.id)
        rows = conn.execute(of_it).all()
    # the newest in any case: a cause is fixed, or never was one, after everything of it was seen, too
    asking = [r.id for i, r in enumerate(rows) if every or i == 0 or r.status != "resolved" or r.seen_at is None]
    num_changed = 0
    for incident_id in asking:
        with writing(engine) as conn:
            row = _locked(conn, incident_id)
            if row is not None:
                num_changed += _apply(request, conn, row, change, time.time())
    return len(rows), num_changed


def _apply(request: Request, conn: sa.Connection, row: Row, change: Change, now: float) -> bool:
    changed = change(conn, row, now)
    if changed is not None and changed["status"] == "resolved" != row["status"]:
        state = request.app.state
        state.detection.queue_resolved(conn, changed, now, state.settings.public_url)
    return changed is not None


class SilenceBody(msgspec.Struct):
    """POST /api/v1/silences: what not to send messages about, and for how long."""

    duration_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SILENCE_S)]
    run_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    mode: Annotated[str, msgspec.Meta(max_length=100)] = ""
    module: Annotated[str, msgspec.Meta(max_length=512)] = ""
    comment: Annotated[str, msgspec.Meta(max_length=2000)] = ""


@router.get("/silences")
def get_silences(request: Request) -> Response:
    """Silences that have not run out."""
    with connect_everywhere(request) as everywhere:
        found = {silence["id"]: silence for conn in everywhere.conns for silence in queries.silences(conn)}
    return listed(sorted(found.values(), key=lambda silence: silence["expires_at"]), away=everywhere.away)


@router.post("/silences")
async def post_silence(request: Request) -> Response:
    """Send no messages about a run, a mode or a module for a while. Incidents are kept all the same."""
    got = await bodies.read(request, SilenceBody, "silence", "{duration_s, run_id, mode, module, comment}")
    now = time.time()
    row = {"run_id": got.run_id, "tenant": t.DEFAULT_TENANT, "id": uuid.uuid4().hex, "mode": got.mode}
    stored: dict[str, Any] = {**row, "module": got.module, "comment": got.comment, "created_at": now}
    stored["expires_at"] = now + got.duration_s

    def store() -> None:
        # in each database, because a run may be a pattern; a shard that is away is given it later
        for engine in shards_of(request.app).answering():
            with writing(engine) as conn:
                conn.execute(sa.insert(t.silence), [stored])

    await run_in_threadpool(store)
    return JsonResponse({k: v for k, v in stored.items() if k != "tenant"}, 201)


@router.delete("/silences/{silence_id}")
def delete_silence(request: Request, silence_id: str) -> Response:
    """End a silence."""
    c = t.silence.c
    num_gone = 0
    for engine in shards_of(request.app).engines():
        with writing(engine) as conn:
            gone = conn.execute(sa.delete(t.silence).where(c.id == silence_id, c.tenant == t.DEFAULT_TENANT))
        num_gone += gone.rowcount
    if not num_gone:
        raise not_found("silence", silence_id)
    return Response(status_code=204)
