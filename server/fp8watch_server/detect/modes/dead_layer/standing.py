"""Weights that stand still while gradients for them are computed: mode 4, dead-layer.

Shapes:     largest and smallest tile amax of the weights [S] per step -> at most one finding
Thread:     detect worker

An update moves every element, so the largest and the smallest tile amax of a weight change in each step; bit for bit the
same in several steps in a row, after steps in which they always changed, says that updates no longer reach it: the
optimizer holds a copy. Not told of a weight in bfloat16 or float16, where small updates round to none, or that often
stood; of one that needs no gradient (it is frozen; where one operand serves dgrad and wgrad that cannot be told, and it
is information); over steps without an update, or with a learning rate that all but vanished. The step before a look decides,
for its update is what the look shows: a weight that is unfrozen in this step still stands where it stood. Of each weight one rank
is followed: many ranks merge steps into records, and the extremes of two that overlap are the same where both hold one step.

Where two looks of that time say that the weight moved as a whole (`whole`), it did not stand. A weight of one tile has one element for
both extremes, and that stands by itself behind a unit that is dead: of such a weight it must be known that all of it stood.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.modes.dead_layer.whole import WholeWeights
from fp8watch_server.detect.step_view import GRAD_OUTPUT, Mask

LOOKS = 32
"""Looks at a weight that must have moved it, before standing still says anything."""
ODD_LOOKS = 1
"""Of these, so many may have found it where it was."""
VANISHED = 0.01
"""Of the usual learning rate: what moves by less may stand still."""
REPEAT_STEPS = 8
LOW_BITS = np.uint32((1 << 13) - 1)  # of a float32, those that float16 and bfloat16 lack


class StandingWeights(Detector):
    """Weights that updates no longer reach."""

    modes = ("dead-layer",)
    between_samples = True
    parts = (WholeWeights,)

    def __init__(self, num_sites: int) -> None:
        self._last = np.full((num_sites, 2), np.nan)  # largest, smallest tile amax of the last look
        self._moved = np.zeros(num_sites, dtype=np.uint64)  # a bit a look, the newest lowest
        self._num = np.zeros(num_sites, dtype=np.int64)  # looks
        self._still = np.zeros(num_sites, dtype=np.int64)  # looks in a row at which it was where it had been
        self._since = np.full(num_sites, -1, dtype=np.int64)
        self._on = np.zeros(num_sites, dtype=np.bool_)  # it is known to stand, until it moves
        self._rank = np.full(num_sites, -1, dtype=np.int64)  # whose records are looked at
        self._whole = WholeWeights(num_sites)
        self._told = -REPEAT_STEPS
        self._named = -1  # the weight that was told first of those that stand
        self._updated = False  # the step before ended with an update
        self._needed = np.zeros((2, num_sites), dtype=np.bool_)  # in that step: needed a gradient; may have needed one

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = num_sites - len(self._num)
        if more > 0:
            fresh = StandingWeights(more)
            for name in ("_last", "_moved", "_num", "_still", "_since", "_on", "_rank"):
                setattr(self, name, np.concatenate([getattr(self, name), getattr(fresh, name)]))
            self._needed = np.concatenate([self._needed, fresh._needed], axis=1)
            self._whole.grow(fresh._whole)

    def frozen(self) -> None:
        """Baselines of sites go on."""

    def resume(self) -> None:
        """A new session: what was loaded may be what was saved."""
        self._forget()

    def _forget(self) -> None:
        self._last[:] = np.nan
        self._whole.forget(np.ones(len(self._num), dtype=np.bool_))
        self._still[:], self._since[:], self._on[:], self._rank[:] = 0, -1, False, -1
        self._updated = False

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now = ctx.now
        updated, self._updated = self._updated, not now.skipped and not _vanished(ctx)
        (needs, may_need), self._needed = self._needed, _gradients(ctx)
        self._rank = np.where(self._rank < 0, now.first_ranks(), self._rank)
        here = np.column_stack([now.of_rank(name, self._rank) for name in ("amax_max", "amax_min_nonzero")])
        looked = ctx.weights() & np.isfinite(here).all(axis=1) & ~now.nonfinite
        known = looked & np.isfinite(self._last).all(axis=1) & updated & (needs | may_need)
        same = known & (here == self._last).all(axis=1) & _of_float32(here)
        self._last[looked] = here[looked]
        self._num[known] += 1
        self._moved[known] = (self._moved[known] << np.uint64(1)) | (~same[known]).astype(np.uint64)
        self._since[known & ~same] = -1
        self._still[known & ~same] = 0
        self._on[known & ~same] = False
        begins = same & (self._still == 0)
        self._since[begins] = now.step - 1
        self._still[same] += 1
        self._whole.forget(known & ~same)
        self._whole.look(now, self._rank, same)
        long = same & (self._still >= ctx.limit.standing_looks)
        self._on |= long & self._usually_moves()
        hit = long & self._on & (((here[:, 0] != here[:, 1]) & ~self._whole.moved) | self._whole.stood)
        if self._named >= 0 and not self._on[self._named]:
            self._named = -1
        if not hit.any() or now.step - self._told < REPEAT_STEPS:
            return []
        self._told = now.step
        return [self._finding(ctx, hit & needs if np.any(hit & needs) else hit, known, sure=bool(np.any(hit & needs)))]

    def _usually_moves(self) -> Mask:
        """Weights that moved at nearly all looks before they stood. [S]"""
        before = self._moved >> np.minimum(self._still, 63).astype(np.uint64)
        bits = np.unpackbits((before & np.uint64((1 << LOOKS) - 1)).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
        known = (self._num - self._still >= LOOKS) & (self._still <= 64 - LOOKS)  # a longer rest has pushed them out
        return np.asarray(known & (bits >= LOOKS - ODD_LOOKS))

    def _finding(self, ctx: Context, hit: Mask, known: Mask, *, sure: bool) -> Finding:
        now = ctx.now
        rows = now.in_flow(hit)
        self._named = int(rows[0]) if self._named not in rows else self._named
        rows = np.concatenate([[self._named], rows[rows != self._named]])  # what is found later is of the same incident
        row, since = int(rows[0]), int(self._since[rows].min())
        moving = int(np.count_nonzero(known & (self._still == 0)))
        evidence = [
            Evidence("standing_weights", len(rows), 0, f"of {int(np.count_nonzero(known))} weights", since),
            Evidence("amax_max", float(f"{now.column('amax_max')[row]:.6g}"), "changes in each step", "x", since),
            Evidence("moving_weights", moving, None, "weights", now.step),
        ]
        if (lr := now.scalar("lr")) is not None:
            evidence.append(Evidence("lr", lr, ctx.schedule.usual_lr, "", now.step))
        if (norm := now.scalar("grad_norm")) is not None:
            evidence.append(Evidence("grad_norm", float(f"{norm:.4g}"), None, "", now.step))
        return now.finding(
            "dead-layer", "warning" if sure else "info", rows, evidence, "shared", which="standing", began=since,
            not_before=since, num_moving=moving, sure=sure, tokens=None,
        )  # fmt: skip


def _of_float32(amax: npt.NDArray[np.float64]) -> Mask:
    """Weights whose largest or smallest tile amax no 16-bit format holds: an update is not lost in their rounding. [S, 2] -> [S]"""
    bits = amax.astype(np.float32).view(np.uint32)
    return np.asarray(((bits & LOW_BITS) != 0).any(axis=1))


def _vanished(ctx: Context) -> bool:
    """Whether the learning rate of this step is next to nothing; False where it is not known."""
    lr, usual = ctx.now.scalar("lr"), ctx.schedule.usual_lr
    return lr is not None and (lr <= 0 or (usual is not None and lr < VANISHED * usual))


def _gradients(ctx: Context) -> Mask:
    """Sites of modules whose wgrad was computed in this step, and of those where one operand serves dgrad and wgrad, so that a
    frozen weight cannot be told; of gradients that are not zero. [2, S]"""
    table, amax = ctx.now.table, ctx.now.column("amax_max")
    gradient = table.role == GRAD_OUTPUT
    apart = np.isin(table.module, table.module[gradient & ~table.rowwise])
    by_wgrad: npt.NDArray[np.int64] = table.module[gradient & ~table.rowwise & (amax > 0)]
    by_any: npt.NDArray[np.int64] = table.module[gradient & (amax > 0)]
    return np.stack([np.isin(table.module, by_wgrad), ~apart & np.isin(table.module, by_any)])
