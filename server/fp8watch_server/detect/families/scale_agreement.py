"""Scales that ranks must share: mode 20, cross-rank-disagreement.

Shapes:     columns [ranks, S] of one step -> at most one finding
Thread:     detect worker

A scale per tensor is shared by the ranks over which its recipe reduces amax. Which those are is declared by each session, as mesh axes or as the
ranks of its process group, or is learned, along one axis of the mesh or over all ranks that hold the site: scales that
moved and were bit-equal in several samples have to stay so. Ranks that never agreed are not compared.

A group that is declared as ranks is held against the mesh as well: ranks that differ in their tensor-parallel coordinate alone
hold parts of one tensor, and a group without them leaves the parts with scales of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch_agent.amax_group import AMAX_RANKS_FACT
from fp8watch_agent.record import Measured
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.families.sides import by_rank, minority, sides_of
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.sessions import SessionFacts

Array = npt.NDArray[Any]
LEARN_STEPS = 8
"""Samples in which ranks must have agreed before they have to."""
AXES_FACT = "amax_reduction"
"""Fact of a session: mesh axes that amax is reduced over, as "dp,tp"."""
OF_ONE_TENSOR = "tp"
"""Axis along which ranks hold parts of one tensor."""
ALL = ""
"""All ranks that hold a site, whatever the mesh."""


class _Group(NamedTuple):
    """Ranks whose scales must agree, as indices into those of the step."""

    members: Array
    axes: tuple[str, ...] = ()  # declared
    over: str = ""  # ranks that amax is reduced over, as declared
    split: bool = False  # ... which leaves out others that hold parts of the same tensor
    learned: str | None = None  # axis along which it was learned


class ScaleAgreement:
    """What the scales of one attempt of a run must have in common."""

    def __init__(self) -> None:
        self._agreed: dict[str, Array] = {}  # axis -> samples of each site in which scales moved and agreed along it
        self._last: Array = np.zeros(0)  # scale of each site when it was compared last
        self._num_holders: Array = np.zeros(0, dtype=np.int64)  # the most ranks that had a scale of a site

    def observe(self, now: CrossRankStep, ranks: list[int], sessions: Mapping[int, SessionFacts]) -> Finding | None:
        """Compare the scales of one step."""
        per_tensor = now.table.per_tensor
        if not per_tensor.any():
            return None
        columns, has = by_rank(now, "scale_inv_max", Measured.SCALE, np.float64)
        has &= per_tensor[None, :] & (columns > 0) & np.isfinite(columns)
        has &= ~by_rank(now, "window_steps_back", Measured.WINDOW, np.int64)[1]  # of each rank of other steps
        known = [sessions.get(r) for r in ranks]
        groups = _declared(known)
        if groups is None:
            return self._as_learned(now, ranks, known, columns, has)
        if any(group.over for group in groups):
            has &= ~now.table.current_scaling[None, :]  # it is amax of a history that is reduced over such a group
        for group in groups:
            _, both, differ = _compared(columns, has, np.zeros(len(group.members), dtype=np.int64), group.members)
            if (both & differ).any():
                return _finding(now, ranks, known, columns, has, group, differ[0])
        return None

    def _as_learned(
        self, now: CrossRankStep, ranks: list[int], known: Sequence[SessionFacts | None], columns: Array, has: Array
    ) -> Finding | None:
        self._grow(len(now))
        held = has.sum(axis=0)
        self._num_holders = np.maximum(self._num_holders, held)
        largest = np.where(has, columns, 0.0).max(axis=0)
        moved = (held == self._num_holders) & (largest != self._last)
        found = None
        for axis, group_of in _along(known):
            order, both, differ = _compared(columns, has, group_of, np.arange(len(ranks)))
            compared, apart = both.any(axis=0), (both & differ).any(axis=0)
            agreed = self._agreed.setdefault(axis, np.zeros(len(now), dtype=np.int64))
            must = agreed >= LEARN_STEPS
            agreed[moved & compared & ~apart] += 1
            agreed[apart & ~must] = 0
            if found is None and (apart & must).any():
                wrong = both & differ & must
                which = int(np.flatnonzero(wrong.any(axis=1))[0])
                members = order[group_of[order] == np.unique(group_of)[which]]
                found = _finding(now, ranks, known, columns, has, _Group(members, learned=axis), wrong[which])
        self._last = np.where(held > 0, largest, self._last)
        return found

    def _grow(self, num_sites: int) -> None:
        more = num_sites - len(self._last)
        if more > 0:
            self._agreed = {axis: np.pad(agreed, (0, more)) for axis, agreed in self._agreed.items()}
            self._last = np.pad(self._last, (0, more))
            self._num_holders = np.pad(self._num_holders, (0, more))


def _compared(columns: Array, has: Array, group_of: Array, at: Array) -> tuple[Array, Array, Array]:
    """(`at` ordered by group, [groups, S] at least two have it, [groups, S] not all that have it are equal)."""
    by_group = np.argsort(group_of, kind="stable")
    order = at[by_group]
    first = np.flatnonzero(np.diff(group_of[by_group], prepend=-1))
    there, values = has[order], columns[order]
    high = np.maximum.reduceat(np.where(there, values, -np.inf), first, axis=0)
    low = np.minimum.reduceat(np.where(there, values, np.inf), first, axis=0)
    both = np.add.reduceat(there.astype(np.int64), first, axis=0) >= 2
    return order, both, both & (high != low)


def _along(known: Sequence[SessionFacts | None]) -> Iterable[tuple[str, Array]]:
    """(axis, number of its group for each rank): all ranks, then those that differ in one coordinate of the mesh alone."""
    yield ALL, np.zeros(len(known), dtype=np.int64)
    meshes = [s.mesh for s in known if s is not None and s.mesh]
    axes = sorted({axis for mesh in meshes for axis in mesh}) if len(meshes) == len(known) else []
    for axis in axes if len(axes) > 1 else []:
        rest = [tuple(sorted((a, c) for a, c in mesh.items() if a != axis)) for mesh in meshes]
        number = {key: i for i, key in enumerate(dict.fromkeys(rest))}
        if 1 < len(number) < len(rest):
            yield axis, np.array([number[key] for key in rest], dtype=np.int64)


def _declared(known: Sequence[SessionFacts | None]) -> list[_Group] | None:
    """Groups whose scales must agree, as the sessions say; None where they do not say."""
    sessions = [s for s in known if s is not None]
    if len(sessions) < len(known):
        return None
    if all(s.mesh and AXES_FACT in s.facts for s in sessions):
        axes = tuple(a.strip() for a in str(sessions[0].facts[AXES_FACT]).split(",") if a.strip())
        parts = _parted(tuple(sorted((a, c) for a, c in s.mesh.items() if a not in axes)) for s in sessions)
        return [_Group(part, axes=axes) for part in parts if len(part) > 1]
    if not all(AMAX_RANKS_FACT in s.facts for s in sessions):
        return None
    over = [str(s.facts[AMAX_RANKS_FACT]) for s in sessions]
    groups = [_Group(part, over=over[int(part[0])]) for part in _parted(over) if len(part) > 1]
    if all(s.mesh for s in sessions):
        beside = _parted(tuple(sorted((a, c) for a, c in s.mesh.items() if a != OF_ONE_TENSOR)) for s in sessions)
        groups += [_Group(p, over=over[int(p[0])], split=True) for p in beside if len({over[int(i)] for i in p}) > 1]
    return groups


def _parted(keys: Iterable[Any]) -> list[Array]:
    """Indices with equal keys together, in the order of the first of each."""
    parts: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        parts.setdefault(key, []).append(i)
    return [np.array(part) for part in parts.values()]


def _finding(
    now: CrossRankStep, ranks: list[int], known: Sequence[SessionFacts | None], columns: Array, has: Array, group: _Group, differ: Array
) -> Finding:  # fmt: skip
    rows = now.in_flow(differ)
    row = int(rows[0])
    at = group.members[has[group.members, row]]
    members, values = [ranks[int(i)] for i in at], columns[at, row]
    sides = sides_of(members, values)
    blamed = _blamed([known[int(i)] for i in at], values)
    evidence = [
        Evidence("scale_inv_max", float(sides.value), float(sides.other), "1", now.step),
        Evidence("amax_max", *_two(now, row, sides.odd[0]), "x", now.step),
        Evidence("disagreeing_sites", len(rows), 0, "sites", now.step),
        *minority(sides, f"of {len(at)} ranks", now.step),
    ]
    declared = ",".join(group.axes) or None
    if blamed:
        evidence.append(Evidence("differs_along", ",".join(blamed), declared, "mesh axes", now.step))
    if group.over:
        evidence.append(Evidence("amax_reduced_over", group.over, None, "ranks", None))
    return now.finding(
        "cross-rank-disagreement", "critical", rows, evidence, "fp8", rank=sides.odd[0], odd_ranks=sides.odd[:64],
        tied=sides.tied, axes=list(group.axes), over=group.over, split=group.split, blamed=blamed, num_ranks=len(at), learned=group.learned,
    )  # fmt: skip


def _blamed(known: Sequence[SessionFacts | None], values: Array) -> list[str]:
    """Mesh axes along which the value changes while the others stand still: the group that was not reduced over."""
    meshes: list[Mapping[str, int]] = [{} if s is None else s.mesh for s in known]
    blamed = []
    for axis in sorted({a for m in meshes for a in m}):
        rest: dict[tuple[tuple[str, int], ...], set[float]] = {}
        for mesh, value in zip(meshes, values, strict=True):
            others = tuple(sorted((a, c) for a, c in mesh.items() if a != axis))
            rest.setdefault(others, set()).add(float(value))
        if any(len(v) > 1 for v in rest.values()):
            blamed.append(axis)
    return blamed


def _two(now: CrossRankStep, row: int, odd: int) -> tuple[float | None, float | None]:
    """amax of a site on the odd rank, and the largest of the others."""
    mine: float | None = None
    others: list[float] = []
    for view in now.views:
        at = np.flatnonzero(view.row == row)
        value = float(view.values("amax_max")[at[0]]) if len(at) else float("nan")
        if value != value:
            continue
        if view.rank == odd:
            mine = value
        else:
            others.append(value)
    return mine, max(others) if others else None
