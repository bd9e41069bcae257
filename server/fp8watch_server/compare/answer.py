"""The comparison of two sides, as API, page and command line show it.

Shapes:     two sides -> {a, b, sentence, parting, facts, not_looked_at, sites, loss, map}, which JSON can hold
Thread:     query pool

What is read is bounded: the losses of all common steps, and amax of the common sites in at most MAX_CELLS cells, from the
first common step on. In the map a column holds several steps: the ratio that is farthest from 1 is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy.engine import Connection

from fp8watch_server.compare import bands, fact_differences, first_difference, words
from fp8watch_server.compare.sides import Amax, Floats, Side, Steps, amax_of, batch_ids, scalars_of
from fp8watch_server.store import queries
from fp8watch_server.store.fields import as_data
from fp8watch_server.store.rows import SiteRow

MAX_CELLS = 1_500_000
MAX_STEPS = 1 << 20
MAP_COLUMNS = 300
LOSS_POINTS = 1000
MAX_SITES_NAMED = 200
SCALARS = ("loss", "lr", "loss_scale")

Dict = dict[str, Any]


def compare(
    conn: Connection,
    a: Side,
    b: Side,
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = MAP_COLUMNS,
    *,
    conn_b: Connection | None = None,
) -> Dict:
    """Two sides, of runs that there are.

    Args:
        conn: the database of the first run.
        conn_b: that of the second; None: the same.
        a, b: runs, or ranks of them.
        from_step, to_step: steps that are looked at; None: all that both have.
        points: columns of the map at most.
    """
    sides = ((conn, a), (conn_b or conn, b))
    scalars = [scalars_of(of, side, SCALARS, from_step, to_step) for of, side in sides]
    of_loss = [s["loss"] for s in scalars]
    steps, i, j = np.intersect1d(of_loss[0].steps, of_loss[1].steps, assume_unique=True, return_indices=True)
    steps, i, j = steps[:MAX_STEPS], i[:MAX_STEPS], j[:MAX_STEPS]
    both_sites = [queries.sites(of, side.run_id) for of, side in sides]
    common, twins = _common_sites(*both_sites)
    num_fine = max(1, MAX_CELLS // max(1, len(common)))
    fine = steps[:num_fine]
    ids = [int(site["id"]) for site in common]
    amax = amax_of(*sides[0], ids, fine), amax_of(*sides[1], ids, fine)
    loss = of_loss[0].values[i], of_loss[1].values[j]
    logged = of_loss[0].present[i] & of_loss[1].present[j]
    seen = np.where(logged, loss[0], 0.0), np.where(logged, loss[1], 0.0)
    from_the_start = bool(len(steps)) and steps[0] == of_loss[0].steps[0] == of_loss[1].steps[0] and not from_step
    data = [batch_ids(of, side, from_step, to_step) for of, side in sides]
    of_data, num_named = fact_differences.of_data(*data)
    same_data = bool(len(steps)) and num_named == len(steps) and not of_data
    found = _find(steps, fine, seen, amax, [str(s["operand"]) for s in common], from_the_start, same_data)
    names = [words.site_name(s["module"], s["operand"]) for s in common]
    shown = [_side(of, side) for of, side in sides]
    both = amax[0].measured & amax[1].measured
    finite = logged & np.isfinite(loss[0]) & np.isfinite(loss[1])
    looked = words.Compared(
        steps=steps.tolist(),
        num_sites=len(common),
        num_measured_sites=int(both.any(axis=1).sum()),
        num_with_loss=int(logged.sum()),
        only_a=_only(both_sites[0], ids),
        only_b=_only(both_sites[1], ids),
        num_only_steps=(len(of_loss[0].steps) - len(i), len(of_loss[1].steps) - len(j)),
        num_named_data=num_named,
        data_of_first_rank=any(
            side.rank is None and told["world_size"] > 1 for side, told in zip((a, b), shown, strict=True)
        ),
        share=float(both.any(axis=1).sum() and both[both.any(axis=1)].mean()),
        cut_at=int(fine[-1]) if len(fine) < len(steps) else None,
        largest_gap=_largest_gap(loss[0][finite], loss[1][finite]),
    )
    said = [fact_differences.session_facts(of, side) for of, side in sides]
    facts = fact_differences.differences(*said)
    for name in ("lr", "loss_scale"):
        facts += fact_differences.of_scalar(name, scalars[0][name], scalars[1][name])
    facts = fact_differences.settings_first(
        fact_differences.chosen_first(facts + of_data) + fact_differences.of_sites(common, twins)
    )
    return {
        "a": shown[0],
        "b": shown[1],
        "sentence": words.sentence(found, looked, names),
        "parting": _parting(found, common),
        "common": {
            "steps": len(steps),
            "first_step": int(steps[0]) if len(steps) else None,
            "last_step": int(steps[-1]) if len(steps) else None,
            "sites": len(common),
        },
        "facts": facts,
        "not_looked_at": words.not_looked_at(looked),
        "only_a": list(looked.only_a)[:MAX_SITES_NAMED],
        "only_b": list(looked.only_b)[:MAX_SITES_NAMED],
        "loss": _loss_chart(steps, loss, logged, same_data=same_data or found.identical > 0),
        "map": _map(common, fine, amax, points),
    }


def _find(
    steps: Steps,
    fine: Steps,
    loss: tuple[Floats, Floats],
    amax: tuple[Amax, Amax],
    operands: Sequence[str],
    start: bool,
    same_data: bool,
) -> first_difference.Parting:
    """Where amax was read; and where that ends, by the losses alone."""
    n = len(fine)
    found = first_difference.find(
        fine, (loss[0][:n], loss[1][:n]), amax, operands, from_the_start=start, same_data=same_data
    )
    if n == len(steps) or found.step is not None:
        return found
    none = np.zeros((0, len(steps)))
    nothing = Amax(none, none.astype(bool), none.astype(bool))
    return first_difference.find(
        steps, loss, (nothing, nothing), [], from_the_start=False, same_data=same_data or found.identical > 0
    )


def _side(conn: Connection, side: Side) -> Dict:
    run = queries.run(conn, side.run_id)
    keys = ("id", "name", "status", "recipe", "backend", "world_size", "last_step", "created_at")
    return {
        **({k: v for k, v in run.items() if k in keys} if run else {"id": side.run_id, "world_size": 1}),
        "rank": side.rank,
    }


def _common_sites(a: Sequence[SiteRow], b: Sequence[SiteRow]) -> tuple[list[SiteRow], list[SiteRow]]:
    """Sites of both, in the order of execution of the first, and their twins."""
    of_b = {site["id"]: site for site in b}
    common = [site for site in a if site["id"] in of_b]
    return common, [of_b[site["id"]] for site in common]


def _only(sites: Sequence[SiteRow], common: Sequence[int]) -> list[str]:
    """Names of sites that the other has not; where it has the operand in another direction, this one's is said."""
    known = set(common)
    shared = {(s["module"], s["operand"]) for s in sites if s["id"] in known}
    names = (
        words.site_name(s["module"], s["operand"])
        + (f" ({s['direction']})" if (s["module"], s["operand"]) in shared else "")
        for s in sites
        if s["id"] not in known
    )
    return list(dict.fromkeys(names))


