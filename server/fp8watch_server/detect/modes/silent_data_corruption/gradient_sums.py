"""Whether what each process gave of a gradient adds up to what their optimizers got: mode 15.

Shapes:     sketches of one parameter in one step, [ranks, 8] given and [holders, 8] got -> at most one finding
Thread:     detect worker

Products with random signs are linear: those of all processes' gradients add up to those of the sum, whatever number divides it
and whatever it is clipped to by its norm. So a reduction is checked from outside, with no word between processes. Held against each
other are ranks that say the same parameter in the same step, where all of them have come. What was never right is no
data-parallel sum (another topology, compression, noise), but where nearly all parameters were, and then one after the other is not at
its first look. Of what is news, a rank that is missing in the sum, that is in it twice, or that got another result than the others,
is named where the numbers single it out; else it must be seen twice. Where each keeps a part of the sum (FSDP), the sketches of a turn
are of one part, and only who holds that says what arrived.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.families.gradient_sketches import Sketches, apart, name_of, of_step
from fp8watch_server.detect.finding import Evidence, Finding

Floats = npt.NDArray[np.float64]
APART = 0.02
"""Of its norm: from here on it may be wrong. A sum of a few processes in two bytes rounds by less; one of hundreds by more."""
LEARN_LOOKS, LEARN_APART = 8, 0.1
"""Looks that say how far sums of this run round, and what they may be off in them."""
TIMES_USUAL, MOST_APART, KEPT_LOOKS = 6.0, 0.2, 32
"""By so many times the median of the last looks it must be off, but by no more than that."""
SINGLED_OUT = 4.0
"""By so many times one explanation must fit better than the next."""
AGAIN_STEPS = 64
"""Within which it must be seen again, where no rank is named."""
STEPS_A_RANK = 8
"""Likewise: twice the time in which the parts of all ranks have had their turns."""
NEW_IN_A_ROW, RIGHT_TIMES = 3, 16
"""Parameters that are wrong at their first look, with no right one between them: so many are news, where so many times as many were right
as were wrong before."""
REPEAT_STEPS = 5
KIND = "gradient-sum"


class Verdict(NamedTuple):
    """What the sketches of one parameter say."""

    how: str
    """"missing", "twice", "own", "alone", "one" or "apart"."""
    ranks: tuple[int, ...]
    """Who is named."""
    apart: float
    """How far off the sum it is, as a share of its norm, of the rank that is furthest."""


class GradientSums(Detector):
    """Follows the parameters whose gradients are shared."""

    modes = ("silent-data-corruption",)
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._right: set[str] = set()  # parameters whose gradients added up once
        self._never: set[str] = set()  # that have not so far
        self._row: dict[str, int] = {}  # of these the last ones, one after the other -> step of their first look
        self._last: int | None = None  # step in which one did not
        self._first: int | None = None
        self._told: int | None = None
        self._names: set[str] = set()
        self._usual: list[float] = []  # how far the last sums that were right were off

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Baselines of sites go on."""

    def resume(self) -> None:
        """What was followed is over; that a parameter's gradients add up is not."""
        self._last = self._first = self._told = None
        self._names.clear()
        self._row.clear()
        self._usual.clear()  # there may be more processes now

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        found = []
        for name, said in of_step(ctx.now).items():
            learns = len(self._usual) < LEARN_LOOKS
            usual = min(MOST_APART, TIMES_USUAL * float(np.median(self._usual))) if not learns else LEARN_APART
            verdict = judge(said.ranks, said.given, said.got, max(APART, usual), said.holders)
            if verdict is None:
                self._right.add(name)
                self._never.discard(name)
                self._row.clear()
                self._usual = [*self._usual[1 - KEPT_LOOKS :], furthest(said.given, said.got)]
            elif learns:
                self._never.add(name)
            elif self._is_news(name, ctx.now.step, len(said.ranks)):
                found += self._follow(ctx, name, said, verdict)
        return found[:1]

    def _is_news(self, name: str, step: int, num_ranks: int) -> bool:
        """Whether a parameter whose gradient does not add up is one of those that do."""
        if name in self._right:
            return True
        if name not in self._never:
            self._never.add(name)
            self._row[name] = step
        before = len(self._never) - len(self._row)
        if name not in self._row or len(self._row) < NEW_IN_A_ROW or RIGHT_TIMES * before > len(self._right):
            return False
        first, *_, last, _ = self._row.values()
        if not self._goes_on(last, num_ranks):
            self._begin(first)
            self._names.update(map(name_of, self._row))
            self._last = last
        return True

    def _goes_on(self, step: int, num_ranks: int) -> bool:
        """Whether what is seen in this step is what was seen last."""
        return self._last is not None and step - self._last <= max(AGAIN_STEPS, STEPS_A_RANK * num_ranks)

    def _begin(self, step: int) -> None:
        self._first, self._told = step, None
        self._names.clear()

    def _follow(self, ctx: Context, name: str, said: Sketches, verdict: Verdict) -> list[Finding]:
        step, seen = ctx.now.step, self._goes_on(ctx.now.step, len(said.ranks))
        if not seen:
            self._begin(step)
        between = step - self._last if seen and self._last is not None else 1
        self._last = step
        shown = name_of(name)
        self._names.add(shown)
        if not (seen or verdict.ranks) or (self._told is not None and step - self._told < REPEAT_STEPS):
            return []
        self._told = step
        module, _, operand = shown.rpartition(".")
        facts = ctx.now.table.facts
        rows = np.array(
            [i for i, f in enumerate(facts) if module and (f.module, f.operand) == (module, operand)], np.int64
        )
        evidence = [
            Evidence("gradient_apart", float(f"{verdict.apart:.3g}"), 0, f"of its norm, {shown}", step),
            Evidence("parameters", len(self._names), 0, "so far", step),
            Evidence("processes", len(said.ranks), None, "whose gradients were added up", step),
        ]
        began = step if self._first is None else self._first
        more: dict[str, Any] = {"rank": verdict.ranks[0]} if verdict.ranks else {}
        return [
            ctx.now.finding(
                "silent-data-corruption", "warning", rows, evidence, "shared",
                kind=KIND, first=shown, how=verdict.how, odd_ranks=list(verdict.ranks[:64]), num_ranks=len(said.ranks),
                holders=[said.ranks[i] for i in said.holders][:64] if len(said.holders) < len(said.ranks) else [],
                others=0 if name in self._right else len(self._right),
                num=len(self._names), began=began, not_before=began, apart=between, **more,
            )
        ]  # fmt: skip


