"""The statistical detectors of one run: baselines, what may be learned, and who is asked in which order.

Shapes:     Now -> findings of one step
Thread:     detect worker

Every detector sees the step before it is learned. A site's baseline learns only while none of its alarms is on and no
cause is known that would explain what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.baseline import WINDOW_STEPS as BASELINE_STEPS
from fp8watch_server.detect.context import Baselines, Context, went_back_from
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.lr_schedule import Schedule
from fp8watch_server.detect.modes import DETECTORS
from fp8watch_server.detect.precedence import (
    EXACT_MODES,
    GLOBAL_ROOTS,
    SAME_PARENT,
    SAYS_MORE,
    SETTLING,
    SHOWS_BEHIND,
    WINDOW_STEPS,
    asked_at,
    explains,
)
from fp8watch_server.detect.step_view import Mask
from fp8watch_server.detect.turns import Turns

RESUME_WITHIN = 0.1
"""Share of the steps so far that a resumed run may have gone back: what was usual there is usual here."""
RESUME_WITHIN_STEPS = 200
"""It may always have gone back by so many."""
MUTED_STEPS = 20
"""Observed steps for which a cause that was found answers for what it explains."""
LONG_MUTED_STEPS = 60
"""Of a loss that jumped, a tensor that was corrupted: the baselines around it need longer to settle."""


class Statistics:
    """Baselines and detectors of one attempt of a run."""

    _num_learned = 0
    """Steps that baselines of sites took in."""

    def __init__(self, num_sites: int, limit: Limits) -> None:
        self.limit = limit
        self.num_steps = 0
        self._base = Baselines.of(num_sites)
        self._schedule = Schedule(limit.warmup_steps, limit.after_lr_warmup_steps)
        self._detectors = [kind.make(num_sites, limit) for kind in DETECTORS]
        self.last_step: int | None = None
        self._pending = Turns()
        self._roots: dict[tuple[str, str], tuple[int, int]] = {}
        """Kind and module, "" for anywhere -> num_steps when it was found last, earliest step of its onset."""
        self._critical: set[tuple[str, str]] = set()
        """Those of them that were: what is critical is explained away by nothing less."""

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        for baseline in self._base.per_site():
            baseline.grow(num_sites)
        for detector in self._detectors:
            detector.grow(num_sites)

    def adopt(self, limit: Limits) -> None:
        """Read back from a state: what is not kept in it. A detector that is not in it begins anew."""
        self.limit = limit
        for name in ("_loss", "_divergence"):  # states of before held these two detectors twice
            self.__dict__.pop(name, None)
        self.__dict__.setdefault("last_step", None)
        self._pending = Turns()
        self._roots = {key if isinstance(key, tuple) else (key, ""): of for key, of in self._roots.items()}
        self.__dict__.setdefault("_critical", set(self._roots))  # a state of before tells them apart by nothing
        kept = {type(detector): detector for detector in self._detectors}
        num_sites = self._base.amax.num_series
        for kind, detector in kept.items():
            complete(detector, kind.make(num_sites, limit))
        complete(self._base, Baselines.of(num_sites))
        self._schedule.adopt(Schedule(limit.warmup_steps, limit.after_lr_warmup_steps))
        self._detectors = [kept.get(kind) or kind.make(num_sites, limit) for kind in DETECTORS]

    def continues_at(self, step: int | None) -> bool:
        """Whether a session that begins at this step goes on where this attempt was."""
        if step is None or self.last_step is None:
            return step is None
        back = self.last_step - step
        near = back <= max(RESUME_WITHIN_STEPS, RESUME_WITHIN * self.last_step) and -back <= RESUME_WITHIN_STEPS
        return near and step >= self.limit.warmup_steps

    def resume(self) -> None:
        """A new session goes on with the run: what is usual stays, what was followed from step to step begins anew."""
        self._base.recent_amax.forget()
        self._base.steps = []
        self._pending.forget()
        self._schedule.resume()
        self._roots, self._critical = {}, set()
        for detector in self._detectors:
            detector.resume()

    def forget(self, rows: npt.NDArray[np.int64]) -> None:
        """Sites whose quantiser became another one: what was usual before says nothing."""
        which = np.zeros(self._base.amax.num_series, dtype=np.bool_)
        which[rows] = True
        for baseline in (self._base.sqnr, self._base.underflow):
            baseline.forget(which)

    def sample(self, now: CrossRankStep, *, poisoned: bool) -> CrossRankStep | None:
        """The sample of most sites that ends with a step; None between samples, where only what is broken is sent, or those
        sites that have their turn, and tells nothing of the rest."""
        if poisoned:
            self._pending.forget()
            return None
        return self._pending.sample(now, int(np.count_nonzero(self._base.recent_amax.count > 0)))

    def observe(
        self,
        now: CrossRankStep,
        sample: CrossRankStep | None,
        roots: Sequence[Finding],
        *,
        clean: bool,
        poisoned: bool,
        stride: int = 1,
    ) -> list[Finding]:
        """Judge one step, then learn from it.

        Args:
            now: the step.
            sample: what `sample` says of it.
            roots: what was found in it already, by the invariants.
            stride: steps between observed steps.
            clean: no broken quantiser is known that would explain growth.
            poisoned: values are non-finite, or just were: nothing of the step says anything.
        """
        self.num_steps += 1
        self.last_step = now.step
        window, sites = WINDOW_STEPS * stride, now.table.sites
        for f in roots:
            self._note_root(f.kind, f, now.step - (0 if f.mode in EXACT_MODES else window), sites)
        base = self._base
        if poisoned:
            base.recent_amax.forget()
            base.steps = []
            return self._told([f for d in self._detectors for f in d.cut_off(now, self.limit)], window, sites)
        ordinary_lr = not any(d.holds_lr for d in self._detectors)
        self._schedule.observe(now.step, now.scalar("lr"), learn=clean and ordinary_lr)
        if sample is not None:
            base.recent_amax.push(sample.log2_amax)
            base.steps = [*base.steps, now.step][-base.recent_amax.window :]
        warm = self._schedule.warm(now.step)
        of_step = Context(now, base, self._schedule, self.limit, self.num_steps, warm, clean)
        of_sample = of_step
        if sample is not None and sample is not now:
            of_sample = Context(sample, base, self._schedule, self.limit, self.num_steps, warm, clean)
        found: list[Finding] = []
        for detector in self._detectors:
            if (sample is not None or detector.between_samples) and any(
                mode not in self.limit.disabled for mode in detector.modes
            ):
                whole = detector.whole_samples or not detector.between_samples
                found += detector.observe(of_sample if whole else of_step)
        found = self._told(found, window, sites)
        self._learn(of_sample, sampled=sample is not None)
        return found

    def _told(self, found: Sequence[Finding], window: int, sites: Mapping[int, SiteFacts]) -> list[Finding]:
        """Those of the findings of a step that are said: causes, of modes that are asked for."""
        oldest = self.num_steps - LONG_MUTED_STEPS
        self._roots = {key: of for key, of in self._roots.items() if of[0] >= oldest or key[0] in SAYS_MORE}
        self._critical &= set(self._roots)
        found = [f for f in found if f.mode not in self.limit.disabled and not self._is_muted(f, window, sites)]
        found = without_consequences(found, window, sites)
        for f in found:
            if not f.extra.get("goes_on"):  # told before, and as long ago
                self._note_root(f.kind, f, f.earliest(window), sites)
        return found

    def _note_root(self, kind: str, found: Finding, earliest: int, sites: Mapping[int, SiteFacts]) -> None:
        anywhere = found.mode in GLOBAL_ROOTS or kind in SHOWS_BEHIND
        for module in (not anywhere and _modules(found, sites)) or {""}:
            seen, began = self._roots.get((kind, module), (-math.inf, earliest))
            lasts = self.num_steps - seen <= LONG_MUTED_STEPS
            self._roots[kind, module] = self.num_steps, min(began, earliest) if lasts else earliest
            if found.severity == "critical":
                self._critical.add((kind, module))
            elif not lasts:
                self._critical.discard((kind, module))

    def _is_muted(self, found: Finding, window: int, sites: Mapping[int, SiteFacts]) -> bool:
        if (held := found.extra.get("held")) is not None:
            said = [of for (root, _), of in self._roots.items() if root in SAYS_MORE]
            return any(self.num_steps - seen <= held and began + window >= found.onset for seen, began in said)
        mine = _modules(found, sites)
        for (root, module), (seen, began) in self._roots.items():
            lasts = LONG_MUTED_STEPS if root in SETTLING else MUTED_STEPS
            follows = began <= found.latest(window)
            if root == found.kind or not follows or self.num_steps - seen > lasts or not explains(root, found.kind):
                continue
            less = found.severity == "critical" and (root, module) not in self._critical
            if not less and _reaches(root, {module} - {""}, mine):
                return True
        return False

    def _learn(self, ctx: Context, *, sampled: bool) -> None:
        if not ctx.clean:
            return
        if sampled:
            self._learn_sites(ctx)
        if any(d.holds_loss for d in self._detectors):
            return
        for baseline, name in ((self._base.loss, "loss"), (self._base.grad_norm, "grad_norm")):
            value = ctx.now.scalar(name)
            if value is not None and math.isfinite(value):
                baseline.push(np.array([value]))

    def _learn_sites(self, ctx: Context) -> None:
        now, base = ctx.now, self._base
        take: Mask = np.ones(len(now), dtype=np.bool_)
        for detector in self._detectors:
            frozen = detector.frozen()
            if frozen is not None:
                take &= ~frozen
        base.amax.push(now.log2_amax, take)
        base.amin.push(now.log2_amin, take)
        base.sqnr.push(now.sqnr_db, take)
        base.underflow.push(now.underflow, take)
        base.kurtosis.push(now.log2_kurtosis, take)
        self._num_learned += 1
        if ctx.warm and self._num_learned % BASELINE_STEPS == 0:
            base.came_to.push(went_back_from(base.amax, self.limit))


def complete(read: object, fresh: object) -> None:
    """Give a part of a state that an earlier version has saved the attributes that it did not have."""
    for name, value in vars(fresh).items():
        read.__dict__.setdefault(name, value)


def _modules(found: Finding, sites: Mapping[int, SiteFacts]) -> frozenset[str]:
    """Modules that it hit; none where it is of the whole step, or not all of its sites are named."""
    ids = found.extra.get("sites", ())
    if int(found.extra.get("num_sites", 0)) > len(ids):
        return frozenset()
    return frozenset(sites[i].module for i in ids if i in sites)


def _reaches(root: str, theirs: Set[str], mine: Set[str]) -> bool:
    """Whether a cause in some modules shows in others; without any, it is of the whole step."""
    if root in SAME_PARENT:
        theirs, mine = ({m.rpartition(".")[0] for m in modules} for modules in (theirs, mine))
    return not theirs or not mine or bool(theirs & mine)


def without_consequences(
    found: Iterable[Finding], window: int = WINDOW_STEPS, sites: Mapping[int, SiteFacts] = MappingProxyType({})
) -> list[Finding]:
    """Findings of one step that no other of them explains, at its place. What is critical is left, too, where its cause is not: its
    incident is as grave as what follows from it."""
    found = list(found)
    modules = [_modules(f, sites) for f in found]
    return [
        f
        for f, mine in zip(found, modules, strict=True)
        if not any(
            root is not f
            and explains(root.kind, f.kind)
            and (f.severity != "critical" or root.severity == "critical")
            and (root.mode in GLOBAL_ROOTS or root.kind in SHOWS_BEHIND or _reaches(root.kind, theirs, mine))
            and root.earliest(window) <= f.latest(window)
            and not _first(f, root)
            for root, theirs in zip(found, modules, strict=True)
        )
    ]


def _first(found: Finding, root: Finding) -> bool:
    """Whether each of two explains the other, and this one began first: it is the cause."""
    return explains(found.kind, root.kind) and (found.onset, asked_at(found.mode)) < (root.onset, asked_at(root.mode))
