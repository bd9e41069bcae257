"""Who holds which value: ranks that are to agree in one, and do not.

Shapes:     a value of each rank -> the ranks to name     Thread: detect worker
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import Measured
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.finding import Evidence

Array = npt.NDArray[Any]


def by_rank(now: CrossRankStep, name: str, group: Measured, dtype: Any) -> tuple[Array, Array]:
    """(values [ranks, S], which of them were measured). Bits stay bits: a hash is no float."""
    values = np.zeros((len(now.views), len(now)), dtype=dtype)
    has = np.zeros((len(now.views), len(now)), dtype=np.bool_)
    for i, view in enumerate(now.views):
        values[i, view.row] = view.raw(name)
        has[i, view.row] = view.has(group)
    return values, has


class Sides(NamedTuple):
    """Who holds which value."""

    odd: list[int]  # ranks to name, in order
    value: Any  # of the first of them
    other: Any  # what most have, or else what another has
    tied: bool  # no value has most ranks: nobody can tell who is right, and all are named


def sides_of(ranks: list[int], values: Array) -> Sides:
    """Ranks that are not with the most common value of [ranks], of which two at least differ; all, where two are as common."""
    order = np.argsort(ranks)
    ranks, values = [ranks[i] for i in order], values[order]
    kinds, first, counts = np.unique(values, return_index=True, return_counts=True)
    best, second = sorted(range(len(kinds)), key=lambda k: (-counts[k], first[k]))[:2]
    if counts[best] == counts[second]:
        mine = values[0]
        return Sides(ranks, mine, next(v for v in values if v != mine), True)
    odd = np.flatnonzero(values != kinds[best])
    return Sides([ranks[i] for i in odd], values[odd[0]], kinds[best], False)


def minority(sides: Sides, unit: str, step: int) -> list[Evidence]:
    """How many are not with most of them, where there are most."""
    return [] if sides.tied else [Evidence("minority_ranks", len(sides.odd), 0, unit, step)]
