"""Query API: GET /api/v1/….

Upstream:   fp8watch_server.store.queries
Shapes:     query strings -> JSON as docs/ names it; lists are {"items": [...], "next": cursor | null}
Thread:     query pool

Non-finite values are data: null in an array, with [index, "nan" | "inf" | "-inf"] in `nonfinite`. A range is given in
steps (from, to), in time (since, until; seconds since 1970), or both: their intersection. Charts come as JSON or with
format=csv, and carry an ETag that changes with the data they are made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Query, Request
from sqlalchemy.engine import Connection
from starlette.responses import Response

from fp8watch_server.api import csv_answers
from fp8watch_server.api import examples as examples
from fp8watch_server.api.examples import answers
from fp8watch_server.db import schema as t
from fp8watch_server.http.databases import away_header, connect_everywhere, connection_in_turn
from fp8watch_server.http.errors import JsonResponse, Problem
from fp8watch_server.store import checkpoints, etag, queries
from fp8watch_server.store.over_databases import Page, merged_page
from fp8watch_server.store.rows import IncidentRow, RunRow

router = APIRouter(prefix="/api/v1", tags=["query"])

Step = Annotated[int | None, Query(ge=0, le=queries.MAX_STEP)]
FromStep = Annotated[int | None, Query(alias="from", ge=0, le=queries.MAX_STEP)]
ToStep = Annotated[int | None, Query(alias="to", ge=0, le=queries.MAX_STEP)]
Time = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False)]
Format = Literal["json", "csv"]
Points = Annotated[int, Query(ge=1, le=10_000)]
Rank = Annotated[int | None, Query(ge=0, le=(1 << 31) - 1)]
Row = Annotated[int | None, Query(ge=0, le=(1 << 31) - 1)]
SiteId = Annotated[int, Query(ge=0, le=(1 << 53) - 1)]
Limit = Annotated[int, Query(ge=1, le=queries.MAX_LIMIT)]
Cursor = Annotated[str | None, Query(max_length=2048)]
Choice = Annotated[str | None, Query(max_length=100)]
# A misspelt value must not read as "no incidents"; an empty one means all.
Status = Literal["", "open", "acknowledged", "resolved"] | None
State = Literal["", "asks", "open", "acknowledged", "unseen", "seen", "fixed", "false-alarm"] | None
"""As people use them; "asks": open and not taken by anybody, or over and not seen."""
Severity = Literal["", "info", "warning", "critical"] | None

MAX_SITE_ID = (1 << 53) - 1


Conn = Annotated[Connection, Depends(connection_in_turn)]


@dataclass(frozen=True)
class Window:
    """Requested steps; None is open."""

    from_step: int | None
    to_step: int | None


def _window(
    conn: Conn,
    run_id: str,
    from_: FromStep = None,
    to: ToStep = None,
    since: Time = None,
    until: Time = None,
) -> Window:
    if since is None and until is None:
        return Window(from_, to)
    steps = etag.steps_between(conn, run_id, since, until)
    if steps is None:
        return Window(queries.MAX_STEP, queries.MAX_STEP)
    low = steps[0] if from_ is None else max(steps[0], from_)
    high = steps[1] if to is None else min(steps[1], to)
    return Window(low, high) if low <= high else Window(queries.MAX_STEP, queries.MAX_STEP)


Steps = Annotated[Window, Depends(_window)]


def _chart(
    request: Request,
    conn: Connection,
    run_id: str,
    window: Window,
    make: Callable[[], dict[str, Any]],
    csv: Callable[[dict[str, Any]], str],
    format_: Format,
) -> Response:
    """A chart with its ETag; 304 when the client has it already."""
    asked = (request.app.version, request.url.path, request.url.query)
    tag = f'"{etag.validator(conn, run_id, window.from_step, window.to_step, *asked)}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
    known = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    if tag in known:
        return Response(status_code=304, headers=headers)
    data = make()
    if format_ == "csv":
        headers["Content-Disposition"] = "attachment; filename=fp8watch.csv"
        return Response(csv(data), headers=headers, media_type="text/csv")
    return JsonResponse(data, headers=headers)


def listed(items: list[Any], following: str | None = None, *, away: Sequence[str] = ()) -> Response:
    """The JSON form of a list; a header names the shards that are away, whose items it lacks."""
    return JsonResponse({"items": items, "next": following}, headers=away_header(away))


def not_found(what: str, id_: Any) -> Problem:
    """A 404 that says where to look."""
    return Problem(
        404,
        f"there is no {what} {str(id_)[:200]!r}",
        rule=f"the {what} must have been registered",
        remedy=f"list them: GET /api/v1/{'incidents' if what == 'incident' else 'runs'}",
    )


def require_run(conn: Connection, run_id: str) -> None:
    """A 404 for a run that is not there."""
    c = t.run.c
    if not conn.execute(sa.select(c.run_id).where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT)).first():
        raise not_found("run", run_id)


def _require_site(conn: Connection, run_id: str, site: int) -> None:
    c = t.site.c
    if (
        not 0 <= site <= MAX_SITE_ID
        or not conn.execute(
            sa.select(c.site).where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT, c.site == site)
        ).first()
    ):
        raise not_found("site", site)


@router.get("/runs", responses=answers(examples.listed(examples.RUN)))
def get_runs(request: Request, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """Runs, the newest first."""

    def of_one(conn: Connection) -> Page[RunRow]:
        return queries.runs_page(conn, cursor=cursor, limit=limit)

    with connect_everywhere(request) as everywhere:
        return listed(*merged_page(everywhere.conns, of_one, "created_at", limit), away=everywhere.away)


@router.get("/incidents", responses=answers(examples.listed(examples.INCIDENT)))
def get_all_incidents(
    request: Request,
    status: Status = None,
    state: State = None,
    severity: Severity = None,
    mode: Choice = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Incidents of all runs, the newest first."""

    def of_one(conn: Connection) -> Page[IncidentRow]:
        wanted = (None, status or None, severity or None, mode or None)
        return queries.incidents_page(conn, *wanted, state=state or None, cursor=cursor, limit=limit)

    with connect_everywhere(request) as everywhere:
        return listed(*merged_page(everywhere.conns, of_one, "opened_at", limit), away=everywhere.away)


