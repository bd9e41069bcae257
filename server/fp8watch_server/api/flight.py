"""Query API of the flight recorder: sites × steps around one step, as the page of an incident draws it.

Shapes:     GET /api/v1/runs/{run}/flight?at=&span= -> JSON
Thread:     query pool
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from fp8watch_server.api.examples import answers
from fp8watch_server.api.routes import Conn, not_found
from fp8watch_server.http.errors import JsonResponse
from fp8watch_server.store import flight, queries
from fp8watch_server.store.flight_words import band_words, said, spread

router = APIRouter(prefix="/api/v1", tags=["query"])

EXAMPLE: dict[str, Any] = {
    "run_id": "llama-7b-fp8",
    "at": 4211,
    "span": 1,
    "steps": [4210, 4211, 4212],
    "num_sites": 1,
    "rows": [
        {
            "pane": "fprop",
            "label": "layers.0.mlp.up",
            "modules": 1,
            "operand": "input",
            "direction": "rowwise",
            "site": 7722284667010904,
            "values": [0.3, 14.2, None],
            "sites": None,
        }
    ],
    "sites": {},
    "marks": [[0, 1, 7722284667010904, "1 NaN or Inf element"]],
    "sqnr": [],
    "outside": [0, 1, 0],
    "looked": [1, 1, 0],
    "maps": {"7722284667010904": [4211]},
    "band": band_words(),
    "said": ["At step 4211, 1 of 1 sites measured stands out; …"],
    "spread": {"first": "layers.0.mlp.up input", "places": [], "num_sites": 1, "first_step": 4211, "last_step": 4211},
}


@router.get("/runs/{run_id:path}/flight", responses=answers(EXAMPLE))
def get_flight(
    conn: Conn,
    run_id: str,
    at: Annotated[int, Query(ge=0, le=queries.MAX_STEP)],
    span: Annotated[int, Query(ge=1, le=flight.MAX_SPAN)] = flight.SPAN,
) -> Response:
    """How far each site was from its own band in the steps around one."""
    run = queries.run(conn, run_id)
    if run is None:
        raise not_found("run", run_id)
    found = flight.around(conn, run, queries.sites(conn, run_id), at, span)
    return JsonResponse(
        {**flight.as_json(conn, run_id, found), "band": band_words(), "said": said(found), "spread": spread(found)}
    )
