"""Chart data endpoints, one response per page: browsers allow six connections, and the store is read once.

Shapes:     GET …/training.json, …/charts.json, …/health.json -> series as /api/v1 gives them, by field
Thread:     worker threads of the server: one database connection a request
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from fp8watch_server.http.errors import JsonResponse, Problem
from fp8watch_server.pages import formatting, health, health_maps, lookup, page_queries, panels, site_charts
from fp8watch_server.pages.error_pages import Link
from fp8watch_server.store import queries

OF_INCIDENT = ("id", "mode", "severity", "title", "first_step", "last_step")
MAX_INCIDENTS = 100

router = APIRouter(include_in_schema=False)


def _connect(request: Request) -> Any:
    return request.app.state.engine.connect()


def _span(request: Request, back: Link, points: int) -> tuple[int | None, int | None, int]:
    """from, to and points of the query."""
    query = request.query_params
    low, high = (lookup.integer("step", query.get(name), back) for name in ("from", "to"))
    return low, high, lookup.integer("number of points", query.get("points"), back) or points


@router.get("/runs/{run_id:path}/sites/{site}/charts.json")
def charts_json(request: Request, run_id: str, site: str) -> Response:
    """{field: series} of a site."""
    with _connect(request) as conn:
        run = lookup.find_run(conn, run_id)
        found, _ = lookup.find_site(conn, run, site)
        back = Link("The site", lookup.site_url(run["id"], found["id"]))
        span = _span(request, back, 800)
        return JsonResponse(queries.several_series(conn, run["id"], found["id"], site_charts.fields(), *span))


@router.get("/runs/{run_id:path}/training.json")
def training_json(request: Request, run_id: str) -> Response:
    """{"series": {field: series}, "incidents": [...]} of a run."""
    with _connect(request) as conn:
        run = lookup.find_run(conn, run_id)
        span = _span(request, Link("The run", lookup.run_url(run["id"])), 1000)
        series = queries.several_scalars(conn, run["id"], panels.fields(), *span)
        incidents = page_queries.incidents(conn, run["id"])[:MAX_INCIDENTS]
        return JsonResponse(
            {"series": series, "incidents": [{k: v for k, v in i.items() if k in OF_INCIDENT} for i in incidents]}
        )


@router.get("/runs/{run_id:path}/health.json")
def health_json(request: Request, run_id: str) -> Response:
    """The health map of a run, as its page draws it."""
    query = request.query_params
    field = query.get("field", health_maps.fields()[0])
    if field not in health_maps.fields():
        raise Problem(
            422,
            f"field={formatting.cut(field)}",
            rule=f"one of {', '.join(health_maps.fields())}",
            remedy="ask for one of them; the API has the others",
        )
    with _connect(request) as conn:
        run = lookup.find_run(conn, run_id)
        back = Link("The run", lookup.run_url(run["id"]))
        span = _span(request, back, 400)
        return JsonResponse(health.health_map(conn, run, field, query.get("operand", ""), *span))
