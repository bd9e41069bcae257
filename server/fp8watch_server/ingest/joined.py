"""Several batches in one request, as a relay sends them: one header, one authorisation, one answer.

Upstream:   fp8watch_agent.relay_forward (HTTP)
Downstream: fp8watch_server.ingest.routes
Shapes:     POST [(session key, body)] -> a status each; 200 of a batch means committed
Thread:     event loop; batches go through the committer

One batch that is refused does not touch the others. A request of which some batches were committed may be sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from fp8watch_agent.joined import JOINED_CONTENT_TYPE, MAX_JOINED, MAX_JOINED_BYTES, split_bodies
from fp8watch_agent.wire import WireError
from fp8watch_server.http.errors import JsonResponse, Problem, answer_of
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.ingest.of_run import ingest_of, intake_of_body
from fp8watch_server.ingest.request_sender import RequestSender, quotas_of, sender_of
from fp8watch_server.ingest.routes import UNSTORED, read_body, router, run_of_body, unstored


@router.post("/batches/joined")
async def post_joined(request: Request) -> Response:
    """Take several batches; the answer has what each of them would have got alone."""
    stats, sender = ingest_of(request).stats, sender_of(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != JOINED_CONTENT_TYPE:
        raise Problem(
            415,
            f"Content-Type {content_type[:100]!r}",
            rule=f"Content-Type is {JOINED_CONTENT_TYPE}",
            remedy="send it with that type",
        )
    quotas_of(request).admit(sender.grant)
    with stats.inflight() as held:
        raw = await read_body(request, MAX_JOINED_BYTES, held)
        try:
            bodies = split_bodies(raw)
        except WireError as e:
            raise Problem(
                400,
                str(e),
                rule=f"a msgpack array of 1 to {MAX_JOINED} pairs of session key and body",
                remedy="correct it",
            ) from e
        answers = await asyncio.gather(*(_one(request, stats, sender, key, body) for key, body in bodies))
    return JsonResponse({"answers": answers})


async def _one(request: Request, stats: IngestStats, sender: RequestSender, key: str, body: bytes) -> dict[str, Any]:
    who = replace(sender, key_sha256=hashlib.sha256(key.encode()).hexdigest() if key else "")
    try:
        with stats.one_body() as outcome:
            try:
                ingest = await intake_of_body(request, body, run_of_body, queued=True)
                taken = await ingest.commit(body, who)
            except UNSTORED as e:
                raise unstored(e) from e
            outcome.accepted(len(body))
        ingest.wake()
    except Problem as e:
        return {"status": e.status, "error": str(e.extra.get("error", "refused"))}
    except Exception as e:  # noqa: BLE001  the answer to this batch alone
        return {"status": answer_of(request, e).status_code, "error": "unavailable"}
    answer: dict[str, Any] = {"status": 200, "acked": taken.seq}
    return answer | ({"captures": taken.captures} if taken.captures else {})
