"""GET endpoint of the notification delivery log.

Shapes:     GET -> JSON
Thread:     query pool
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fp8watch_server.api.examples import answers
from fp8watch_server.api.routes import listed
from fp8watch_server.http.databases import connect_everywhere
from fp8watch_server.notify.log import MAX_LIMIT, delivery_log

router = APIRouter(prefix="/api/v1", tags=["query"])

State = Literal["pending", "leased", "grouped", "sent", "summarised", "inhibited", "unrouted", "untold", "dead"]
Name = Annotated[str | None, Query(max_length=512)]

EXAMPLE = {
    "items": [
        {
            "id": "0c8e64c5a14d4f0f8f6c0f3b7a1d2e39",
            "run_id": "llama-7b-fp8",
            "incident_id": "5f0c1d2e3b4a59687786a5b4c3d2e1f0",
            "channel": "oncall",
            "kind": "firing",
            "state": "dead",
            "num_attempts": 1,
            "last_error": "HTTP 404 no_service",
            "created_at": 1763703600.0,
            "next_attempt_at": 1763703600.0,
            "sent_at": None,
            "mode": "inf-laundering",
            "severity": "critical",
            "title": "Inf laundered to 448 in layers.0.mlp.up input (fprop), tile (37, 5)",
        }
    ],
    "next": None,
}


@router.get("/notifications", responses=answers(EXAMPLE))
def get_notifications(
    request: Request,
    state: State | None = None,
    channel: Name = None,
    run: Name = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 100,
) -> Response:
    """Messages and what became of them, the newest first; `state=dead` for dead letters."""
    with connect_everywhere(request) as everywhere:
        found = [
            e for c in everywhere.conns for e in delivery_log(c, state=state, channel=channel, run_id=run, limit=limit)
        ]
    found.sort(key=lambda entry: (-entry["created_at"], entry["id"]))
    return listed(found[:limit], away=everywhere.away)
