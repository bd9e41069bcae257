"""Rows of the pages' tables: several queries put side by side, each number with the place it came from.

Shapes:     dicts of queries -> dicts for templates
Thread:     any
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy import Connection

from fp8watch_agent.record import TileFlag
from fp8watch_server.api.bisection import KIND as BISECTION
from fp8watch_server.api.comparison import KIND as COMPARISON
from fp8watch_server.pages import formatting, health, layer_costs, lookup, panels
from fp8watch_server.pages.error_pages import Link, PageProblem
from fp8watch_server.pages.headline import need_of
from fp8watch_server.pages.lookup import Dict
from fp8watch_server.store import queries, run_list
from fp8watch_server.store.fields import name_of
from fp8watch_server.store.incident_states import ACKNOWLEDGED, ASKS_TO_BE_SEEN, OPEN, UNSEEN
from fp8watch_server.store.rows import IncidentRow, IncidentWithEvents, RunRow, SiteRow
from fp8watch_server.store.tile_maps import FLAG_ORDER, KeptMap, amax_of, worst_first

SEVERITIES = ("critical", "warning", "info")
NEAR = (8, 64)  # "now" in a table of sites: the newest of so many steps, for sites that are not in every one
NOW_WINDOWS = (*NEAR, 512, 4096, None)  # and further back while most sites are missing
NOW_POINTS = 4096  # of what lies nearby every step, so that the newest is the newest
NUM_WORST = 12
SPARK_POINTS = 120
NUM_LISTED = 3  # incidents of a run in the list of runs
STATE_ORDER = {OPEN: 0, UNSEEN: 1, ACKNOWLEDGED: 2}
NUM_FLAGGED = 24
OPERANDS = ("input", "weight", "grad_output")
NOISELESS_MARGIN_DB = 99.0
HEALTHY_SQNR_DB = {"E4M3": 28.0, "E5M2": 22.0, "E2M1": 14.0}  # below these, a format gives away what it could hold


def incidents(conn: Connection, run_id: str) -> list[IncidentRow]:
    """Incidents of a run: those that ask for somebody, looked after, the others; severe before mild, open before over."""
    found = queries.incidents_of(conn, [run_id], queries.MAX_LIMIT).get(run_id)
    return sorted((lookup.complete(i) for i in found.first), key=_by_state) if found else []


def _by_state(incident: IncidentRow) -> tuple[int, int, int, int]:
    severity = {s: i for i, s in enumerate(SEVERITIES)}.get(incident["severity"], 9)
    state = STATE_ORDER.get(incident["state"], len(STATE_ORDER))
    asks = incident["state"] in (OPEN, UNSEEN) and incident["severity"] in ASKS_TO_BE_SEEN
    return (0 if asks else 1 + state), severity, state, incident["first_step"]


def concerns(incident: IncidentRow, site: SiteRow) -> bool:
    """Whether an incident names this site."""
    return str(site["id"]) in {str(i) for i in incident.get("sites") or []} or lookup.site_of(incident, [site]) is site


def seen_here(conn: Connection, run_id: str, site: SiteRow) -> list[Dict]:
    """The incidents that name a site, each with the tile where it is one of this site."""
    found = [i for i in incidents(conn, run_id) if concerns(i, site)]
    return [{**i, "tile": i["place"]["tile"] if lookup.site_of(i, [site]) is site else None} for i in found]


def runs(conns: Sequence[Connection], wanted: run_list.Wanted) -> Dict:
    """One page of runs, each with its loss as a small line, its incidents, and why it needs somebody."""
    found, lies_in = run_list.find_over(conns, wanted)
    of_runs: dict[str, queries.IncidentsOfRun] = {}
    for conn in conns:
        of_runs |= queries.incidents_of(conn, [run_id for run_id, of in lies_in.items() if of is conn], NUM_LISTED)
    nothing = queries.IncidentsOfRun([], 0, 0)
    rows = []
    for run in found.runs:
        loss = queries.scalars(lies_in[run["id"]], run["id"], "loss", to_step=run["last_step"], points=SPARK_POINTS)
        thinned = loss["stride"] > 1  # of many steps: these are the smallest and the largest of each stretch
        step, value = _scalars_now(lies_in[run["id"]], run, ("loss",))["loss"] if thinned else formatting.latest(loss)
        of_run = of_runs.get(run["id"], nothing)
        mine = [lookup.complete(i) for i in of_run.first]
        over = [i for i in mine if i["state"] not in (OPEN, ACKNOWLEDGED, UNSEEN)]
        rows.append(
            {
                **run,
                "why": need_of(run),
                "loss": value,
                "loss_step": step,
                "spark": formatting.spark(loss),
                "incidents": mine[: len(mine) - len(over)],
                "num_incidents": of_run.num_going_on,
                "over": over,
                "num_over": of_run.num_over,
            }
        )
    return {"rows": rows, "found": found, "wanted": wanted}


def scalars_now(conn: Connection, run: RunRow) -> list[Dict]:
    """The newest value of each panel, with its step."""
    names = panels.fields()
    found = _scalars_now(conn, run, names)
    return [{"name": name, "step": step, "value": value} for name in names for step, value in [found[name]]]


def _scalars_now(conn: Connection, run: RunRow, names: Sequence[str]) -> dict[str, tuple[int | None, object]]:
    """Step and value of each scalar where it was logged last.

    After a restart from an earlier step the attempt before holds later steps: those are not now. What was logged at no
    step nearby is sought further back.
    """
    found: dict[str, tuple[int | None, object]] = dict.fromkeys(names, (None, None))
    high = last = -1 if run["last_step"] is None else run["last_step"]
    for window in NOW_WINDOWS:
        missing = [name for name in names if found[name][0] is None]
        if high < 0 or not missing:
            break
        low = 0 if window is None else max(0, last - window + 1)
        got = queries.several_scalars(conn, run["id"], missing, low, high, NOW_POINTS)
        found |= {name: formatting.latest(series) for name, series in got.items()}
        high = low - 1
    return found


def _newest(conn: Connection, run: RunRow, fields: tuple[str, ...], ids: set[int]) -> dict[int, Dict]:
    """Site -> field -> (step, value), where it was measured last: each window looks further back for what is missing.

    With statistics on each n-th step the newest measurement may lie far behind the newest step. Where most sites were
    found nearby, those that were not are not measured at all, and nothing is read for them over and over.
    """
    out: dict[int, Dict] = {}
    newest = last = -1 if run["last_step"] is None else run["last_step"]
    for window in NOW_WINDOWS:
        missing = sorted(i for i in ids if len(out.get(i, {})) < len(fields))
        if last < 0 or not missing or (window not in NEAR and 2 * len(out) >= len(ids)):
            break
        first = 0 if window is None else max(0, newest - window + 1)
        for site, cells in queries.newest(conn, run["id"], fields, first, last, missing).items():
            out[site] = cells | out.get(site, {})
        last = first - 1
    return out


WORST_FIELDS = ("tile_sqnr_db", "num_nonfinite", "underflow_ratio", "amax_max")


def worst_sites(conn: Connection, run: RunRow, sites: list[SiteRow], pressing: list[IncidentRow]) -> list[Dict]:
    """Sites by damage where each was measured last.

    Those that open incidents name, or such as nobody has seen yet, come first, then non-finite elements, then what is farthest outside of its own band,
    then the lowest tile SQNR against the format.
    """
    unusual = health.unusual_now(conn, run)
    named: dict[int, IncidentRow] = {}
    for incident in pressing[:NUM_WORST]:
        if (of := lookup.site_of(incident, sites)) is not None:
            named.setdefault(of["id"], incident)
    now = _newest(conn, run, WORST_FIELDS, {int(s["id"]) for s in sites})
    rows: list[Dict] = []
    for site in sites:
        cells = {f: now.get(int(site["id"]), {}).get(f) for f in WORST_FIELDS}
        if not any(cells.values()):
            continue
        bad, sqnr = cells["num_nonfinite"], cells["tile_sqnr_db"]
        num_bad = bad[1] if bad and isinstance(bad[1], (int, float)) else 0
        margin = NOISELESS_MARGIN_DB
        if sqnr and sqnr[1] != "inf":  # an SQNR of +Inf: nothing was lost; probes of high precision all have it
            margin = sqnr[1] - HEALTHY_SQNR_DB.get(site["format"], 28.0) if isinstance(sqnr[1], (int, float)) else -99.0
        step = max(cell[0] for cell in cells.values() if cell)
        by = named.get(site["id"])
        # An SQNR of before says nothing of elements that are NaN since: then the first in the flow of data is the worst.
        told = 0.0 if num_bad and bad and sqnr and sqnr[0] < bad[0] else margin
        far = unusual.get(int(site["id"]))
        beyond = far[1] if far is not None and far[1] > 1 else 0.0
        rows.append(
            {
                "site": site,
                "step": step,
                "cells": cells,
                "margin_db": margin,
                "unusual": far,
                "incident": by,
                "key": (by is None, -num_bad, -beyond, told, site["order"]),
            }
        )
    return sorted(rows, key=lambda r: r["key"])[:NUM_WORST]


NOW_FIELDS = ("amax_max", "scale_inv_max", "tile_sqnr_db", "underflow_ratio", "num_nonfinite", "num_sentinel_tiles")
"""Stands at the head of a site's page."""


