"""Resolves ids from URLs to runs, sites and incidents, or raises a page error.

Shapes:     ids out of a URL -> dicts of a query, or PageProblem
Thread:     any
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Connection

from fp8watch_server.pages import formatting
from fp8watch_server.pages.error_pages import Link, PageProblem
from fp8watch_server.store import queries
from fp8watch_server.store.rows import (
    IncidentPlace,
    IncidentRow,
    IncidentWithEvents,
    RunRow,
    RunWithSessions,
    SiteRow,
)

Dict = dict[str, Any]
"""What a template reads."""
Seen = TypeVar("Seen", IncidentRow, IncidentWithEvents)
MAX_INTEGER = 1 << 62
RUNS = Link("All runs", "/")


def run_url(run_id: str) -> str:
    """URL of a run's page."""
    return f"/runs/{formatting.segment(run_id)}"


def shown_steps(query: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Step range of the charts. What static/range.js does not accept as a step is open here, too."""
    texts = (query.get("from", ""), query.get("to", ""))
    low, high = (int(s) if s.isascii() and s.isdigit() and len(s) <= 15 else None for s in texts)
    return (high, low) if low is not None and high is not None and low > high else (low, high)


def site_url(run_id: str, site: int) -> str:
    """URL of a site's page."""
    return f"{run_url(run_id)}/sites/{site}"


def nearest(steps: Sequence[int], step: int) -> int | None:
    """The one of these steps that lies nearest; None where there is none."""
    return min(steps, key=lambda s: abs(s - step), default=None)


def tile_map_url(
    run_id: str, site: int, step: int | None, rank: int | None = None, tile: tuple[int, int] | None = None
) -> str:
    """URL of a tile map, with the step and the tile in it."""
    query = [f"step={step}"] if step is not None else []
    query += [f"rank={rank}"] if rank is not None else []
    query += [f"tile={tile[0]},{tile[1]}"] if tile else []
    return f"{site_url(run_id, site)}/tile-map{'?' if query else ''}{'&'.join(query)}"


def integer(name: str, text: str | None, back: Link) -> int | None:
    """An integer query parameter."""
    if text is None or text == "":
        return None
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < MAX_INTEGER:
        raise PageProblem(
            400,
            f"That is not a {name}",
            f"{name}={formatting.cut(text)}: a {name} is a whole number, 0 or more.",
            "Take the link below, and choose it there.",
            (back,),
        )
    return value


def coordinates(text: str | None) -> tuple[int, int] | None:
    """A tile from `?tile=r,c`. An unreadable one marks nothing: the map is still worth showing."""
    parts = (text or "").split(",")
    if len(parts) == 2 and all(p.strip().isdecimal() and len(p) < 12 for p in parts):
        return int(parts[0]), int(parts[1])
    return None


def find_run(conn: Connection, run_id: str) -> RunWithSessions:
    """The run, or 404."""
    found = queries.run(conn, run_id)
    if found is None:
        raise PageProblem(
            404,
            "No such run",
            f"This collector has no run “{formatting.cut(run_id)}”.",
            "Runs appear here when their first batch has arrived. Check that training was started with "
            "FP8WATCH_COLLECTOR set to this address; a run that was recorded offline is sent with fp8watch sync.",
            (RUNS,),
        )
    return found


def find_site(conn: Connection, run: RunRow, site: str) -> tuple[SiteRow, list[SiteRow]]:
    """The site and all sites of the run, in data-flow order, or 404."""
    sites = queries.sites(conn, run["id"])
    found = next((s for s in sites if str(s["id"]) == site), None)
    if found is None:
        raise PageProblem(
            404,
            "No such site",
            f"Run “{formatting.cut(run['name'] or run['id'])}” has no site {formatting.cut(site)}; it has {len(sites)} sites.",
            "A site is one quantised operand: module, operand and direction. Choose one on the page of the run.",
            (Link("The run", run_url(run["id"])), RUNS),
        )
    return found, sites


def find_incident(conn: Connection, incident_id: str) -> IncidentWithEvents:
    """The incident, or 404."""
    found = queries.incident(conn, incident_id)
    if found is None:
        raise PageProblem(
            404,
            "No such incident",
            f"This collector has no incident “{formatting.cut(incident_id)}”.",
            "It may have been pruned with its run, or the link may come from another collector.",
            (RUNS,),
        )
    return complete(found)


PLACE = ("ranks", "module", "gemm", "operand", "direction", "tile", "element", "expert")


def complete(incident: Seen) -> Seen:
    """An incident with every key that a template reads: keys that an older detector did not write are None."""
    whole = incident.copy()
    whole["place"] = cast(IncidentPlace, dict.fromkeys(PLACE) | dict(incident["place"] or {}))
    whole["evidence"] = [
        {"value": None, "baseline": None, "unit": None, "since_step": incident["first_step"], **e}
        for e in incident["evidence"] or []
    ]
    return whole


def no_data(run: RunRow, watch: dict[str, str], not_watching: str | None = None) -> PageProblem:
    """Page of a run that was registered and never sent a step; `not_watching`: the reason it gave."""
    return PageProblem(
        200,  # 200: the run exists, and this is its state
        f"{formatting.cut(run['name'] or run['id'])}: {'attached, no step has ended' if not_watching else 'no data yet'}",
        "The run is registered, but none of its steps has arrived.",
        "A first batch is sent within a second of the first optimizer step. When training is under way and this page "
        "stays empty: check that the model has FP8 sites (the line that attach prints names them), and that an "
        "optimizer step or watch.step() was reached.",
        (Link("Look again", run_url(run["id"])), RUNS),
        code="watch = fp8watch.attach(model)",
        watch=watch["url"],
        version=watch["version"],
        warning=not_watching or "",
    )


def site_of(incident: IncidentRow, sites: Sequence[SiteRow]) -> SiteRow | None:
    """The site that an incident names: by module, operand and direction, else the first one folded into it."""
    place = incident["place"]
    for s in sites:
        if place["module"] == s["module"] and all(
            wanted in (None, is_)
            for wanted, is_ in ((place["operand"], s["operand"]), (place["direction"], s["direction"]))
        ):
            return s
    ids = [int(i) for i in incident.get("sites") or []]
    return next((s for i in ids for s in sites if s["id"] == i), None)
