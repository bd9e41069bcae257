"""Scalars that people log, against their own past and against the bands of known names: mode 25, scalar-shift.

Shapes:     `watch.log(**anything)` -> a step's findings: of what is no number, and of what left its band
Thread:     detect worker

Three rules hold for every name. A value that is not finite, of a name that always was. A level shift: six values in a
row, on one side, further from the usual than eight of its spreads and than twice the furthest of the last 32; or twelve on a level
further from the 32 before than ever (`levels`). Growth by three octaves over 128 values. Rewards, entropies and losses of RL trend and spike in health, so all but the first are
information; a warning needs a known name (`known_names`). What a name said is told once for each level that it reaches,
after which the new level is the usual one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fp8watch_agent.batch_names import CONCENTRATION, COPIES, HASH, MASK, SCORED, SHIFTS, TARGETS
from fp8watch_agent.experts import CHECKED_EXPERT, CHECKED_PRODUCT, NONFINITE_EXPERT, NONFINITE_EXPERT_ROW
from fp8watch_agent.fault_names import WHY
from fp8watch_agent.nonfinite_names import NONFINITE_INPUT
from fp8watch_agent.training_names import OPTIMIZER, SEES_AHEAD
from fp8watch_agent.update_names import RECOMPUTED
from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding, Severity
from fp8watch_server.detect.hysteresis import Latch
from fp8watch_server.detect.modes.scalar_shift.known_names import Known, known, may_grow
from fp8watch_server.detect.modes.scalar_shift.levels import Levels

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

MAX_NAMES = 512
OF_BATCHES = (HASH, MASK, SCORED, CONCENTRATION, TARGETS, COPIES, *SHIFTS.values())
OTHERS_DETECT = (
    "max_attention_logit",
    "checkpoint_saved",
    CHECKED_EXPERT,
    CHECKED_PRODUCT,
    NONFINITE_EXPERT,
    NONFINITE_EXPERT_ROW,
    NONFINITE_INPUT,
    OPTIMIZER,
    RECOMPUTED,
    SEES_AHEAD,
    WHY,
    *OF_BATCHES,
)
"""Logged names that have a detector of their own."""
IN_A_ROW = 6
MIN_VALUES = 16
"""Values of a name before it is judged by a band; a shift needs a full window of 32."""
SPREAD_SHARE = 0.01
"""Of the usual value: the smallest spread that is believed."""
LONG_EACH = 4
"""Every fourth value goes into the long window: 32 of them see 128."""
COLLAPSED = 10.0
"""Times the least value that a name must have been, before falling under it says anything."""
MAX_EVIDENCE = 8


@dataclass(frozen=True)
class _Hit:
    name: str
    why: str  # nonfinite | band | shift | level | growth
    severity: Severity
    value: float
    usual: float
    since: int
    weight: float  # the largest is named


class ScalarShifts(Detector):
    """Every name that was logged."""

    modes = ("scalar-shift",)
    between_samples = True
    parts = (Levels,)

    def __init__(self, num_sites: int = 0) -> None:
        self._levels = Levels()
        self._row: dict[str, int] = {}
        self._usual = Baseline(0)
        self._long = Baseline(0)
        self._num = np.zeros(0, dtype=np.int64)  # finite values so far
        self._odd = np.zeros(0, dtype=np.bool_)  # it was not finite among its first values: so it is in health
        self._broken = np.zeros(0, dtype=np.int64)  # step since which it is not finite, −1 while it is
        self._in_a_row = np.zeros(0, dtype=np.int64)  # beyond the usual: +n above, −n below
        self._since = np.zeros(0, dtype=np.int64)  # step of the first of them
        self._last = np.zeros((0, IN_A_ROW))
        self._band = Latch(0, 3, 5)
        self._whole = np.zeros(0, dtype=np.bool_)  # every value was a whole number: a count or a setting

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Its own series only."""

    def resume(self) -> None:
        """What is usual stays; what was on in the attempt before is over."""
        self._in_a_row[:], self._broken[:] = 0, -1
        self._band.forget()

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        logs = {n: v for n, v in ctx.now.logs.items() if not n.startswith(OTHERS_DETECT)}
        if not logs:
            return []
        self._add(logs)
        names = list(self._row)
        value = np.full(len(names), np.nan)
        given = np.zeros(len(names), dtype=np.bool_)
        for name, v in logs.items():
            if (row := self._row.get(name)) is not None:
                value[row], given[row] = v, True
        finite = np.isfinite(value)
        hits = self._nonfinite(names, value, given & ~finite, ctx.now.step)
        self._broken[finite] = -1
        judged = self._judged(ctx, names, np.where(finite, value, np.nan))
        return [self._finding(ctx, of_kind) for of_kind in (hits, judged) if of_kind]

    def _add(self, logs: dict[str, float]) -> None:
        fresh = [name for name in logs if name not in self._row][: MAX_NAMES - len(self._row)]
        if not fresh:
            return
        for name in fresh:
            self._row[name] = len(self._row)
        more, total = len(fresh), len(self._row)
        self._usual.grow(total)
        self._long.grow(total)
        self._band.grow(total)
        self._levels.grow(total)
        for name in ("_num", "_in_a_row"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, dtype=np.int64)]))
        for name in ("_broken", "_since"):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(more, -1, dtype=np.int64)]))
        self._odd = np.concatenate([self._odd, np.zeros(more, dtype=np.bool_)])
        self._whole = np.concatenate([self._whole, np.ones(more, dtype=np.bool_)])
        self._last = np.concatenate([self._last, np.full((more, IN_A_ROW), np.nan)])

    def _nonfinite(self, names: list[str], value: Floats, bad: Mask, step: int) -> list[_Hit]:
        """A value that is no number, of a name that always had one. Means over nothing are NaN in health."""
        self._odd |= bad & (self._num < MIN_VALUES)
        fresh = bad & ~self._odd
        self._broken[fresh & (self._broken < 0)] = step
        usual = self._usual.median()
        return [
            _Hit(names[i], "nonfinite", "warning", float(value[i]), float(usual[i]), int(self._broken[i]), math.inf)
            for i in np.flatnonzero(fresh)
        ]

    def _judged(self, ctx: Context, names: list[str], value: Floats) -> list[_Hit]:
        step, usual = ctx.now.step, self._usual.median()
        spread = self._usual.spread(SPREAD_SHARE * np.abs(np.nan_to_num(usual)))
        hits = self._banded(names, value, usual, step)
        shifted = self._shifted(ctx, value, usual, spread)
        for i in np.flatnonzero(shifted):
            about = known(names[i])
            times = about.times if about is not None else None
            rose = about is not None and times is not None and value[i] > max(about.floor, times * usual[i])
            hits.append(
                _Hit(
                    names[i], "shift", "warning" if rose else "info", float(np.median(self._last[i])), float(usual[i]),
                    int(self._since[i]), float(abs(value[i] - usual[i]) / max(float(spread[i]), 1e-300)),
                )
            )  # fmt: skip
        hits += self._grown(ctx, names, value)
        self._levels.forget(shifted)
        told = {h.name for h in hits}
        for row, level, before, since in self._levels.shifted(names, value, step):
            if names[row] not in told and not self._whole[row]:
                hits.append(_Hit(names[row], "level", "info", level, before, since, 0.0))
        self._learn(value, shifted)
        return hits

    def _banded(self, names: list[str], value: Floats, usual: Floats, step: int) -> list[_Hit]:
        """Known names outside of their band in three of five values."""
        out = np.zeros(len(names), dtype=np.bool_)
        bands: dict[int, Known] = {}
        for i in np.flatnonzero(~np.isnan(value)):
            about = known(names[i])
            if about is None or self._num[i] < 1:
                continue
            bands[int(i)] = about
            over = about.most is not None and abs(value[i]) > about.most
            under = about.least is not None and value[i] < about.least and usual[i] > COLLAPSED * about.least
            out[i] = over or under
        told = self._band.update(out, ~np.isnan(value), step)
        return [
            _Hit(names[i], "band", "warning", float(value[i]), float(usual[i]), int(self._band.since[i]), 1e6)
            for i in np.flatnonzero(told)
            if int(i) in bands
        ]

    def _shifted(self, ctx: Context, value: Floats, usual: Floats, spread: Floats) -> Mask:
        """Names that reached a new level in this step."""
        seen = ~np.isnan(value)
        self._last[seen] = np.column_stack([self._last[seen, 1:], value[seen]])
        ring = self._usual.ordered()
        full = self._usual.count >= self._usual.window
        furthest = np.full(len(value), np.nan)
        furthest[full] = np.abs(ring[full] - usual[full, None]).max(axis=1)
        away = value - usual
        with np.errstate(invalid="ignore"):
            far = full & (furthest > 0) & ~self._whole
            far &= (np.abs(away) > ctx.limit.scalar_shift_sigma * spread) & (np.abs(away) > 2 * furthest)
        side = np.where(away > 0, 1, -1)
        goes_on = far & (self._in_a_row * side > 0)
        self._since = np.where(far & ~goes_on, ctx.now.step, self._since)
        run = np.where(far, np.where(goes_on, self._in_a_row + side, side), 0)
        self._in_a_row = np.where(seen, run, self._in_a_row)
        return np.asarray(np.abs(self._in_a_row) >= IN_A_ROW) & seen

    def _grown(self, ctx: Context, names: list[str], value: Floats) -> list[_Hit]:
        """Names that grew over the long window, little by little."""
        due = ~np.isnan(value) & (self._num % LONG_EACH == 0)
        self._long.push(np.where(due, value, np.nan))
        full = due & (self._long.count >= self._long.window) & ~self._whole
        hits: list[_Hit] = []
        for i in np.flatnonzero(full):
            history = np.abs(self._long.ordered(np.arange(len(names)) == i)[0].astype(np.float64))
            first, last = float(np.median(history[:8])), float(np.median(history[-8:]))
            about = known(names[i])
            need = 2.0**ctx.limit.scalar_growth_octaves if about is None or about.times is None else about.times
            if not 0 < first * need < last or (about is not None and last < about.floor):
                continue
            if about is None and may_grow(names[i]):
                continue
            rising = np.diff(np.median(history.reshape(8, -1), axis=1)) > 0
            if np.count_nonzero(rising) < 6:
                continue
            warns: Severity = "warning" if about is not None and about.times is not None else "info"
            since = ctx.now.step - int(LONG_EACH * self._long.window)
            hits.append(_Hit(names[i], "growth", warns, last, first, max(since, 0), last / first))
            self._long.forget(np.arange(len(names)) == i)
        return hits

    def _learn(self, value: Floats, shifted: Mask) -> None:
        seen = ~np.isnan(value)
        self._num[seen] += 1
        self._whole &= ~seen | (np.floor(value) == value)
        if shifted.any():  # the new level is the usual one from here on
            self._usual.forget(shifted)
            self._long.forget(shifted)
            self._in_a_row[shifted] = 0
        # Not while it may be the beginning of a shift: six odd values would widen what is ordinary.
        self._usual.push(value, self._in_a_row == 0)

    def _finding(self, ctx: Context, hits: list[_Hit]) -> Finding:
        order = ("critical", "warning", "info")
        hits = sorted(hits, key=lambda h: (order.index(h.severity), known(h.name) is None, -h.weight, h.name))
        first = hits[0]
        evidence = [
            Evidence(h.name, _short(h.value), None if math.isnan(h.usual) else _short(h.usual), "", h.since)
            for h in hits[:MAX_EVIDENCE]
        ]
        about = known(first.name)
        found = ctx.now.finding(
            "scalar-shift",
            first.severity,
            np.zeros(0, dtype=np.int64),
            evidence,
            "unknown",
            name=first.name,
            why=first.why,
            kind="" if about is None else about.kind,
            what="" if about is None else about.what,
            bound=_bound(first, about),
            num_names=len(hits),
            news=tuple(evidence),
            began=first.since,
            not_before=first.since if first.why != "growth" else None,
        )
        return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _bound(hit: _Hit, about: Known | None) -> float | None:
    """The edge of its band that it crossed."""
    if hit.why != "band" or about is None:
        return None
    return about.most if about.most is not None else about.least
