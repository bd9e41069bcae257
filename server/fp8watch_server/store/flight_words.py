"""What the flight recorder shows, in sentences: where a fault was born, how far it travelled, when it was gone.

Shapes:     Flight -> sentences
Thread:     any; pure functions

Each sentence counts what was measured, and names its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8watch_server.store.deviation import BAND, WALK
from fp8watch_server.store.flight import NAMES, OF, Flight, broken_words

MAX_CALM_STEPS = 8
"""Once the sites of a failure were calm for so many measured steps, it is over: what leaves its band later need not be of it."""


MAX_NAMED = 5
"""Places named behind the first."""
MAX_OF_STEP = 24
"""Sites of one step that the table names."""


@dataclass(frozen=True)
class Travel:
    """What became of the sites that leapt in one step: columns of the flight, and rows of its sites."""

    joined: Sequence[int]
    """Sites that leapt after it, in the order of execution of their steps."""
    joined_at: int
    """Column of the first of them; -1: none."""
    upto: int
    """Column up to which they were followed."""
    last: int
    """Column in which one of all of them stood out last."""
    calm: Sequence[int]
    """Columns after that, in which they were measured."""
    later: Sequence[int]
    """Sites that left their band only after MAX_CALM_STEPS of them."""
    later_at: int


def site_words(site: Mapping[str, Any]) -> str:
    """`layers.1.mlp.down_proj input, rowwise`."""
    return f"{site['module']} {site['operand']}, {site['direction']}"


def band_words() -> str:
    """What a cell means."""
    return (
        f"A cell is how far the site is from its own band in that step: amax or, where it was measured, tile SQNR, "
        f"whichever is farther. 1 × is the edge of the band: {BAND}; {WALK}. "
        f"A site stands out beyond 1 ×, or with a NaN, an Inf or a sentinel tile."
    )


def said(found: Flight) -> list[str]:
    """Born, travelled, gone: at most five sentences."""
    steps, outside = found.steps, found.outside
    if not outside.size or not found.looked.any():
        return ["No site was measured in these steps."]
    at = int(np.searchsorted(steps, found.at))
    if at >= len(steps) or not found.looked[:, at].any():
        return [f"No site was measured at step {found.at}.", *_most(found)]
    here = np.flatnonzero(outside[:, at])
    num_looked = int(found.looked[:, at].sum())
    leaps = found.leaps
    if not len(here):
        return [f"At step {found.at} none of {num_looked} sites measured stands out.", *_later(found, at, leaps)]
    stand = f"At step {found.at}, {len(here)} of {num_looked} sites measured stand{'s' if len(here) == 1 else ''} out"
    leapt = np.flatnonzero(leaps[:, at])
    if not len(leapt):
        far = int(here[np.argmax(np.where(found.broken[here, at], np.inf, np.nan_to_num(found.far[here, at])))])
        more = "none of them since this step"
        return [f"{stand}, {more}; the farthest is {site_words(found.sites[far])}: {cell_words(found, far, at)}."]
    first = int(leapt[np.argmin(found.turn[leapt])])
    new = "" if len(leapt) == len(here) else f", {len(leapt)} of them at a leap"
    out = [
        f"{stand}{new}; the first of these in the order of execution is {site_words(found.sites[first])}: "
        f"{cell_words(found, first, at)}{_then(found, leapt, first)}."
    ]
    return out + _spread(found, at, leapt)


def _then(found: Flight, leapt: Any, first: int) -> str:
    """Who else leapt in the step, in the order of execution."""
    others = _places(found, sorted(leapt.tolist(), key=lambda i: int(found.turn[i])), but=first)
    return f", then {others}" if others else ""


def _places(found: Flight, which: Sequence[int], but: int = -1) -> str:
    """`layers.1.mlp.up_proj grad_output, lm_head input and 2 more`: each module and operand once; but that of a site."""
    names = [f"{site['module']} {site['operand']}" for site in (found.sites[i] for i in (but, *which))]
    told = list(dict.fromkeys(name for name in names[1:] if but < 0 or name != names[0]))
    more = f" and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    return ", ".join(told[:MAX_NAMED]) + more


def _travel(found: Flight, at: int, leapt: Any) -> Travel:
    """Follow the sites that leapt in a step, and those that leapt after them, until they were calm."""
    steps, leaps = found.steps, found.leaps
    ours = np.zeros(len(found.sites), dtype=bool)
    ours[leapt] = True
    judged = (found.looked & ~np.isnan(found.far)) | found.broken
    last, upto, joined_at, later_at = at, at, -1, -1
    calm: list[int] = []
    later = np.zeros(len(ours), dtype=bool)
    joined: list[int] = []
    for j in range(at + 1, len(steps)):
        new = leaps[:, j] & ~ours
        if len(calm) < MAX_CALM_STEPS:
            upto = j
            if new.any() and joined_at < 0:
                joined_at = j
            joined += sorted(np.flatnonzero(new).tolist(), key=lambda i: int(found.turn[i]))
            ours |= new
            if found.outside[ours, j].any():
                last, calm = j, []
            elif judged[ours, j].any():
                calm.append(j)
        elif leaps[:, j].any():
            later |= leaps[:, j]
            later_at = j if later_at < 0 else later_at
        elif later_at < 0 and judged[ours, j].any():
            calm.append(j)
    since = sorted(np.flatnonzero(later).tolist(), key=lambda i: int(found.turn[i]))
    return Travel(joined, joined_at, upto, last, calm, since, later_at)


def _spread(found: Flight, at: int, leapt: Any) -> list[str]:
    """Sites that leapt after the step and not in it, when the last of all was back, and what left its band only later."""
    steps = found.steps
    if at + 1 >= len(steps):
        return []
    way = _travel(found, at, leapt)
    num = len(way.joined)
    out = []
    if num:
        out.append(
            f"In the steps after, up to {int(steps[way.upto])}, {num} more leap{'s' if num == 1 else ''} "
            f"out of {'its' if num == 1 else 'their'} band, from step {int(steps[way.joined_at])} on: {_places(found, way.joined)}."
        )
    if way.calm:
        out.append(f"From step {int(steps[way.calm[0]])} on none of them stands out, as far as they were measured.")
    else:
        out.append(f"At step {int(steps[way.last])} some of them still do.")
    if way.later_at >= 0:
        n, since = len(way.later), int(steps[way.later_at])
        leap = "site leaps out of its" if n == 1 else "sites leap out of their"
        out.append(
            f"From step {since} on {n} {leap} band ({_places(found, way.later)}), after {len(way.calm)} steps of calm: that "
            "may be something else."
        )
    return out


def spread(found: Flight) -> dict[str, Any] | None:
    """Where a failure went: {first, places, num_sites, first_step, last_step}; None where no site leapt out of its band.

    `places` are modules with their operand, in the order in which they left their bands, without the first of them;
    `num_sites` counts all of its sites, and `last_step` is the last in which one of them was seen to stand out.
    """
    start = int(np.searchsorted(found.steps, found.at))
    leaps = found.leaps
    columns = np.flatnonzero(leaps[:, start:].any(axis=0)) if leaps.size else np.zeros(0, dtype=np.int64)
    here = start < len(found.steps) and bool(found.outside[:, start].any()) if leaps.size else False
    if not len(columns) or (here and columns[0] > 0):
        return None
    at = start + int(columns[0])
    leapt = sorted(np.flatnonzero(leaps[:, at]).tolist(), key=lambda i: int(found.turn[i]))
    way = _travel(found, at, leapt)
    names = [f"{site['module']} {site['operand']}" for site in (found.sites[i] for i in (*leapt, *way.joined))]
    told = list(dict.fromkeys(names))
    ends = {"first_step": int(found.steps[at]), "last_step": int(found.steps[way.last])}
    return {"first": told[0], "places": told[1:], "num_sites": len(names), **ends}


def _later(found: Flight, at: int, leaps: Any) -> list[str]:
    """Where a failure shows in sites only after its step, as that of a learning rate does: from the first leap on."""
    after = np.flatnonzero(leaps[:, at + 1 :].any(axis=0))
    if not len(after):
        return _most(found)
    j = at + 1 + int(after[0])
    leapt = np.flatnonzero(leaps[:, j])
    first = int(leapt[np.argmin(found.turn[leapt])])
    of = f"{len(leapt)} site{' leaps out of its' if len(leapt) == 1 else 's leap out of their'} band"
    said_first = f"{site_words(found.sites[first])}: {cell_words(found, first, j)}"
    which = "it is" if len(leapt) == 1 else "the first in the order of execution is"
    return [
        f"At step {int(found.steps[j])} {of}; {which} {said_first}{_then(found, leapt, first)}.",
        *_spread(found, j, leapt),
    ]


def _most(found: Flight) -> list[str]:
    """The step in which most sites stand out."""
    counts = found.outside.sum(axis=0)
    if not counts.any():
        return []
    j = int(np.argmax(counts))
    return [f"Most stand out at step {int(found.steps[j])}: {int(counts[j])}."]


def cell_words(found: Flight, i: int, j: int) -> str:
    """What one cell says."""
    parts = [text] if (text := broken_words(found, i, j)) else []
    far = found.far[i, j]
    if not np.isnan(far):
        parts.append(f"{NAMES[OF[int(found.by[i, j])]]} at {far:.2g} × its band")
    return ", ".join(parts) or ("no band yet" if found.looked[i, j] else "not looked at")


def by_step(found: Flight) -> list[dict[str, Any]]:
    """The picture as a table: of each step how many sites were looked at, and those that stood out, the farthest first.

    `stood` is [(site, what its cell says)], at most MAX_OF_STEP, and `more` how many there are besides.
    """
    rows: list[dict[str, Any]] = []
    outside, far = found.outside, np.where(found.broken, np.inf, np.nan_to_num(found.far, nan=-1.0))
    for j, step in enumerate(found.steps.tolist()):
        stood = sorted(np.flatnonzero(outside[:, j]).tolist(), key=lambda i: -float(far[i, j]))
        row = {"step": step, "looked": int(found.looked[:, j].sum()), "outside": len(stood)}
        told = [(found.sites[i], cell_words(found, i, j)) for i in stood[:MAX_OF_STEP]]
        rows.append({**row, "stood": told, "more": max(0, len(stood) - len(told))})
    return rows
