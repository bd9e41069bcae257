"""What processes say of one gradient that several share, side by side; and who of them gets whose.

Shapes:     logs of one step, one a rank -> sketches [ranks, 8] of what each gave and [holders, 8] of what its optimizer got
Thread:     detect worker

Products with random signs add up as gradients do (`fp8watch.session.gradient_sketch`). So who got the sum of whose is seen from outside:
of data-parallel processes each gets that of all. Where from the first look on each gets the sum of some, in parts of one size, these are
replicas and others are none to them: local SGD, DiLoCo, or a reduction that is missing. Ranks that once got the same of
different gradients stay one part, whatever comes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch_agent.update_names import GRADIENT_GIVEN, GRADIENT_GOT, GRADIENT_OF, GROUP, SKETCH_NUMBERS
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.step_view import StepView

Floats = npt.NDArray[np.float64]

SAME = 0.02
"""Of its norm: what two ranks got is nearer to a multiple of the other where they share it."""
DIFFERENT = 0.1
"""What ranks gave is further from such a multiple, or nothing is to be learned of what they got."""

WAIT_STEPS = 16
"""Observed, from the first sketch: four looks, of which one may be at a gradient that is 0 on a rank."""


class Sketches(NamedTuple):
    """Of one parameter."""

    ranks: tuple[int, ...]
    given: Floats  # [ranks, 8]
    got: Floats  # [holders, 8]
    holders: tuple[int, ...]  # places in `ranks` of those that got it


def of_step(now: CrossRankStep) -> dict[str, Sketches]:
    """Parameter, with the first of its processes where they are not all -> what all of these say of it in this step; nothing of one
    that lacks some."""
    by_name: dict[str, dict[int, tuple[Floats, Floats | None, int]]] = {}
    for view in now.views:
        if not _has_sketch(view):
            continue
        logs = view.logs()
        if (given := _numbers(logs, GRADIENT_GIVEN)) is None:
            continue
        for name in [n for n in logs if n.startswith(GRADIENT_OF)]:
            told = given, _numbers(logs, GRADIENT_GOT), int(logs[name])
            by_name.setdefault(name.removeprefix(GRADIENT_OF), {})[view.rank] = told
    out = {}
    for name, of in by_name.items():
        ranks = tuple(sorted(of))
        got = {i: of[rank][1] for i, rank in enumerate(ranks)}
        held = {i: numbers for i, numbers in got.items() if numbers is not None}
        if len(of) > 1 and held and {num for *_, num in of.values()} == {len(of)}:
            given_by = np.stack([of[rank][0] for rank in ranks])
            out[name] = Sketches(ranks, given_by, np.stack(list(held.values())), tuple(held))
    return out


def _has_sketch(view: StepView) -> bool:
    """Whether a step of its batch has one."""
    return any(name.startswith(GRADIENT_OF) for name in view.columns.batch.header.logs)


def name_of(parameter: str) -> str:
    """The parameter's own name, without the processes that share it where these are some of the run's."""
    name, group, first = parameter.rpartition(GROUP)
    return name if group and first.isdecimal() else parameter


def _numbers(logs: Mapping[str, float], what: str) -> Floats | None:
    """[8]; None where one of them is missing or not finite."""
    numbers = np.array([logs.get(f"{what}{k}", np.nan) for k in range(SKETCH_NUMBERS)])
    return numbers if np.isfinite(numbers).all() else None


def apart(got: Floats, of: Floats) -> float:
    """How far one is from a multiple of the other, as a share of its norm; 1 where it is 0 and the other is not."""
    energy, size = float(of @ of), float(np.linalg.norm(got))
    if not size or not energy:
        return float((size > 0) != (energy > 0))
    return float(np.linalg.norm(got - (got @ of) / energy * of)) / size


def parts_of(said: Sketches) -> list[list[int]]:
    """Ranks that got the same, where that is the sum of what they gave; none where that is not so, where parts are not of one size, or
    where what ranks gave does not tell whose it is. In order."""
    if len(said.holders) < len(said.ranks) or not (said.given.any(axis=1).all() and said.got.any(axis=1).all()):
        return []
    if np.triu(_apart_of_each(said.given) < DIFFERENT, 1).any():
        return []
    alike, firsts = _apart_of_each(said.got) <= SAME, np.zeros(len(said.got), dtype=np.bool_)
    parts: dict[int, list[int]] = {}
    for i in range(len(said.got)):
        among = np.flatnonzero(alike[i] & firsts)
        first = int(among[0]) if len(among) else i
        firsts[first] = True
        parts.setdefault(first, []).append(i)
    if len({len(part) for part in parts.values()}) > 1:
        return []
    if any(apart(said.got[first], said.given[part].sum(axis=0)) > SAME for first, part in parts.items()):
        return []
    return [[said.ranks[i] for i in part] for part in parts.values()]


def _apart_of_each(sketches: Floats) -> Floats:
    """`apart` of each two of them, none of which is 0. [R, 8] -> [R, R]"""
    unit = sketches / np.linalg.norm(sketches, axis=1, keepdims=True)
    return np.asarray(np.sqrt(np.maximum(0.0, 1.0 - (unit @ unit.T) ** 2)))


class GradientParts:
    """Parts of the ranks of one attempt that never got a gradient of each other. Empty: that is not known."""

    _num_waited: int | None = None
    """Steps observed since the first sketch, whatever that told; a state that was saved before has none."""

    def __init__(self) -> None:
        self._part: dict[int, int] = {}  # rank -> the first of its part
        self.num_looks = 0  # that told whose gradients each got
        self.first = 0  # step of the first of them
        self.apart = 0.0  # how far what one part got is from what another did, as a share of its norm; of the last look

    def forget(self) -> None:
        """Sessions begin anew, with other settings perhaps."""
        self._part.clear()
        self.num_looks = 0
        self._num_waited = None

    def waits(self) -> bool:
        """Whether sketches have come, and none has told whose gradients each got: the next may."""
        return not self.num_looks and self._num_waited is not None and self._num_waited < WAIT_STEPS

    def observe(self, now: CrossRankStep) -> None:
        """Take in the sketches of one step."""
        if self._num_waited is not None:
            self._num_waited += 1
        elif any(name.startswith(GRADIENT_OF) for view in now.views if _has_sketch(view) for name in view.logs()):
            self._num_waited = 0
        for said in of_step(now).values():
            if not (parts := parts_of(said)):
                continue
            self.first = now.step if not self.num_looks else self.first
            self.num_looks += 1
            if len(parts) > 1:
                self.apart = apart(said.got[0], said.got[said.ranks.index(parts[1][0])])
            for part in parts:
                joined = {self._part.setdefault(rank, part[0]) for rank in part}
                for rank, of in self._part.items() if len(joined) > 1 else ():
                    if of in joined:
                        self._part[rank] = min(joined)

    def split(self, ranks: list[int]) -> list[list[int]]:
        """Places in `ranks` by part; of a rank that is not known all are one."""
        if any(rank not in self._part for rank in ranks):
            return [list(range(len(ranks)))]
        parts: dict[int, list[int]] = {}
        for i, rank in enumerate(ranks):
            parts.setdefault(self._part[rank], []).append(i)
        return list(parts.values())
