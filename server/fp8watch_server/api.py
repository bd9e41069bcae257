"""The query API: GET /api/v1/….

Upstream:   fp8watch_server.store.queries    Downstream: fp8watch_server.pages, fp8watch_server.app
Shapes:     query strings -> JSON as docs/ names it; lists are {"items": [...], "next": cursor | null}
Thread:     query pool

Non-finite values are data: null in an array, with [index, "nan" | "inf" | "-inf"] in `nonfinite`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Query, Request
from sqlalchemy.engine import Connection
from starlette.responses import Response

from .problem import JsonResponse, Problem
from .store import queries
from .store import schema as t

router = APIRouter(prefix="/api/v1", tags=["query"])
health_router = APIRouter(tags=["operations"])

Step = Annotated[int | None, Query(ge=0, le=queries.MAX_STEP)]
FromStep = Annotated[int | None, Query(alias="from", ge=0, le=queries.MAX_STEP)]
ToStep = Annotated[int | None, Query(alias="to", ge=0, le=queries.MAX_STEP)]
Points = Annotated[int, Query(ge=1, le=10_000)]
Rank = Annotated[int | None, Query(ge=0, le=(1 << 31) - 1)]
SiteId = Annotated[int, Query(ge=0, le=(1 << 53) - 1)]
Limit = Annotated[int, Query(ge=1, le=queries.MAX_LIMIT)]
Cursor = Annotated[str | None, Query(max_length=2048)]
Choice = Annotated[str | None, Query(max_length=100)]
# A word that is misspelt must not read as "no incidents"; an empty one stands for all.
Status = Literal["", "open", "acknowledged", "resolved"] | None
Severity = Literal["", "info", "warning", "critical"] | None

MAX_SITE_ID = (1 << 53) - 1


def _connection(request: Request) -> Iterator[Connection]:
    with request.app.state.engine.connect() as conn:
        yield conn


Conn = Annotated[Connection, Depends(_connection)]


def listed(items: list[Any], following: str | None = None) -> Response:
    """A list as it travels."""
    return JsonResponse({"items": items, "next": following})


def not_found(what: str, id_: Any) -> Problem:
    """A 404 that says where to look."""
    return Problem(
        404,
        f"there is no {what} {str(id_)[:200]!r}",
        rule=f"the {what} must have been registered",
        remedy=f"list them: GET /api/v1/{'incidents' if what == 'incident' else 'runs'}",
    )


def _require_run(conn: Connection, run_id: str) -> None:
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


@router.get("/runs")
def get_runs(conn: Conn, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """Runs, the newest first."""
    return listed(*queries.runs_page(conn, cursor=cursor, limit=limit))


@router.get("/incidents")
def get_all_incidents(
    conn: Conn,
    status: Status = None,
    severity: Severity = None,
    mode: Choice = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Incidents of all runs, the newest first."""
    page = queries.incidents_page(
        conn, None, status or None, severity or None, mode or None, cursor=cursor, limit=limit
    )
    return listed(*page)


@router.get("/incidents/{incident_id}")
def get_incident(conn: Conn, incident_id: str) -> Response:
    """One incident, with its events."""
    found = queries.incident(conn, incident_id)
    if found is None:
        raise not_found("incident", incident_id)
    return JsonResponse(found)


@router.get("/runs/{run_id:path}/sites/{site}/histogram")
def get_histogram(
    conn: Conn,
    run_id: str,
    site: int,
    field: str = "amax_hist",
    from_: FromStep = None,
    to: ToStep = None,
    points: Points = 200,
) -> Response:
    """A histogram of a site over steps."""
    _require_run(conn, run_id)
    _require_site(conn, run_id, site)
    return JsonResponse(queries.histogram(conn, run_id, site, from_, to, points, field))


@router.get("/runs/{run_id:path}/sites/{site}/tile-map")
def get_tile_map(conn: Conn, run_id: str, site: int, step: Step = None, rank: Rank = None) -> Response:
    """Every tile of a site in a step; without a step the newest that is kept."""
    _require_run(conn, run_id)
    _require_site(conn, run_id, site)
    found = queries.tile_map(conn, run_id, site, step, rank)
    if found is None:
        available = queries.steps_available(conn, run_id, site, rank)
        raise Problem(
            404,
            f"no tile map of site {site} at step {step}",
            rule="a map is there when it was captured, and is kept for 256 steps and around incidents",
            remedy="choose one of steps_available, or attach with tile_maps='all'",
            steps_available=available,
        )
    return JsonResponse(found)


@router.get("/runs/{run_id:path}/sites")
def get_sites(conn: Conn, run_id: str) -> Response:
    """The sites of a run in data-flow order."""
    _require_run(conn, run_id)
    return listed(queries.sites(conn, run_id))


@router.get("/runs/{run_id:path}/series")
def get_series(
    conn: Conn,
    run_id: str,
    field: str,
    site: SiteId | None = None,
    from_: FromStep = None,
    to: ToStep = None,
    points: Points = 1000,
    rank: Rank = None,
) -> Response:
    """One field of one site over steps; without a site, a scalar of the run such as loss."""
    _require_run(conn, run_id)
    if site is None:
        return JsonResponse(queries.scalars(conn, run_id, field, from_, to, points, rank))
    _require_site(conn, run_id, site)
    return JsonResponse(queries.series(conn, run_id, site, field, from_, to, points, rank))


@router.get("/runs/{run_id:path}/scalars")
def get_scalars(
    conn: Conn,
    run_id: str,
    name: str,
    from_: FromStep = None,
    to: ToStep = None,
    points: Points = 1000,
    rank: Rank = None,
) -> Response:
    """Loss, grad_norm, lr, loss_scale or a logged name over steps."""
    _require_run(conn, run_id)
    return JsonResponse(queries.scalars(conn, run_id, name, from_, to, points, rank))


@router.get("/runs/{run_id:path}/top")
def get_top(
    conn: Conn,
    run_id: str,
    field: str,
    n: Annotated[int, Query(ge=1, le=1000)] = 10,
    from_: FromStep = None,
    to: ToStep = None,
) -> Response:
    """The worst sites of a field."""
    _require_run(conn, run_id)
    return JsonResponse({**queries.top(conn, run_id, field, n, from_, to), "next": None})


@router.get("/runs/{run_id:path}/heatmap")
def get_heatmap(
    conn: Conn,
    run_id: str,
    field: str,
    from_: FromStep = None,
    to: ToStep = None,
    points: Points = 200,
) -> Response:
    """Sites × steps of a field."""
    _require_run(conn, run_id)
    return JsonResponse(queries.heatmap(conn, run_id, field, from_, to, points))


@router.get("/runs/{run_id:path}/incidents")
def get_incidents(
    conn: Conn,
    run_id: str,
    status: Status = None,
    severity: Severity = None,
    mode: Choice = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Incidents of a run, the newest first."""
    _require_run(conn, run_id)
    page = queries.incidents_page(
        conn, run_id, status or None, severity or None, mode or None, cursor=cursor, limit=limit
    )
    return listed(*page)


@router.get("/runs/{run_id:path}")
def get_run(conn: Conn, run_id: str) -> Response:
    """One run, with its sessions."""
    found = queries.run(conn, run_id)
    if found is None:
        raise not_found("run", run_id)
    return JsonResponse(found)


@health_router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return JsonResponse({"status": "ok"})


@health_router.get("/readyz")
def readyz(request: Request) -> Response:
    """The database answers, and is at the version of this collector."""
    with request.app.state.engine.connect() as conn:
        conn.execute(sa.select(t.run.c.run_id).limit(1)).first()
    return JsonResponse({"status": "ready"})
