"""Flight recorder: how far every site was from its own band in the steps around one, in the order of execution.

Shapes:     records of sites around a step -> Flight: deviations [S, T] of S sites over T consecutive steps
Thread:     query pool

One read of the stored rows gives all of it. A step in which a site has no record was not looked at; one that came before
there was a band (fewer than 12 measurements) was looked at and is not judged. The band is that of store.deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy.engine import Connection

from fp8watch_server.store import deviation
from fp8watch_server.store.fields import SERIES_FIELDS, evaluate
from fp8watch_server.store.reading import gather
from fp8watch_server.store.site_rows import rows_of
from fp8watch_server.store.tile_maps import kept_between

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

SPAN, MAX_SPAN = 32, 128
"""Steps shown before and after the one that is asked for."""
OF = ("amax_max", "tile_sqnr_db")
"""What has a band; a cell shows the one that is farther from its own."""
NAMES = {"amax_max": "amax", "tile_sqnr_db": "tile SQNR"}
LEAP = 2.0
"""So many times as far as before is a leap; less is a drift over the edge."""
FPROP, BACKWARD = "fprop", "backward"
LEAD_STEPS = (32, 256)
"""Steps read before the first that is shown, for its band: more of them where sites are measured seldom."""
MAX_RECORDS = 600_000
"""Records that are read for one picture; of runs with more sites fewer steps are shown, `span` says how many."""
MAX_SITE_ROWS = 400
"""Up to so many sites have a row each; of more, those of a module or of neighbours share one."""
UNJUDGED = -1.0
"""Stands for a cell that was looked at and has no band yet."""


@dataclass(frozen=True)
class Flight:
    """Sites × consecutive steps. A cell with `broken` held something that is no number, or a sentinel tile."""

    at: int
    span: int
    steps: npt.NDArray[np.int64]  # [T]
    sites: Sequence[Mapping[str, Any]]  # [S] as queries.sites gives them
    far: Floats  # [S, T] times the band, NaN where not judged
    by: npt.NDArray[np.int64]  # [S, T] which of OF it is
    looked: Flags  # [S, T] a record is there
    nonfinite: Floats  # [S, T] number of NaN and Inf elements
    odd: Flags  # [S, T] its amax is NaN or Inf
    sentinel: Floats  # [S, T] number of tiles with a scale forced to 1

    @property
    def broken(self) -> Flags:
        """Cells that held NaN or Inf elements, or sentinel tiles."""
        return (self.nonfinite > 0) | (self.sentinel > 0) | self.odd

    @property
    def outside(self) -> Flags:
        """Cells outside of their band, or broken."""
        return (np.nan_to_num(self.far) > 1) | self.broken

    @property
    def leaps(self) -> Flags:
        """Cells that stand out at once: broken, or beyond their band by twice of what was measured before; no drift."""
        out = np.zeros(self.far.shape, dtype=bool)
        outside, broken = self.outside, self.broken
        was_out = np.zeros(len(out), dtype=bool)
        before = np.full(len(out), np.inf)  # what was outside when it was first judged may have been so for long
        for j in range(len(self.steps)):
            far = self.far[:, j]
            out[:, j] = outside[:, j] & ~was_out & (broken[:, j] | (np.nan_to_num(far) >= LEAP * before))
            judged = ~np.isnan(far) | broken[:, j]
            was_out = np.where(judged, outside[:, j], was_out)
            before = np.where(np.isnan(far), before, far)
        return out

    @property
    def turn(self) -> npt.NDArray[np.int64]:
        """[S] place of each site in a step's order of execution: forward through fprop, then back."""
        back = np.array([pane_of(s) == BACKWARD for s in self.sites], dtype=bool)
        n = len(back)
        key = np.where(back, 2 * n - np.arange(n), np.arange(n))
        return np.asarray(np.argsort(np.argsort(key)), dtype=np.int64)


def pane_of(site: Mapping[str, Any]) -> str:
    """Whether a site is read on the way forward (fprop, outputs of modules) or back (dgrad, wgrad)."""
    return BACKWARD if site["gemm"] in ("dgrad", "wgrad") else FPROP