def furthest(given: Floats, got: Floats) -> float:
    """How far off a multiple of the sum is what one got, of the rank that is furthest, as a share of its norm. Both [R, 8]"""
    total = given.sum(axis=0)
    return max(apart(g, total) for g in got)


def judge(
    ranks: tuple[int, ...], given: Floats, got: Floats, limit: float = APART, holders: tuple[int, ...] = ()
) -> Verdict | None:
    """Whether what ranks got is a multiple of the sum of what they gave; None where it is, or nothing was given.

    Args:
        ranks: [R] who.
        given: [R, 8] sketches of what each gave.
        got: [H, 8] of what each of `holders` got.
        limit: what it may be off, as a share of its norm.
        holders: [H] places in `ranks`; none: all of them.
    """
    total, holders = given.sum(axis=0), holders or tuple(range(len(ranks)))
    if not total.any():
        return None
    off = np.array([apart(g, total) for g in got])
    wrong, worst = off > limit, float(off.max())
    if not wrong.any():
        return None
    if not wrong.all():
        return Verdict("one", tuple(ranks[i] for i, is_wrong in zip(holders, wrong, strict=True) if is_wrong), worst)
    if max(apart(g, given[i]) for g, i in zip(got, holders, strict=True)) <= limit:
        is_part = len(holders) < len(ranks)
        return Verdict("alone" if is_part else "own", tuple(ranks[i] for i in holders) if is_part else (), worst)
    if max(apart(g, got[0]) for g in got) > limit:
        return Verdict("apart", (), worst)
    for how, sign in (("missing", -1.0), ("twice", 1.0)):
        fits = np.array([apart(got[0], total + sign * mine) for mine in given])
        best, *others = np.argsort(fits)
        if fits[best] <= limit and fits[others[0]] > max(SINGLED_OUT * fits[best], limit):
            return Verdict(how, (ranks[int(best)],), worst)
    return Verdict("apart", (), worst)
