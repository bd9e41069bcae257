"""Chart data endpoints, one response per page: browsers allow six connections, and the store is read once.

Shapes:     GET …/training.json, …/charts.json, …/health.json -> series as /api/v1 gives them, by field
Thread:     worker threads of the server: one database connection a request
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from fp8watch_server.http.databases import connect_for
from fp8watch_server.http.errors import JsonResponse, Problem
from fp8watch_server.pages import (
    formatting,
    health,
    health_maps,
    lookup,
    page_queries,
    panels,
    site_charts,
    training_axis,
)
from fp8watch_server.pages.error_pages import Link
from fp8watch_server.store import queries

OF_INCIDENT = ("id", "mode", "severity", "title", "first_step", "last_step")
MAX_INCIDENTS = 100

router = APIRouter(include_in_schema=False)


def _connect(request: Request) -> Any:
    return connect_for(request)


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
    """{"series": {field: series}, "further": {name: series}, "knots": [[step, x]], "incidents": [...]} of a run.

    `panels` names logged scalars (a JSON list), `x` is time or tokens: where the steps of `knots` lie on that axis.
    """
    with _connect(request) as conn:
        run = lookup.find_run(conn, run_id)
        span = _span(request, Link("The run", lookup.run_url(run["id"])), 1000)
        query = request.query_params
        series = queries.several_scalars(conn, run["id"], panels.fields(), *span)
        names = [n for n in training_axis.asked_panels(query.get("panels")) if n not in series]
        more = training_axis.further(conn, run["id"], names, *span)
        knots: list[list[float]] = []
        if query.get("x") == "time":
            knots = training_axis.times(conn, run["id"], sorted({s for of in series.values() for s in of["steps"]}))
        elif query.get("x") == "tokens":
            knots = training_axis.tokens(conn, run["id"], *span)
        incidents = page_queries.incidents(conn, run["id"])[:MAX_INCIDENTS]
        told = [{k: v for k, v in i.items() if k in OF_INCIDENT} for i in incidents]
        return JsonResponse({"series": series, "further": more, "knots": knots, "incidents": told})


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
