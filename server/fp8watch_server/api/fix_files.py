"""GET /api/v1/incidents/{id}/fix: the fix of an incident as a file for a framework.

Shapes:     an incident -> text
Thread:     query pool
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from fp8watch_server.api.examples import answers
from fp8watch_server.api.routes import Conn, not_found
from fp8watch_server.http.errors import Problem
from fp8watch_server.incidents.fix_files import MAX_NAME, MAX_NAMES, TARGETS, FixError, fix_file
from fp8watch_server.store import queries

router = APIRouter(prefix="/api/v1", tags=["query"])

For = Literal["megatron", "te-debug", "torchtitan", "torchao", "fp8watch"]
Name = Annotated[str, Query(max_length=MAX_NAME)]


@router.get(
    "/incidents/{incident_id}/fix",
    response_class=Response,
    responses={
        **answers({}),
        200: {
            "description": "The file",
            "content": {
                "application/yaml": {},
                "application/toml": {"example": 'filter_fqns = ["layers.0.mlp.up"]\n'},
                "text/x-python": {},
            },
        },
    },
)
def get_fix(
    conn: Conn,
    incident_id: str,
    for_: Annotated[For, Query(alias="for")],
    module: Annotated[list[Name] | None, Query(max_length=MAX_NAMES)] = None,
) -> Response:
    """A file that keeps the incident's module (or `module`, as "module" or "module.operand") in high precision."""
    found = queries.incident(conn, incident_id)
    if found is None:
        raise not_found("incident", incident_id)
    run = queries.run(conn, found["run_id"])
    facts = (run["sessions"][0]["facts"] or {}) if run is not None and run["sessions"] else {}
    named = found["place"]["module"]
    why = f"fp8watch: {found['title']} (step {found['first_step']}, incident {found['id']})"
    try:
        text = fix_file(for_, module or ([named] if named else []), why, facts)
    except FixError as e:
        raise Problem(422, str(e), rule="modules, and a recipe for fp8watch's own file", remedy="give module=") from e
    target = TARGETS[for_]
    name = f"fp8watch-{found['mode']}{target.suffix}"
    return Response(
        text, media_type=target.media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'}
    )
