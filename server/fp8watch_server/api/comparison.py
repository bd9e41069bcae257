"""POST /v1/incidents/{id}/comparison: stores an FP8/BF16 comparison with its incident.

Shapes:     a Verdict as JSON -> one row of incident_event
Thread:     query pool

The training process sends it, so the scope is `ingest`. An incident with an unknown verdict takes the measured one.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fp8watch_server.api.routes import not_found
from fp8watch_server.auth import grant
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.http.errors import JsonResponse, Problem
from fp8watch_server.store import queries

router = APIRouter(prefix="/v1", tags=["ingest"])

KIND = "comparison"
MAX_BYTES = 1 << 20
MAX_LAYERS_KEPT = 64
"""Of the layers the worst are kept: a page is no place for a thousand rows."""

Number = float | Literal["nan", "inf", "-inf"]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class StepPair(msgspec.Struct):
    """One step in both precisions."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    loss_fp8: Number
    loss_high: Number
    difference: Number


class LayerPair(msgspec.Struct):
    """One Linear in both precisions."""

    module: Name
    output_error: Number
    first_diverging_step: int | None = None
    grad_cosine: Number | None = None
    grad_cosine_min: Number | None = None


class Comparison(msgspec.Struct):
    """What `fp8watch.diagnose.Verdict.as_json` gives."""

    verdict: Literal["fp8", "shared"]
    sentence: Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]
    steps: Annotated[list[StepPair], msgspec.Meta(min_length=1, max_length=1000)]
    layers: Annotated[list[LayerPair], msgspec.Meta(max_length=10000)]
    recipe: Annotated[str, msgspec.Meta(max_length=100)]
    high_precision: Annotated[str, msgspec.Meta(max_length=100)]
    first_diverging_step: int | None = None
    first_diverging_layer: Name | None = None
    try_next: Annotated[list[Annotated[str, msgspec.Meta(max_length=1500)]], msgspec.Meta(max_length=8)] = []


def _error(layer: LayerPair) -> float:
    value = float(layer.output_error)
    return value if value == value else float("inf")


@router.post("/incidents/{incident_id}/comparison")
async def post_comparison(request: Request, incident_id: str) -> Response:
    """Keep a comparison with BF16. The newest one is shown on the incident's page."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BYTES:
            raise Problem(413, "a comparison above 1 MiB", rule="at most 1 MiB", remedy="compare fewer steps")
    try:
        got = msgspec.json.decode(bytes(body), type=Comparison)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise Problem(
            422,
            f"comparison: {e}",
            rule="the JSON of fp8watch.diagnose.Verdict.as_json",
            remedy="send it as it was made",
        ) from e
    worst = {id(x) for x in sorted(got.layers, key=_error, reverse=True)[:MAX_LAYERS_KEPT]}
    got.layers = [x for x in got.layers if id(x) in worst]  # in the order of execution
    answer = await run_in_threadpool(_store, request.app.state.engine, incident_id, got, grant.of(request.scope))
    request.app.state.on_change()
    return answer


def _store(engine: sa.Engine, incident_id: str, got: Comparison, granted: grant.Grant) -> Response:
    c, e, now = t.incident.c, t.incident_event.c, time.time()
    with writing(engine) as conn:
        mine = (c.id == incident_id, c.tenant == t.DEFAULT_TENANT)
        row = conn.execute(sa.select(t.incident).where(*mine).with_for_update()).first()
        if row is None:
            raise not_found("incident", incident_id)
        granted.require(row.run_id)
        values: dict[str, Any] = {"updated_at": now}
        if row.verdict == "unknown":
            values["verdict"] = got.verdict
        conn.execute(sa.update(t.incident).where(c.run_id == row.run_id, *mine).values(**values))
        of_incident = (e.run_id == row.run_id, e.tenant == row.tenant, e.incident_id == incident_id)
        seq = conn.execute(sa.select(sa.func.coalesce(sa.func.max(e.seq), 0) + 1).where(*of_incident)).scalar_one()
        event = {"run_id": row.run_id, "tenant": row.tenant, "incident_id": incident_id, "seq": seq, "kind": KIND}
        event |= {"at": now, "step": row.last_step, "detail": msgspec.to_builtins(got)}
        conn.execute(sa.insert(t.incident_event), [event])
        return JsonResponse(queries.incident(conn, incident_id), 201)
