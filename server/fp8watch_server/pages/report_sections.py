"""The sections of a report of an incident, in their order. One more is one more row of SECTIONS.

Shapes:     Subject -> Section: a title, a template and its values; None where there is nothing to show
Thread:     worker threads of the server
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from markupsafe import Markup
from sqlalchemy import Connection

from fp8watch_server.detect.remedies import without_batch
from fp8watch_server.pages import (
    coverage,
    first_chart,
    first_site_chart,
    flight_still,
    formatting,
    headline,
    lookup,
    page_queries,
)
from fp8watch_server.pages.redaction import Redaction
from fp8watch_server.pages.thumbnail import thumbnail
from fp8watch_server.store import logged_names, queries
from fp8watch_server.store.done_again import done_again
from fp8watch_server.store.rank_sessions import OfRanks, of_ranks
from fp8watch_server.store.rows import IncidentWithEvents, RunWithSessions, SiteRow
from fp8watch_server.store.tile_maps import KeptMap, amax_of

Dict = dict[str, Any]

BEFORE, AFTER = 64, 64
POINTS = 400
MAX_LOGGED = 4096
TILES = (96, 192)
FACTS = ("recipe", "backend", "world_size", "attempt")
OPEN_FACTS = ("kind", "observe_only", "gemm", "warmup_steps", "num_linears", "gemm_flops_observed")
"""Facts that hold no names, in a redacted report the only ones."""


@dataclass(frozen=True)
class Subject:
    """What a report speaks of. Everything in it may be shown: a redacted one holds other names already."""

    conn: Connection
    run_id: str
    """As the store knows it, for questions; never shown."""
    run: RunWithSessions
    incident: IncidentWithEvents
    sites: list[SiteRow]
    site: SiteRow | None
    """The site that it names."""
    redact: bool = False
    rename: Redaction = field(default_factory=Redaction)


@dataclass(frozen=True)
class Section:
    """One part of the file."""

    title: str
    template: str
    values: Dict
    hint: str = ""


def fix(of: Subject) -> Section | None:
    """What to change."""
    return Section("What to change", "report/fix.html", {"fixes": of.incident["fix"]}) if of.incident["fix"] else None


def why(of: Subject) -> Section | None:
    """Cause, evidence, and what else it could be."""
    return Section("Why, and the evidence", "report/why.html", {"incident": of.incident})


def recorder(of: Subject) -> Section | None:
    """The still of the flight recorder."""
    modules = {str(site["module"]) for site in queries.sites(of.conn, of.run_id)}
    names = {module: str(of.rename(module)) for module in modules} if of.redact else None
    picture = flight_still.still(of.conn, {**of.incident, "run_id": of.run_id}, names=names)
    return Section("Flight recorder", "report/recorder.html", {"picture": Markup(picture.decode())})


def tiles(of: Subject) -> Section | None:
    """The tile map of the step in which it began."""
    found = _map(of)
    if found is None or of.site is None:
        return None
    amax = amax_of(found.tiles.amax)
    known = amax[np.isfinite(amax) & (amax > 0)]
    values = {
        "picture": Markup(thumbnail(found.tiles, TILES)),
        "flagged": page_queries.flagged_tiles(found, of.site),
        "shape": found.tiles.shape,
        "low": float(known.min()) if known.size else None,
        "high": float(known.max()) if known.size else None,
    }
    where = f"{of.site['module']} {of.site['operand']}, step {found.tiles.step}, rank {found.rank}"
    return Section("Tiles", "report/tiles.html", values, where)


def _map(of: Subject) -> KeptMap | None:
    if of.site is None:
        return None
    rank = (of.incident["place"]["ranks"] or [0])[0]
    return queries.kept_map(of.conn, of.run_id, of.site["id"], of.incident["first_step"], rank, of.incident["attempt"])


def charts(of: Subject) -> Section | None:
    """Loss and the amax of the site around the step in which it began."""
    first, last = of.incident["first_step"], of.incident["last_step"]
    low, high = max(0, first - BEFORE), min(last, first + 4 * AFTER) + AFTER
    names = ("loss", "grad_norm")
    scalars = queries.several_scalars(of.conn, of.run_id, names, low, high, POINTS)
    shown = {name: series for name, series in scalars.items() if name == "loss" or first_chart.is_logged(series)}
    marks = [{**of.incident, "title": ""}]
    drawn = [_unlinked(first_chart.training_chart(shown, marks, low, high))]
    if of.site is not None:
        series = queries.several_series(of.conn, of.run_id, of.site["id"], first_site_chart.FIELDS, low, high, POINTS)
        drawn += first_site_chart.amax_charts([series], [(first, of.incident["severity"])], low, high)
    again = done_again(of.conn, {**of.incident, "run_id": of.run_id})
    return Section("Around the step", "report/charts.html", {"charts": drawn, "again": again}, f"steps {low} to {high}")


def _unlinked(chart: first_chart.Chart) -> first_chart.Chart:
    """A mark without an id is drawn, and is no link: there is nothing to lead to."""
    return dataclasses.replace(chart, incidents=tuple(dataclasses.replace(mark, id="") for mark in chart.incidents))


def compared(of: Subject) -> Section | None:
    """What high precision said."""
    said = page_queries.comparison(of.incident)
    return Section(f"What {said['high_precision']} said", "report/compared.html", {"said": said}) if said else None


def facts(of: Subject) -> Section | None:
    """Recipe, versions, flags and hosts."""
    sessions = of.run["sessions"]
    said = coverage.newest_facts(sessions)
    told: Dict = {**of.run}
    rows = [(name.replace("_", " "), told[name]) for name in FACTS]
    rows += [("ranks seen", _ranks(of).num_ranks), ("sites", len(of.sites))]
    rows += sorted((sessions[0]["versions"] or {}).items()) if sessions else []
    if not of.redact:
        rows += [("hosts", ", ".join(sorted({s["host"] for s in sessions if s["host"]})[:8]))]
    names = [n for n in sorted(said) if not of.redact or n in OPEN_FACTS]
    rows += [(name.replace("_", " "), said[name]) for name in names]
    return Section(
        "Facts", "report/facts.html", {"rows": [(n, formatting.cut(v)) for n, v in rows if v not in (None, "")]}
    )


def _ranks(of: Subject) -> OfRanks:
    return of_ranks(of.conn, {**of.run, "id": of.run_id})


def reached(of: Subject) -> Section | None:
    """Sites that it reached, and what was said of it."""
    touched = page_queries.touched_sites(of.incident, of.sites)
    events = [] if of.redact else of.incident.get("events") or []
    if len(touched) < 2 and not events:
        return None
    return Section("How it went on", "report/reached.html", {"touched": touched, "events": events})


def not_looked_at(of: Subject) -> Section | None:
    """What this report does not speak of."""
    lines = []
    if of.site is None:
        lines.append("Sites: the incident names none; it speaks of the whole run.")
    elif _map(of) is None:
        lines.append("Tiles: no tile map of this site and step was kept.")
    if page_queries.comparison(of.incident) is None:
        lines.append("High precision: no comparison with BF16 was made (fp8watch.diagnose.compare_bf16).")
    loss = queries.several_scalars(of.conn, of.run_id, ("loss",), None, None, 3)["loss"]
    if not first_chart.is_logged(loss):
        lines.append("Loss: it was never logged.")
    watched = headline.watched(of.conn, cast(RunWithSessions, {**of.run, "id": of.run_id}))
    if watched.share is not None and watched.share < headline.EACH_STEP_FROM:
        lines.append(f"Steps in between: in the newest steps sites are measured {watched.each()}.")
    covered = coverage.coverage(of.run, of.sites)
    if covered["observed"] is not None and covered["observed"] < 1:
        lines.append(
            f"Modules: {formatting.ratio(1 - covered['observed'])} of the model's GEMM FLOPs were not observed."
        )
    for key, words in (
        ("not_taken", "GEMMs not observed"),
        ("silent", "announced as observed, and silent"),
        ("not_in_fp8", "announced as FP8, and in high precision"),
    ):
        if covered[key]:
            names = "" if of.redact else f": {', '.join(name for name, _ in covered[key][:8])}"
            least = "at least " if key in covered["goes_on"] else ""
            lines.append(
                f"{words[:1].upper()}{words[1:]}: {least}{len(covered[key]) + covered['num_unnamed'][key]} modules{names}."
            )
    if covered["gradients_unseen"]:
        lines.append(f"Gradients on their way to the optimizer: {covered['gradients_unseen']}.")
    agents = coverage.agents(of.run, _ranks(of))
    if agents["num_missing"]:
        lines.append(f"Ranks: {agents['num_missing']} of {of.run['world_size']} never came{agents['since']}.")
    if agents["num_lost"]:
        least = "at least " if agents["lost_more"] else ""
        lines.append(f"Records: {least}{formatting.number(agents['num_lost'])} were lost on their way.")
    return Section("What was not looked at", "report/not_looked_at.html", {"lines": lines})


SECTIONS: tuple[Callable[[Subject], Section | None], ...] = (
    fix,
    why,
    recorder,
    tiles,
    charts,
    compared,
    reached,
    facts,
    not_looked_at,
)


def subject_of(conn: Connection, incident: IncidentWithEvents, *, redact: bool) -> Subject:
    """Run, incident and sites, with other names where they are asked for."""
    run = lookup.find_run(conn, incident["run_id"])
    sites = queries.sites(conn, run["id"])
    site = lookup.site_of(incident, sites)
    if not redact:
        return Subject(conn, run["id"], run, incident, sites, site)
    names = {run["id"]: "run", run["name"]: "run", incident["owner"]: "owner"}
    names |= {s["host"]: f"host{i}" for i, s in enumerate(run["sessions"])}
    logged, _ = logged_names.names(conn, run["id"], MAX_LOGGED)
    names |= {name: f"scalar{i}" for i, name in enumerate(logged, 1) if not name.isdigit()}
    place = incident["place"]["module"]
    covered = coverage.coverage(run, sites)
    unobserved = [name for key in coverage.NAMED for name, *_ in covered[key]]
    rename = Redaction([s["module"] for s in sites] + unobserved + ([place] if place else []), names)
    known = {s["id"]: rename({k: s[k] for k in ("module",)}) for s in sites}
    renamed = [cast(SiteRow, {**s, **known[s["id"]]}) for s in sites]
    closed: Dict = {**incident, "title": rename(incident["title"]), "owner": "", "run_id": "run"}
    fixes = [{**f, "text": without_batch(f["text"])} for f in incident["fix"]]
    closed["fix"] = rename(fixes)
    for key in ("place", "cause", "alternatives", "evidence", "events"):
        closed[key] = rename(incident.get(key))
    shown: Dict = {**run, "id": "run", "name": "run", "note": "", "tags": []}
    named = next((s for s in renamed if site is not None and s["id"] == site["id"]), None)
    as_run, as_incident = cast(RunWithSessions, shown), cast(IncidentWithEvents, closed)
    return Subject(conn, run["id"], as_run, as_incident, renamed, named, True, rename)