def _largest_gap(a: Floats, b: Floats) -> float | None:
    if not len(a):
        return None
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-12)))


def _parting(found: first_difference.Parting, sites: Sequence[Mapping[str, Any]]) -> Dict:
    def named(rows: Sequence[int]) -> list[Dict]:
        keys = ("id", "module", "operand", "direction", "gemm")
        return [{k: sites[i][k] for k in keys} for i in rows[:MAX_SITES_NAMED]]

    return {
        "step": found.step,
        "by": found.by or None,
        "sites": named(found.sites),
        "seen_at": found.seen_at,
        "loss_step": found.loss_step,
        "identical_steps": found.identical,
        "differs_at": found.differs_at,
        "differs_in": named(found.differs_in),
        "weights_differ": found.weights_differ,
    }


def _loss_chart(steps: Steps, loss: tuple[Floats, Floats], logged: npt.NDArray[np.bool_], *, same_data: bool) -> Dict:
    """Losses, their difference and its band, at the steps with a loss on both sides; of each bucket the largest difference."""
    steps, a, b = steps[logged], loss[0][logged], loss[1][logged]
    band = bands.loss_band(a, b, same_data=same_data) if len(steps) else np.zeros(0)
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    width = max(1, math.ceil(len(steps) / LOSS_POINTS))
    starts = range(0, len(steps), width)
    at = np.array([s + int(np.argmax(np.nan_to_num(apart[s : s + width], nan=np.inf))) for s in starts], dtype=np.int64)
    out: Dict = {"steps": steps[at].tolist(), "stride": width}
    for name, values in (("a", a), ("b", b), ("difference", apart), ("band", band)):
        data, nonfinite = as_data(values[at], np.ones(len(at), dtype=bool))
        out[name] = {"values": data, "nonfinite": nonfinite}
    return out


def _map(sites: Sequence[Mapping[str, Any]], steps: Steps, amax: tuple[Amax, Amax], points: int) -> Dict:
    """log2 of the ratio of amax: {sites, steps, values, marks: [[row, column, text]], stride}; null where not both measured it."""
    a, b = amax
    both = a.measured & b.measured
    ratio = np.where(both, a.level - b.level, np.nan)
    width = max(1, math.ceil(len(steps) / max(1, points)))
    starts = np.arange(0, len(steps), width)
    shown = np.full((len(sites), len(starts)), np.nan)
    marks: list[list[Any]] = []
    for column, first in enumerate(starts.tolist()):
        part = ratio[:, first : first + width]
        size = np.where(np.isnan(part), -1.0, np.abs(part))
        at = np.argmax(size, axis=1)
        shown[:, column] = part[np.arange(len(sites)), at] if part.size else np.nan
        for side, name in ((a, "first"), (b, "second")):
            for row in np.flatnonzero(side.bad[:, first : first + width].any(axis=1)).tolist():
                marks.append([row, column, f"not finite in the {name}"])
    values = [[None if v != v else round(v, 4) for v in row] for row in np.clip(shown, -32, 32).tolist()]
    keys = ("id", "module", "operand", "direction")
    return {
        "sites": [{k: s[k] for k in keys} for s in sites],
        "steps": steps[starts].tolist(),
        "stride": width,
        "values": values,
        "marks": marks[:4000],
    }
