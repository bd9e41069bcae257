"""Routes of the web pages: server-rendered HTML, charts loaded afterwards, live updates.

Upstream:   fp8watch_server.store.queries
Shapes:     GET -> HTML; charts fetch JSON by themselves, of fp8watch_server.pages.chart_endpoints and of /api/v1
Thread:     worker threads of the server: one database connection a request
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy import Connection
from starlette.exceptions import HTTPException

from fp8watch_agent.record import is_probe
from fp8watch_server.http.databases import connect_everywhere, connect_for
from fp8watch_server.http.security_headers import SecurityHeaders
from fp8watch_server.incidents.fix_files import TARGETS
from fp8watch_server.incidents.silences import silences_of
from fp8watch_server.pages import (
    assets,
    chart_endpoints,
    compare_page,
    coverage,
    first_chart,
    first_site_chart,
    flight_pages,
    forecasts,
    formatting,
    headline,
    health,
    health_maps,
    inbox_routes,
    layer_costs,
    live,
    lookup,
    next_questions,
    page_queries,
    panels,
    report,
    run_filters,
    runbooks,
    safe_to_resume,
    site_charts,
    training_axis,
)
from fp8watch_server.pages.error_pages import Link, PageProblem
from fp8watch_server.pages.logged_scalars import logged_scalars
from fp8watch_server.pages.lookup import RUNS
from fp8watch_server.pages.templating import page, page_in_parts, problem_page
from fp8watch_server.pages.what_helped import what_helped
from fp8watch_server.store import cause_list, checkpoints, queries, run_list
from fp8watch_server.store.done_again import done_again
from fp8watch_server.store.incident_states import OPEN, UNSEEN
from fp8watch_server.store.over_databases import merged_choices
from fp8watch_server.store.rank_sessions import of_ranks

FIRST_POINTS = 600
"""Points per curve of the first chart: its width has no room for more."""

router = APIRouter(include_in_schema=False)


def _connect(request: Request) -> Any:
    return connect_for(request)


def _own_url(request: Request) -> str:
    """Of the collector, as people reach it."""
    return str(request.app.state.settings.public_url or request.base_url).rstrip("/")


def _watch(conn: Connection, topic: live.Topic) -> dict[str, str]:
    """Event stream URL of a page, and its current version."""
    return {"url": topic.url, "version": live.version(conn, topic)}


@router.get("/")
def runs_page(request: Request) -> HTMLResponse:
    """Runs, those that need somebody first: searched, filtered, a page at a time."""
    wanted = run_list.wanted_of(request.query_params)
    with connect_everywhere(request) as everywhere:
        conns = (
            everywhere.conns
        )  # the version is read before the data, so that a change in between is notified, not lost
        watch = {"url": live.Topic().url, "version": live.version_of_all(conns)}
        shown = page_queries.runs(conns, wanted)
        offered = merged_choices((run_list.choices(conn) for conn in conns), run_list.MAX_CHOICES)
        selects = run_filters.selects(wanted, offered)
    return page(
        request,
        "runs.html",
        watch=watch,
        heads=run_filters.heads(wanted),
        active=run_filters.active(wanted),
        selects=selects,
        pager=run_filters.pager(wanted, shown["found"]),
        own_url=_own_url(request),
        away=everywhere.away,
        **shown,
    )


# A run id may contain slashes (it may be a path), so the longest pattern comes first.
@router.get("/runs/{run_id:path}/sites/{site}/tile-map")
def tile_map_page(request: Request, run_id: str, site: str) -> HTMLResponse:
    """Every tile of one site in one step."""
    query = request.query_params
    with _connect(request) as conn:
        watch = _watch(conn, live.Topic(run_id))
        run = lookup.find_run(conn, run_id)
        found, sites = lookup.find_site(conn, run, site)
        back = Link("The site", lookup.site_url(run["id"], found["id"]))
        rank = lookup.integer("rank", query.get("rank"), back)
        step = lookup.integer("step", query.get("step"), back)
        attempt = lookup.integer("attempt", query.get("attempt"), back)
        steps = queries.steps_available(conn, run["id"], found["id"], rank)
        if not steps:
            raise page_queries.no_tile_map(run, found, rank, back)
        if step is not None and step not in steps:
            raise page_queries.no_tile_map_at(run, found, rank, step, steps, back)
        kept = queries.kept_map(conn, run["id"], found["id"], step, rank, attempt)
        if kept is None:  # pruned since it was listed
            raise page_queries.no_tile_map_at(run, found, rank, steps[-1] if step is None else step, steps, back)
        step = kept.tiles.step
        if rank is None:  # ranks keep different steps: the slider covers those of the rank that is shown
            steps = queries.steps_available(conn, run["id"], found["id"], kept.rank)
        return page(
            request,
            "tile_map.html",
            watch=watch,
            run=run,
            site=found,
            siblings=[
                (s, lookup.nearest(queries.steps_available(conn, run["id"], s["id"], rank), step))
                for s in sites
                if s["module"] == found["module"]
            ],
            step=step,
            steps=steps,
            rank=kept.rank,
            attempt=attempt,
            tile=lookup.coordinates(query.get("tile")),
            shape=kept.tiles.shape,
            flagged=page_queries.flagged_tiles(kept, found),
            seen=page_queries.seen_here(conn, run["id"], found),
        )


@router.get("/runs/{run_id:path}/sites/{site}")
def site_page(request: Request, run_id: str, site: str) -> HTMLResponse:
    """One quantised operand over steps."""
    with _connect(request) as conn:
        watch = _watch(conn, live.Topic(run_id))
        run = lookup.find_run(conn, run_id)
        found, sites = lookup.find_site(conn, run, site)
        back = Link("The site", lookup.site_url(run["id"], found["id"]))
        incidents = [i for i in page_queries.incidents(conn, run["id"]) if page_queries.concerns(i, found)]
        siblings = [s for s in sites if s["module"] == found["module"]]
        twin = next((s for s in siblings if s["operand"] == found["operand"] and s["id"] != found["id"]), None)
        other = None if request.query_params.get("sides") == "one" else twin
        low, high = lookup.shown_steps(request.query_params)
        marks = [(i["first_step"], i["severity"]) for i in incidents]
        amax = [
            queries.several_series(conn, run["id"], s["id"], first_site_chart.FIELDS, low, high, FIRST_POINTS)
            for s in (found, other)
            if s
        ]
        kept = {s["id"]: queries.steps_available(conn, run["id"], s["id"]) for s in (found, other) if s}
        step = lookup.integer("step", request.query_params.get("step"), back)
        return page(
            request,
            "site.html",
            watch=watch,
            run=run,
            site=found,
            step=step,
            siblings=siblings,
            twin=twin,
            other=other,
            charts=site_charts.served(found),
            chart_sites=[
                {"id": s["id"], "maps": kept[s["id"]], "direction": s["direction"]} for s in (found, other) if s
            ],
            now=page_queries.site_now(conn, run, found),
            incidents=incidents,
            marks=marks,
            amax=first_site_chart.amax_charts(amax, marks, low, high),
            num_maps=len(kept[found["id"]]),
            map_step=None if step is None else lookup.nearest(kept[found["id"]], step),
            forecasts=forecasts.of_site(conn, run, found),
            merged_steps=coverage.merged_steps(run["sessions"]),
        )


@router.get("/runs/{run_id:path}")
def run_page(request: Request, run_id: str) -> Response:
    """One run: what is wrong, loss with incidents marked, health of layers × steps, worst sites."""
    with _connect(request) as conn:
        watch = _watch(conn, live.Topic(run_id))
        run = lookup.find_run(conn, run_id)
        facts = coverage.newest_facts(run["sessions"])
        not_watching = coverage.not_watching(facts)
        if run["last_step"] is None:
            raise lookup.no_data(run, watch, not_watching)
        low, high = lookup.shown_steps(request.query_params)
        now = page_queries.scalars_now(conn, run)
        incidents = page_queries.incidents(conn, run["id"])
        charts = queries.several_scalars(conn, run["id"], panels.fields(), low, high, FIRST_POINTS)
        watched = headline.watched(conn, run)
        before = run_list.run_before(conn, run)
        over = ("step", "time", "tokens") if training_axis.token_name(conn, run["id"]) else ("step", "time")
        open_incidents = [i for i in incidents if i["status"] != "resolved"]
        pressing = [i for i in incidents if i["status"] != "resolved" or i["state"] == UNSEEN]
        asking = [i for i in incidents if i["state"] == UNSEEN or (i["state"] == OPEN and i["severity"] != "info")]
        safe = safe_to_resume.of_run(conn, run["id"], asking)
        agents = coverage.agents(run, of_ranks(conn, run))
        fixed_in = cause_list.run_of(conn, asking[0]["regression_of"], run["name"]) if asking else ""

    def below() -> dict[str, Any]:
        """What lies below the first chart and takes longer: it is asked for when that has been sent."""
        with _connect(request) as conn:
            sites = queries.sites(conn, run["id"])
            return {
                "worst": page_queries.worst_sites(conn, run, sites, pressing),
                "num_rows": len(health.rows_of([s for s in sites if not is_probe(s["operand"], s["recipe"])])),
                "has_probes": any(s["operand"] == "output" for s in sites),
                "costs": layer_costs.layer_costs(conn, run, sites),
                "coverage": coverage.coverage(run, sites),
                "logged": logged_scalars(conn, run, open_incidents),
                "checkpoints": checkpoints.checkpoints(conn, run["id"]),
            }

    return page_in_parts(
        request,
        "run.html",
        watch=watch,
        run=run,
        now=now,
        headline=headline.headline(
            run, incidents, not_watching, agents, watched, observed=coverage.observed(facts), fixed_in=fixed_in
        ),
        each=watched.each(),
        before=before,
        safe=safe,
        drawn_over=over,
        merged_steps=coverage.merged_steps(run["sessions"]),
        asking=headline.in_order(asking),
        owners=sorted({i["owner"] for i in incidents if i["owner"]})[:3],
        taken=[i for i in open_incidents if i not in asking],
        over=[i for i in incidents if i["status"] == "resolved" and i not in asking],
        chart=first_chart.training_chart(charts, incidents, low, high),
        panels=panels.served(),
        maps=health_maps.served(),
        opens_on=health_maps.opens_on(asking[0]["evidence"] if asking else ()),
        agents=agents,
        below=below,
    )


@router.get("/incidents/{incident_id}")
def incident_page(request: Request, incident_id: str) -> HTMLResponse:
    """One failure: what, where, since when, why, and what to change."""
    with _connect(request) as conn:
        incident = lookup.find_incident(conn, incident_id)
        watch = _watch(conn, live.Topic(incident["run_id"], incident["id"]))
        incident = lookup.find_incident(conn, incident_id)
        run = lookup.find_run(conn, incident["run_id"])
        sites = queries.sites(conn, run["id"])
        site = lookup.site_of(incident, sites)
        place = incident["place"]
        rank = (place["ranks"] or [0])[0]
        maps = queries.steps_available(conn, run["id"], site["id"], rank) if site else []
        silences = silences_of(conn, "default", run["id"], incident["mode"], place["module"] or "", time.time())
        step = incident["first_step"]
        return page(
            request,
            "incident.html",
            watch=watch,
            run=run,
            incident=incident,
            place=place,
            site=site,
            rank=rank,
            attempt=incident["attempt"] if run["attempt"] > 1 else None,
            touched=page_queries.touched_sites(incident, sites),
            has_map=step in maps,
            steps=maps,
            tile=tuple(place["tile"]) if place["tile"] else None,
            charts=page_queries.evidence_charts(incident, site),
            comparison=page_queries.comparison(incident),
            bisection=page_queries.bisection(incident),
            questions=next_questions.questions(incident, run, site, _own_url(request), run_list.run_before(conn, run)),
            silences=silences,
            runbooks=runbooks.slugs(),
            same_cause=cause_list.same_cause(conn, incident),
            helped=what_helped(conn, incident),
            flight=flight_pages.panel_of(run, step),
            again=done_again(conn, incident),
            checkpoints=safe_to_resume.of_incident(conn, incident),
            fix_files=[(f.name, f.what) for f in TARGETS.values()],
        )


@router.get("/runbooks/{slug}")
def runbook_page(request: Request, slug: str) -> HTMLResponse:
    """What to do about one failure mode, step by step."""
    text = runbooks.runbook(slug)
    if text is None:
        known = tuple(Link(s, f"/runbooks/{s}") for s in runbooks.slugs())
        raise PageProblem(
            404,
            "No such runbook",
            f"There is no runbook “{formatting.cut(slug)}”: runbooks are named after failure modes.",
            "Choose one of these." if known else "This installation carries no runbooks; install the server again.",
            (*known, RUNS),
        )
    return page(request, "runbook.html", slug=slug, text=text, others=runbooks.slugs())


def _problem(request: Request, problem: Exception) -> HTMLResponse:
    assert isinstance(problem, PageProblem)
    return problem_page(request, problem)


def _lost(otherwise: Any) -> Any:
    """Answer browsers' requests for unknown addresses with a page; API clients get the JSON error."""

    def handler(request: Request, e: HTTPException) -> Any:
        person = "text/html" in request.headers.get("accept", "") and request.method in ("GET", "HEAD")
        if e.status_code != 404 or not person or request.url.path.startswith(("/api/", "/v1/")):
            return otherwise(request, e)
        problem = PageProblem(
            404,
            "No such page",
            f"Nothing is at {formatting.cut(request.url.path)}.",
            "Runs, their sites and their incidents are reached from the list of runs.",
            (RUNS,),
        )
        return problem_page(request, problem)

    return handler


def install(app: FastAPI) -> None:
    """Add pages, static files and security headers to the collector, whose database is `app.state.engine`."""
    app.include_router(assets.router)
    live.install(app)
    app.include_router(chart_endpoints.router)
    app.include_router(inbox_routes.router)
    app.include_router(flight_pages.router)
    app.include_router(compare_page.router)
    app.include_router(report.router)
    app.include_router(router)
    app.add_exception_handler(PageProblem, _problem)
    app.add_exception_handler(HTTPException, _lost(app.exception_handlers[HTTPException]))
    app.add_middleware(SecurityHeaders)