def around(
    conn: Connection, run: Mapping[str, Any], sites: Sequence[Mapping[str, Any]], at: int, span: int = SPAN
) -> Flight:
    """Read what happened around a step.

    Args:
        run: as queries.run gives it.
        sites: its sites in data-flow order.
        at: the step in the middle.
        span: steps before and after it, at most MAX_SPAN.
    """
    of_step = max(1, len(sites)) * max(1, int(run["world_size"] or 1))
    span = max(1, min(span, MAX_SPAN, max(8, (MAX_RECORDS // of_step - LEAD_STEPS[0]) // 2)))
    newest = -1 if run["last_step"] is None else int(run["last_step"])
    first, last = max(0, at - span), min(at + span, newest)
    steps = np.arange(first, last + 1, dtype=np.int64)
    shape = (len(sites), len(steps))
    if not shape[0] or not shape[1]:
        none = np.zeros(shape)
        return Flight(at, span, steps, sites, none, none.astype(np.int64), none > 0, none, none > 0, none)
    for lead in LEAD_STEPS:
        low = max(0, first - lead)
        found = _grids(conn, run["id"], sites, low, last)
        enough = np.median(found["looked"][:, : first - low].sum(axis=1)) >= deviation.LEAST
        if enough or low == 0 or (last - first + LEAD_STEPS[-1]) * of_step > MAX_RECORDS:
            break
    per_field = []
    for name in OF:
        per_field.append(deviation.of_sites(name, found[name], sites))
    stacked = np.stack(per_field)[:, :, first - low :]
    by = np.argmax(np.nan_to_num(stacked, nan=-1.0), axis=0)
    far = np.take_along_axis(stacked, by[None], axis=0)[0]
    cut = {name: found[name][:, first - low :] for name in ("looked", "num_nonfinite", "num_sentinel_tiles")}
    bad, sentinel = (np.nan_to_num(cut[name]) for name in ("num_nonfinite", "num_sentinel_tiles"))
    odd = found["odd"][:, first - low :]
    return Flight(at, span, steps, sites, far, by, cut["looked"], bad, odd, sentinel)


def _grids(
    conn: Connection, run_id: str, sites: Sequence[Mapping[str, Any]], low: int, high: int
) -> dict[str, npt.NDArray[Any]]:
    """Field -> [S, T] with NaN where absent; `looked`: a record is there; `odd`: an amax that is no number."""
    names = (*OF, "num_nonfinite", "num_sentinel_tiles")
    fields = [SERIES_FIELDS[name] for name in names]
    needs = {column for f in fields for column in f.needs}
    records = gather(conn, run_id, needs, from_step=low, to_step=high)
    ids = np.array([int(s["id"]) for s in sites], dtype=np.uint64)
    order = np.argsort(ids)
    place = order[np.minimum(np.searchsorted(ids, records.site, sorter=order), len(ids) - 1)]
    known = ids[place] == records.site
    i, j = place[known], records.step[known] - low
    shape = (len(sites), high - low + 1)
    out: dict[str, npt.NDArray[Any]] = {"looked": np.zeros(shape, dtype=bool), "odd": np.zeros(shape, dtype=bool)}
    out["looked"][i, j] = True
    for f in fields:
        grid = np.full(shape, np.nan)
        values, present = evaluate(f, records.columns)
        grid[i, j] = np.where(present[known], values[known].astype(np.float64), np.nan)
        out[f.name] = grid
        if f.name == "amax_max":
            out["odd"][i, j] = present[known] & ~np.isfinite(values[known])
    return out


def as_json(conn: Connection, run_id: str, found: Flight) -> dict[str, Any]:
    """What the page draws, bounded in rows.

    {run_id, at, span, steps, rows: [{pane, label, modules, operand, direction, site, values, sites}], marks, sqnr,
    outside, looked, maps}. `values[j]` is times the band, null where not looked at, −1 where looked at without a band;
    `sites` names the site of each cell where several share a row, else it is null. `marks` is [[row, column, site,
    text]]; `sqnr` the cells [row, column] outside by their tile SQNR; `outside` and `looked` count sites by step; `maps`
    is site -> steps with a tile map.
    """
    rows: list[dict[str, Any]] = []
    marks: list[list[Any]] = []
    sqnr: list[list[int]] = []
    broken = found.broken
    shared = len(found.sites) > MAX_SITE_ROWS
    groups: list[tuple[str, int, str, list[int]]] = []
    for row in rows_of(found.sites):
        for pane in (FPROP, BACKWARD):
            mine = [i for i in row.sites if pane_of(found.sites[i]) == pane]
            parts = [mine] if shared or row.num_modules > 1 else [[i] for i in mine]
            groups += [(row.label, row.num_modules, pane, part) for part in parts if part]
    for label, num_modules, pane, part in groups:
        worst, cells = _worst(found, part)
        r = len(rows)
        one = found.sites[part[0]] if len(part) == 1 else None
        rows.append(
            {
                "pane": pane,
                "label": label,
                "modules": num_modules,
                "operand": one["operand"] if one else None,
                "direction": one["direction"] if one else None,
                "site": int(one["id"]) if one else None,
                "values": cells,
                "sites": None if one else [int(found.sites[i]["id"]) for i in worst],
            }
        )
        for j in np.flatnonzero(broken[part].any(axis=0)).tolist():
            i = part[int(np.argmax(found.nonfinite[part, j] * 1e6 + found.sentinel[part, j]))]
            marks.append([r, j, int(found.sites[i]["id"]), broken_words(found, i, j)])
        for j, i in enumerate(worst):
            if found.by[i, j] == 1 and found.far[i, j] > 1:
                sqnr.append([r, j])
    first, last = (int(found.steps[0]), int(found.steps[-1])) if len(found.steps) else (0, -1)
    named = {str(s["id"]): [s["module"], s["operand"], s["direction"]] for s in found.sites} if shared else {}
    return {
        "run_id": run_id,
        "at": found.at,
        "span": found.span,
        "steps": found.steps.tolist(),
        "num_sites": len(found.sites),
        "rows": rows,
        "sites": named,
        "marks": marks,
        "sqnr": sqnr,
        "outside": found.outside.sum(axis=0).tolist(),
        "looked": found.looked.sum(axis=0).tolist(),
        "maps": kept_between(conn, run_id, first, last),
    }


def _worst(found: Flight, part: Sequence[int]) -> tuple[list[int], list[float | None]]:
    """Of sites that share a row: the farthest of each step, and what its cell shows."""
    rows = np.array(part)
    far, looked = found.far[rows], found.looked[rows]
    rank = np.where(np.isnan(far), np.where(looked, -1.0, -2.0), far)
    at = np.argmax(rank, axis=0)
    value = rank[at, np.arange(rank.shape[1])]
    cells = [None if v == -2.0 else UNJUDGED if v == -1.0 else round(float(v), 2) for v in value]
    return rows[at].tolist(), cells


def broken_words(found: Flight, i: int, j: int) -> str:
    """What a broken cell held."""
    bad, forced = int(found.nonfinite[i, j]), int(found.sentinel[i, j])
    parts = [f"{bad} NaN or Inf element{'' if bad == 1 else 's'}"] if bad else []
    parts += ["its amax is NaN or Inf"] if found.odd[i, j] and not bad else []
    parts += [f"{forced} sentinel tile{'' if forced == 1 else 's'}"] if forced else []
    return ", ".join(parts)