def site_now(conn: Connection, run: RunRow, site: SiteRow) -> list[Dict]:
    """The newest value of each field of a site, with its step."""
    if run["last_step"] is None:
        return []
    fields = (*NOW_FIELDS, layer_costs.FIELD) if layer_costs.is_measured_at(site) else NOW_FIELDS
    now = _newest(conn, run, fields, {int(site["id"])}).get(int(site["id"]), {})
    cells = {field: now.get(field, (None, None)) for field in fields}
    return [{"field": field, "step": step, "value": value} for field, (step, value) in cells.items()]


def touched_sites(incident: IncidentRow, sites: list[SiteRow]) -> list[SiteRow]:
    """Sites folded into an incident, in data-flow order."""
    ids = {str(i) for i in incident.get("sites") or []}
    return [s for s in sites if str(s["id"]) in ids]


def evidence_charts(incident: IncidentRow, site: SiteRow | None) -> list[Dict]:
    """What to draw for an incident: what proves it, what it did to the site, and what the loss showed meanwhile."""
    fields = [e["field"] for e in incident["evidence"]]
    of_run = [f for f in fields if f in (*panels.fields(), "loss_scale")]
    of_site = [f for f in fields if f in queries.SERIES_FIELDS] if site is not None else []
    if of_site:
        of_site = [*of_site[:2], "tile_sqnr_db"]
    out: list[Dict] = [{"field": f, "site": site["id"]} for f in dict.fromkeys(of_site) if site is not None]
    return out + [{"field": f, "site": None} for f in dict.fromkeys([*of_run[:3], "loss"])]