@router.get("/incidents/{incident_id}", responses=answers(examples.INCIDENT))
def get_incident(conn: Conn, incident_id: str) -> Response:
    """One incident, with its events."""
    found = queries.incident(conn, incident_id)
    if found is None:
        raise not_found("incident", incident_id)
    return JsonResponse(found)


@router.get(
    "/runs/{run_id:path}/sites/{site}/histogram",
    responses=answers(examples.HISTOGRAM, csv="step,0,2^-1,2^0\r\n4210,0,120,8072\r\n", cached=True),
)
def get_histogram(
    request: Request,
    conn: Conn,
    run_id: str,
    site: int,
    window: Steps,
    field: str = "amax_hist",
    points: Points = 200,
    format: Format = "json",
) -> Response:
    """A histogram of a site over steps."""
    require_run(conn, run_id)
    _require_site(conn, run_id, site)

    def make() -> dict[str, Any]:
        return queries.histogram(conn, run_id, site, window.from_step, window.to_step, points, field)

    return _chart(request, conn, run_id, window, make, csv_answers.histogram, format)


@router.get("/runs/{run_id:path}/sites/{site}/tile-map", responses=answers(examples.TILE_MAP))
def get_tile_map(
    conn: Conn, run_id: str, site: int, step: Step = None, rank: Rank = None, row: Row = None, attempt: Rank = None
) -> Response:
    """Every tile of a site in a step, else the newest kept: of a map that is too large the rows around `row`, of several attempts that of `attempt`."""
    require_run(conn, run_id)
    _require_site(conn, run_id, site)
    if (found := queries.tile_map(conn, run_id, site, step, rank, row, attempt)) is None:
        raise Problem(
            404,
            f"no tile map of site {site} at step {step}",
            rule="a map is there when it was captured, and is kept for 256 steps and around incidents",
            remedy="choose one of steps_available, or attach with tile_maps='all'",
            steps_available=queries.steps_available(conn, run_id, site, rank),
        )
    return JsonResponse(found)


@router.get("/runs/{run_id:path}/sites", responses=answers(examples.listed(examples.SITE)))
def get_sites(conn: Conn, run_id: str) -> Response:
    """The sites of a run in data-flow order."""
    require_run(conn, run_id)
    return listed(queries.sites(conn, run_id))


