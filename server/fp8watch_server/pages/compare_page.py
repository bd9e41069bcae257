"""The page of two runs side by side.

Shapes:     GET /compare?a=&b= -> HTML; its charts are drawn from what the page carries
Thread:     worker threads of the server: one database connection a request
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from fp8watch_server.compare.answer import compare
from fp8watch_server.compare.sides import Side
from fp8watch_server.http.databases import connect_everywhere, connect_to_run
from fp8watch_server.pages import formatting, health, lookup
from fp8watch_server.pages.error_pages import Link
from fp8watch_server.pages.templating import page
from fp8watch_server.store import run_list
from fp8watch_server.store.rows import RunRow

NUM_OFFERED = 200
NUM_FACTS = 60

router = APIRouter(include_in_schema=False)


@router.get("/compare")
def compare_page(request: Request) -> HTMLResponse:
    """Two runs, or two ranks: where they part, how they differ; without two of them, what can be chosen."""
    query = request.query_params
    back = Link("All runs", "/")
    ids = query.get("a", ""), query.get("b", "")
    q = query.get("q", "")[:200].replace("\0", "")
    ranks = [lookup.integer("rank", query.get(name), back) for name in ("rank_a", "rank_b")]
    low, high = lookup.shown_steps(query)
    with ExitStack() as stack:
        conns = [stack.enter_context(connect_to_run(request, run_id)) for run_id in ids]
        sides = [lookup.find_run(of, run_id) if run_id else None for of, run_id in zip(conns, ids, strict=True)]
        everywhere = stack.enter_context(connect_everywhere(request))
        newest, num_found = run_list.newest_over(everywhere.conns, q, NUM_OFFERED)
        found = None
        if sides[0] is not None and sides[1] is not None:
            a, b = (Side(run["id"], rank) for run, rank in zip(sides, ranks, strict=True) if run is not None)
            found = compare(conns[0], a, b, low, high, conn_b=conns[1])
    return page(
        request,
        "compare.html",
        sides=sides,
        ranks=ranks,
        q=q,
        offered=_offered([side for side in sides if side is not None], newest),
        num_offered=len(newest),
        num_found=num_found,
        found=found,
        facts=found["facts"][:NUM_FACTS] if found else [],
        drawn={"loss": found["loss"], "map": _rows(found["map"]), "parting": _marked(found)} if found else None,
        num_rows=len(_rows(found["map"])["rows"]) if found else 0,
        swapped=_address(ids[::-1], ranks[::-1]),
        from_step=low,
        to_step=high,
    )


def _offered(chosen: Sequence[RunRow], newest: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(id, name) of the runs to choose from: those that are chosen, and the newest that match the search."""
    return list(
        {
            run_id: (run_id, name) for run_id, name in (*((r["id"], r["name"] or r["id"]) for r in chosen), *newest)
        }.values()
    )


def _address(ids: tuple[str, ...], ranks: list[int | None]) -> str:
    query = [f"{name}={formatting.segment(value)}" for name, value in zip(("a", "b"), ids, strict=True)]
    query += [f"{name}={rank}" for name, rank in zip(("rank_a", "rank_b"), ranks, strict=True) if rank is not None]
    return f"/compare?{'&'.join(query)}"


def _marked(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found["parting"][key] for key in ("step", "seen_at", "loss_step")}


def _rows(of: dict[str, Any]) -> dict[str, Any]:
    """The map by module: of each cell the ratio that is farthest from 1, and whose it is."""
    sites, values = of["sites"], of["values"]
    rows: list[dict[str, Any]] = []
    row_of: dict[int, int] = {}
    for r, row in enumerate(health.rows_of(sites)):
        row_of |= dict.fromkeys(row.sites, r)
        cells: list[float | None] = []
        names: list[int | None] = []
        for j in range(len(of["steps"])):
            there = [(abs(values[i][j]), i) for i in row.sites if values[i][j] is not None]
            at = max(there)[1] if there else None
            cells.append(None if at is None else values[at][j])
            names.append(at)
        rows.append({"label": row.label, "modules": row.num_modules, "values": cells, "sites": names})
    marks = [[row_of[i], j, i, text] for i, j, text in of["marks"]]
    named = [[s["module"], s["operand"], s["direction"]] for s in sites]
    return {"rows": rows, "steps": of["steps"], "stride": of["stride"], "marks": marks, "sites": named}
