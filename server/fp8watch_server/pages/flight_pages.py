"""The flight recorder as pages of its own: of an incident, of a run at a step; and as a still.

Shapes:     GET …/flight -> HTML; …/flight.svg -> the still
Thread:     worker threads of the server: one database connection a request
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from fp8watch_server.http.databases import connect_for
from fp8watch_server.pages import flight_still, live, lookup
from fp8watch_server.pages.error_pages import Link
from fp8watch_server.pages.templating import THEMES, page
from fp8watch_server.store import flight, queries
from fp8watch_server.store.done_again import done_again
from fp8watch_server.store.flight_words import band_words, by_step, said
from fp8watch_server.store.rows import IncidentWithEvents, RunWithSessions

router = APIRouter(include_in_schema=False)


def _connect(request: Request) -> Any:
    return connect_for(request)


def _span(request: Request, back: Link) -> int:
    asked = lookup.integer("number of steps", request.query_params.get("span"), back)
    return flight.SPAN if asked is None else max(1, min(asked, flight.MAX_SPAN))


def panel_of(run: RunWithSessions, at: int, span: int = flight.SPAN) -> dict[str, Any]:
    """What the template of the panel needs besides the data, which its script asks for."""
    return {"run": run["id"], "at": at, "span": span, "band": band_words(), "spans": SPANS}


SPANS = (16, 32, 64, 128)


def _page(
    request: Request, conn: Connection, run: RunWithSessions, at: int, incident: IncidentWithEvents | None
) -> Any:
    back = Link("The run", lookup.run_url(run["id"]))
    topic = live.Topic(run["id"], incident["id"] if incident else "")
    watch = {"url": topic.url, "version": live.version(conn, topic)}
    span = _span(request, back)
    found = flight.around(conn, run, queries.sites(conn, run["id"]), at, span)
    return page(
        request, "flight.html", watch=watch, run=run, incident=incident, flight=panel_of(run, at, span),
        playhead=lookup.integer("step", request.query_params.get("step"), back), said=said(found), table=by_step(found),
        again=done_again(conn, incident) if incident else None,
    )  # fmt: skip


@router.get("/incidents/{incident_id}/flight")
def incident_flight_page(request: Request, incident_id: str) -> HTMLResponse:
    """Layers × steps around the first step of an incident."""
    with _connect(request) as conn:
        incident = lookup.find_incident(conn, incident_id)
        run = lookup.find_run(conn, incident["run_id"])
        made: HTMLResponse = _page(request, conn, run, incident["first_step"], incident)
        return made


@router.get("/incidents/{incident_id}/flight.svg")
def flight_svg(request: Request, incident_id: str) -> Response:
    """The still of an incident."""
    theme = request.query_params.get("theme", "light")
    with _connect(request) as conn:
        incident = lookup.find_incident(conn, incident_id)
        body = flight_still.still(conn, incident, theme=theme if theme in THEMES else "light")
    return Response(body, media_type="image/svg+xml", headers={"cache-control": "private, max-age=60"})


@router.get("/runs/{run_id:path}/flight")
def run_flight_page(request: Request, run_id: str) -> HTMLResponse:
    """Layers × steps around a step of a run: `at`, or its newest."""
    with _connect(request) as conn:
        run = lookup.find_run(conn, run_id)
        at = lookup.integer("step", request.query_params.get("at"), Link("The run", lookup.run_url(run["id"])))
        made: HTMLResponse = _page(request, conn, run, int(run["last_step"] or 0) if at is None else at, None)
        return made
