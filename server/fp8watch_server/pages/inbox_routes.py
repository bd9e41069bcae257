"""Pages over all runs: the inbox of causes, silences, the index of runbooks, the collector's own health.

Shapes:     GET -> HTML; a thumbnail is SVG
Thread:     worker threads of the server: one database connection a request
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from fp8watch_server.http.databases import connect_everywhere, connect_for, shards_of
from fp8watch_server.incidents.causes import pattern_of
from fp8watch_server.pages import collector_health, live, lookup, runbooks
from fp8watch_server.pages.templating import page
from fp8watch_server.pages.thumbnail import thumbnail
from fp8watch_server.pages.what_helped import what_helped
from fp8watch_server.store import cause_list, queries
from fp8watch_server.store.cause_list import Wanted
from fp8watch_server.store.over_databases import merged_choices
from fp8watch_server.store.rows import CauseRow, IncidentRow

router = APIRouter(include_in_schema=False)


def _connect(request: Request) -> Any:
    return connect_for(request)


def _url(wanted: Wanted, **changes: Any) -> str:
    names = ("q", "state", "mode", "severity", "owner", "page")
    asked = {name: getattr(wanted, name) for name in names} | {"page": 1} | changes
    query = {k: v for k, v in asked.items() if v not in ("", 1)}
    return f"/incidents?{urlencode(query)}" if query else "/incidents"


@router.get("/incidents")
def inbox_page(request: Request) -> HTMLResponse:
    """Incidents of all runs, one row a cause: what asks for somebody first."""
    wanted = cause_list.wanted_of(request.query_params)
    with connect_everywhere(request) as everywhere:
        conns = everywhere.conns
        watch = {"url": live.Topic().url, "version": live.version_of_all(conns)}
        found, lies_in = cause_list.find_over(conns, wanted)
        choices = merged_choices((cause_list.choices(conn) for conn in conns), 100)
        runs = cause_list.runs_of(conns, [cause["cause_id"] for cause in found.causes])
        rows = [
            {**_row(lies_in[cause["cause_id"]], cause), "runs": runs.get(cause["cause_id"], [])}
            for cause in found.causes
        ]
    offered = {"severity": ["critical", "warning", "info"], **choices}
    selects = [
        {"name": name, "value": getattr(wanted, name), "offered": offered[name]}
        for name in ("severity", "mode", "owner")
        if offered[name] or getattr(wanted, name)
    ]
    states = [(s, cause_list.WORDS[s], _url(wanted, state=s)) for s in cause_list.CAUSE_STATES]
    pages: dict[str, Any] = {"page": found.page, "num_pages": found.num_pages}
    pages |= {"before": _url(wanted, page=found.page - 1) if found.page > 1 else None}
    pages |= {"after": _url(wanted, page=found.page + 1) if found.page < found.num_pages else None}
    return page(
        request, "incidents.html", watch=watch, rows=rows, found=found, wanted=wanted, selects=selects,
        states=[("", "all", _url(wanted, state="")), *states], pager=pages, away=everywhere.away,
    )  # fmt: skip


def _row(conn: Connection, cause: CauseRow) -> dict[str, Any]:
    incident = lookup.complete(cause["incident"])
    return {
        **cause,
        "incident": incident,
        "place": pattern_of(incident["place"]["module"]),
        "tiles": _tiles(conn, incident),
        "helped": what_helped(conn, incident),
    }


def _tiles(conn: Connection, incident: IncidentRow) -> tuple[int, int | None] | None:
    """Site and rank of the tile map that shows where it broke; None where none was kept."""
    site = next(iter(incident["sites"] or []), None)
    if site is None:
        return None
    rank = next(iter(incident["place"]["ranks"] or []), None)
    kept = queries.steps_available(conn, incident["run_id"], int(site), rank)
    return (int(site), rank) if incident["first_step"] in kept else None


@router.get("/incidents/{incident_id}/tiles.svg")
def tiles_svg(request: Request, incident_id: str) -> Response:
    """The tiles where an incident began, as a small picture."""
    with _connect(request) as conn:
        incident = lookup.find_incident(conn, incident_id)
        found = _tiles(conn, incident)
        at = (incident["first_step"], found[1], incident["attempt"]) if found else ()
        kept = queries.kept_map(conn, incident["run_id"], found[0], *at) if found else None
    if kept is None:
        return Response("no tile map of its first step was kept\n", status_code=404, media_type="text/plain")
    headers = {"cache-control": "private, max-age=86400"}  # the inbox asks by another address when the incident moves
    return Response(thumbnail(kept.tiles), media_type="image/svg+xml", headers=headers)


@router.get("/runbooks")
def runbooks_page(request: Request) -> HTMLResponse:
    """All runbooks, with what each failure is."""
    return page(request, "runbooks.html", books=[(slug, *runbooks.summary(slug)) for slug in runbooks.slugs()])


@router.get("/silences")
def silences_page(request: Request) -> HTMLResponse:
    """What no messages are sent about, and until when."""
    with connect_everywhere(request) as everywhere:  # one of all runs lies in each of them
        found = {silence["id"]: silence for conn in everywhere.conns for silence in queries.silences(conn)}
    return page(request, "silences.html", silences=list(found.values()))


@router.get("/collector")
def collector_page(request: Request) -> HTMLResponse:
    """The collector's own health."""
    with connect_everywhere(request) as everywhere:
        stats = request.app.state.ingest.stats
        shown = collector_health.health(everywhere.conns, stats, away=everywhere.away)
        return page(request, "collector.html", shards=collector_health.of_shards(shards_of(request.app)), **shown)