def comparison(incident: IncidentWithEvents) -> Dict | None:
    """What ten steps in high precision said, the newest that was sent, with the layers that differ most in front."""
    told = _newest_told(incident, COMPARISON)
    if told is None:
        return None
    layers = sorted(told["layers"], key=lambda x: _distance(x["output_error"]), reverse=True)
    return {**told, "layers": layers[:8]}


def bisection(incident: IncidentWithEvents) -> Dict | None:
    """Which layers must leave FP8, the newest that was sent, with the modules of what it names."""
    told = _newest_told(incident, BISECTION)
    if told is None:
        return None
    modules = [name.rpartition(".")[0] if name.rpartition(".")[2] in OPERANDS else name for name in told["culprits"]]
    return {**told, "culprit_modules": list(dict.fromkeys(modules))}


def _newest_told(incident: IncidentWithEvents, kind: str) -> Dict | None:
    told: list[Dict] = [e["detail"] for e in incident.get("events") or [] if e["kind"] == kind]
    return told[-1] if told else None


def _distance(error: object) -> float:
    value = float(error) if isinstance(error, (int, float, str)) else 0.0
    return value if value == value else float("inf")


def flagged_tiles(kept: KeptMap, site: SiteRow) -> list[Dict]:
    """Tiles of a whole map that stand out, worst first, with the elements they cover."""
    tiles = kept.tiles
    rows: list[Dict] = []
    for index in worst_first(tiles, NUM_FLAGGED):
        tile, bits = divmod(index, tiles.shape[1]), int(tiles.flags[index])
        rows.append(
            {
                "tile": tile,
                "elements": elements(tile, site),
                "flags": [
                    (str(flag.name).replace("_", "-").lower(), flag in FLAG_ORDER) for flag in TileFlag if bits & flag
                ],
                "amax": _named(float(amax_of(tiles.amax[index : index + 1])[0])),
                "scale_inv": _named(float(tiles.scale_inv[index])),
                "num_nonfinite": int(tiles.num_nonfinite[index]),
                "num_underflow": int(tiles.num_underflow[index]) if kept.underflow_is_known else None,
            }
        )
    return rows


def _named(value: float) -> float | str:
    return value if math.isfinite(value) else name_of(value)


def elements(tile: tuple[int, int], site: SiteRow) -> str:
    """The elements of a tile, as rows and columns of the operand."""
    parts = []
    for name, at, size, length in zip(("row", "column"), tile, site["tile"], site["shape"], strict=True):
        first, last = at * size, min((at + 1) * size, max(length, at * size + 1)) - 1
        parts.append(f"{name} {first}" if first == last else f"{name}s {first}–{last}")
    return ", ".join(parts)


def no_tile_map(run: RunRow, site: SiteRow, rank: int | None, back: Link) -> PageProblem:
    """A site without any map."""
    return PageProblem(
        404,
        "No tile map of this site",
        f"No tile map of {formatting.cut(site['module'])} · {site['operand']} · {site['direction']} has arrived"
        f"{f' from rank {rank}' if rank is not None else ''}.",
        "Maps are sent when a detector asks for them. To keep them for every step, attach with:",
        (back, Link("The run", lookup.run_url(run["id"]))),
        code='fp8watch.attach(model, tile_maps="all")',
    )


def no_tile_map_at(
    run: RunRow, site: SiteRow, rank: int | None, step: int, steps: list[int], back: Link
) -> PageProblem:
    """A step without a map, while others have one."""
    near = sorted(steps, key=lambda s: abs(s - step))[:5]
    span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
    return PageProblem(
        404,
        f"No tile map at step {step}",
        f"There are {len(steps)} maps of this site, of steps {span}.",
        "Take one of the nearest steps.",
        (*(Link(f"Step {s}", lookup.tile_map_url(run["id"], site["id"], s, rank)) for s in sorted(near)), back),
    )
