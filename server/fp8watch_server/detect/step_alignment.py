"""Waits until the ranks have delivered a step, and hands the steps on in their order.

Shapes:     steps of one rank -> lists of them over the ranks, one list a step, ascending
Thread:     detect worker

A step goes on when every live rank has delivered it, or `late_rank_s` after the median rank did, by the clock of the
collector, never by those of the ranks. A rank is live until it missed three heartbeats. While ranks come, at the
beginning of an attempt, and come back, after nobody was heard for as long, all of the job are waited for: who registers
first would be compared with nobody. Batches that overtake each other are put back in order: a gap is waited for over a
few batches. What comes after its step went on is late: the invariants have judged it, statistics leave it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Delivered(Protocol):
    """A step of one rank."""

    @property
    def step(self) -> int:
        """Absolute optimizer step."""
        ...

    @property
    def rank(self) -> int:
        """Who delivered it."""
        ...

    @property
    def opens_batch(self) -> bool:
        """It is the first of its batch: only there can others be missing."""
        ...


D = TypeVar("D", bound=Delivered)

MAX_PENDING_STEPS = 64
MAX_PENDING_WHILE_RANKS_COME = 1024
"""Steps times ranks, where that is more: a rank sends what it has kept at once, and the next one up to half a minute later."""
GAP_BATCHES = 3
"""Batches of a rank for which a gap in its steps is waited for."""
LIVE_RANK_STEPS = 200
"""A rank this far behind the newest is gone, and holds nobody up."""
LOOK_AGAIN = 1 / 40
"""Of `late_rank_s`: how long an answer about all ranks stays good enough while one of them is missing."""


@dataclass
class _Rank:
    last_step: int = -1
    heard_at: float | None = None
    num_batches: int = 0
    ended: bool = False


@dataclass
class _Pending(Generic[D]):
    views: dict[int, D] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)  # when each rank delivered, by the collector's clock; ascending
    batches: dict[int, int] = field(default_factory=dict)  # rank -> its num_batches then
    awaited: int | None = None  # a rank that was still to come when it was last looked at
    looked_at: float | None = None  # when all ranks were last looked at, with the collector's clock


class Assembly(Generic[D]):
    """The steps of one attempt of a run that are not complete yet."""

    def __init__(self, late_rank_s: float = 10.0, silence_s: float = 30.0) -> None:
        self._late_rank_s, self._silence_s = late_rank_s, silence_s
        self._ranks: dict[int, _Rank] = {}
        self._pending: dict[int, _Pending[D]] = {}
        self.last_step: int | None = None
        self._stride = 1
        self._apart = 1
        self._now: float | None = None
        self._newest = -1  # step of any rank
        self._unheard = False  # whether a rank may be there that has no time yet
        self._num_ranks = 0  # of the job, as its ranks say
        self._heard_at: float | None = None  # when any rank was last heard
        self._ranks_come_until: float | None = None

    def restart(self) -> list[list[D]]:
        """A new attempt: hands out what is pending, whole or not, and forgets the ranks."""
        rest = [list(self._pending[s].views.values()) for s in sorted(self._pending)]
        self._pending.clear()
        self._ranks.clear()
        self.last_step, self._stride, self._apart = None, 1, 1
        self._newest = -1
        self._heard_at = self._ranks_come_until = None
        return rest

    def adopt(self, fresh: Assembly[D]) -> None:
        """Read back from a state: nothing is pending, and the limits are those of `fresh`."""
        for name in ("_num_ranks", "_heard_at", "_ranks_come_until"):  # an earlier version did not know them
            self.__dict__.setdefault(name, getattr(fresh, name))
        self._late_rank_s, self._silence_s = fresh._late_rank_s, fresh._silence_s
        self._pending = {}
        self._newest = max((s.last_step for s in self._ranks.values()), default=-1)
        self._unheard = True

    def _rank(self, rank: int) -> _Rank:
        state = self._ranks.get(rank)
        if state is None:
            state = self._ranks[rank] = _Rank()
            self._unheard = True
        return state

    def expect(self, rank: int, num_ranks: int | None = None) -> None:
        """A rank has registered, of a job of so many: its steps are waited for, as long as it may be silent."""
        self._num_ranks = num_ranks or self._num_ranks
        state = self._rank(rank)
        state.heard_at = self._now if state.heard_at is None else state.heard_at

    def heard(self, rank: int, at: float | None, *, ended: bool = False) -> None:
        """A batch of this rank came."""
        state = self._rank(rank)
        state.heard_at = at if at is not None else state.heard_at
        state.num_batches += 1
        state.ended = ended
        self.tick(at)
        now = self._now
        if at is not None and now is not None:
            if self._heard_at is None or now - self._heard_at > self._silence_s:
                self._ranks_come_until = now + self._silence_s
            self._heard_at = now

    def tick(self, at: float | None) -> None:
        """The collector's clock moved on."""
        if at is not None:
            self._now = at if self._now is None else max(self._now, at)
            if not self._unheard:
                return
            self._unheard = False
            for state in self._ranks.values():
                state.heard_at = self._now if state.heard_at is None else state.heard_at

    def add(self, view: D) -> bool:
        """Take one step of one rank in; False when it is late."""
        rank = self._rank(view.rank)
        rank.last_step = max(rank.last_step, view.step)
        self._newest = max(self._newest, view.step)
        if self.last_step is not None and view.step <= self.last_step:
            return False
        pending = self._pending.setdefault(view.step, _Pending())
        if view.rank in pending.views:
            return False
        pending.views[view.rank] = view
        pending.batches[view.rank] = rank.num_batches
        if self._now is not None:
            pending.at.append(self._now)
        return True

    def ready(self) -> Iterator[list[D]]:
        """Steps that may go on now, ascending."""
        while self._pending:
            step = min(self._pending)
            if not self._complete(step):
                return
            yield self._take(step)

    def _take(self, step: int) -> list[D]:
        if self.last_step is not None:
            apart = step - self.last_step
            if apart == self._apart:  # one gap is a gap, two alike are the sampling
                self._stride = apart
            self._apart = apart
        self.last_step = step
        return list(self._pending.pop(step).views.values())

    def _complete(self, step: int) -> bool:
        pending = self._pending[step]
        if len(self._pending) > self._max_pending():
            return True
        if self._ranks_come() and len(self._ranks) < self._num_ranks:
            return False
        if self._is_awaited(pending.awaited, step, pending) and not self._may_go_on_without(pending):
            return False  # of many ranks one that is missing is enough, and most often it is the same
        pending.looked_at = self._now
        waiting = [r for r in self._ranks if self._is_awaited(r, step, pending)]
        pending.awaited = waiting[-1] if waiting else None
        if not waiting and not self._is_gap(step, pending):
            return True
        if self._ranks_come() or self._now is None or not pending.at:
            return False
        num_live = len(pending.at) + len(waiting)
        if len(pending.at) * 2 < num_live:
            return False
        median_at = pending.at[max(0, (num_live + 1) // 2 - 1)]
        return self._now - median_at >= self._late_rank_s

    def _is_awaited(self, rank: int | None, step: int, pending: _Pending[D]) -> bool:
        if rank is None or rank in pending.views:
            return False
        state = self._ranks[rank]
        return state.last_step < step and self._is_live(state, self._newest)

    def _may_go_on_without(self, pending: _Pending[D]) -> bool:
        """Whether the median rank may have delivered so long ago: at the earliest the median of those that have.

        Who is missing is a question to all ranks, so it is asked again after a while, not with each batch.
        """
        if self._ranks_come() or self._now is None or not pending.at:
            return False
        if pending.looked_at is not None and 0 <= self._now - pending.looked_at < self._late_rank_s * LOOK_AGAIN:
            return False
        return self._now - pending.at[len(pending.at) // 2] >= self._late_rank_s

    def _ranks_come(self) -> bool:
        """Whether ranks of the job may still register, or find the collector again."""
        return self._now is not None and self._ranks_come_until is not None and self._now < self._ranks_come_until

    def _max_pending(self) -> int:
        if not self._ranks_come():
            return MAX_PENDING_STEPS
        return max(MAX_PENDING_STEPS, MAX_PENDING_WHILE_RANKS_COME // max(1, len(self._ranks), self._num_ranks))

    def _is_live(self, rank: _Rank, newest: int) -> bool:
        if rank.ended or self._ranks_come():
            return not rank.ended
        if rank.last_step >= 0 and rank.last_step < newest - LIVE_RANK_STEPS * self._stride:
            return False
        if self._now is None or rank.heard_at is None:
            return True
        return self._now - rank.heard_at <= self._silence_s

    def _is_gap(self, step: int, pending: _Pending[D]) -> bool:
        """Whether a batch with the steps before this one may still come. Within a batch nothing is missing."""
        if self.last_step is None or not any(v.opens_batch for v in pending.views.values()):
            return False
        apart = step - self.last_step
        later = [other for other in self._pending if other > step]
        if apart in (self._stride, self._apart) or (later and min(later) - step == apart):
            return False  # as far apart as those before, or those behind: the sampling
        return all(self._ranks[r].num_batches - n < GAP_BATCHES for r, n in pending.batches.items())