@router.get(
    "/runs/{run_id:path}/series",
    responses=answers(examples.SERIES, csv="step,amax_max\r\n4210,2.75\r\n4211,inf\r\n", cached=True),
)
def get_series(
    request: Request,
    conn: Conn,
    run_id: str,
    window: Steps,
    field: str,
    site: SiteId | None = None,
    points: Points = 1000,
    rank: Rank = None,
    format: Format = "json",
) -> Response:
    """A field of a site over steps, `rounded_within` of itself where it says so; without a site a scalar such as loss. Where
    records stand for several steps, `from_steps` has the first of each point's, `at_steps` of `amax_max` the one it lay in."""
    require_run(conn, run_id)
    if site is not None:
        _require_site(conn, run_id, site)

    def make() -> dict[str, Any]:
        low, high = window.from_step, window.to_step
        if site is None:
            return queries.scalars(conn, run_id, field, low, high, points, rank)
        return queries.series(conn, run_id, site, field, low, high, points, rank)

    return _chart(request, conn, run_id, window, make, csv_answers.series, format)


@router.get(
    "/runs/{run_id:path}/scalars",
    responses=answers(examples.SCALAR, csv="step,loss\r\n4210,2.29\r\n4211,inf\r\n", cached=True),
)
def get_scalars(
    request: Request,
    conn: Conn,
    run_id: str,
    window: Steps,
    name: str,
    points: Points = 1000,
    rank: Rank = None,
    format: Format = "json",
) -> Response:
    """Loss, grad_norm, lr, loss_scale or a logged name over steps."""
    require_run(conn, run_id)

    def make() -> dict[str, Any]:
        return queries.scalars(conn, run_id, name, window.from_step, window.to_step, points, rank)

    return _chart(request, conn, run_id, window, make, csv_answers.series, format)


@router.get(
    "/runs/{run_id:path}/top",
    responses=answers(
        examples.TOP,
        csv="site,module,operand,direction,step,underflow_ratio\r\n7,layers.0.mlp.up,input,rowwise,4199,0.031\r\n",
        cached=True,
    ),
)
def get_top(
    request: Request,
    conn: Conn,
    run_id: str,
    window: Steps,
    field: str,
    n: Annotated[int, Query(ge=1, le=1000)] = 10,
    format: Format = "json",
) -> Response:
    """The worst sites of a field."""
    require_run(conn, run_id)

    def make() -> dict[str, Any]:
        return {**queries.top(conn, run_id, field, n, window.from_step, window.to_step), "next": None}

    return _chart(request, conn, run_id, window, make, csv_answers.top, format)


@router.get(
    "/runs/{run_id:path}/heatmap",
    responses=answers(examples.HEATMAP, csv="step,layers.0.mlp.up input rowwise\r\n4096,31.5\r\n", cached=True),
)
def get_heatmap(
    request: Request,
    conn: Conn,
    run_id: str,
    window: Steps,
    field: str,
    points: Points = 200,
    format: Format = "json",
) -> Response:
    """Sites × steps of a field."""
    require_run(conn, run_id)

    def make() -> dict[str, Any]:
        return queries.heatmap(conn, run_id, field, window.from_step, window.to_step, points)

    return _chart(request, conn, run_id, window, make, csv_answers.heatmap, format)


@router.get("/runs/{run_id:path}/sessions", responses=answers(examples.listed(examples.SESSION)))
def get_sessions(conn: Conn, run_id: str, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """The sessions of a run and the health of their agents, the newest first."""
    require_run(conn, run_id)
    return listed(*queries.sessions_page(conn, run_id, cursor=cursor, limit=limit))


@router.get(
    "/runs/{run_id:path}/checkpoints",
    responses=answers({**examples.listed(examples.CHECKPOINT), "last_clean": {"attempt": 1, "step": 4000}}),
)
def get_checkpoints(conn: Conn, run_id: str) -> Response:
    """Checkpoints that a run has written, the newest first: clean, poisoned by a failure, or suspect; and the last clean
    one."""
    require_run(conn, run_id)
    return JsonResponse({**checkpoints.checkpoints(conn, run_id), "next": None})


@router.get("/runs/{run_id:path}/incidents", responses=answers(examples.listed(examples.INCIDENT)))
def get_incidents(
    conn: Conn,
    run_id: str,
    status: Status = None,
    state: State = None,
    severity: Severity = None,
    mode: Choice = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Incidents of a run, the newest first."""
    require_run(conn, run_id)
    page = queries.incidents_page(
        conn, run_id, status or None, severity or None, mode or None, state=state or None, cursor=cursor, limit=limit
    )
    return listed(*page)


@router.get("/runs/{run_id:path}", responses=answers({**examples.RUN, "sessions": [examples.SESSION]}))
def get_run(conn: Conn, run_id: str) -> Response:
    """One run, with its sessions."""
    found = queries.run(conn, run_id)
    if found is None:
        raise not_found("run", run_id)
    return JsonResponse(found)
