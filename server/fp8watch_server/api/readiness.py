"""Whether the collector runs, and whether it takes batches: /healthz and /readyz, for load balancers.

Shapes:     GET -> {"status"}
Thread:     event loop; the database is asked in a thread of its own
"""

from __future__ import annotations

import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request
from sqlalchemy.engine import Engine
from starlette.responses import Response

from fp8watch_server.db import schema as t
from fp8watch_server.http.databases import away_header, shards_of
from fp8watch_server.http.errors import JsonResponse

router = APIRouter(tags=["operations"])


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return JsonResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """The database answers, and is at the version of this collector; with a queue: that one takes batches."""
    queue_ready = request.app.state.ingest.committer.queue_ready
    if queue_ready is not None:  # batches are taken while the database is away
        return JsonResponse({"status": "ready" if queue_ready else "the queue is away"}, 200 if queue_ready else 503)
    shards = shards_of(request.app)
    # neither behind the questions of others nor over their connections: who is not ready is sent no batches
    await to_thread.run_sync(_ask, shards.home, limiter=CapacityLimiter(1))
    return JsonResponse({"status": "ready"}, headers=away_header(shards.away))


def _ask(engine: Engine) -> None:
    with engine.connect() as conn:
        conn.execute(sa.select(t.run.c.run_id).limit(1)).first()
