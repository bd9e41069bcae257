"""Waits until the ranks have delivered a step, and hands the steps on in their order.

Shapes:     steps of one rank -> lists of them over the ranks, one list a step, ascending
Thread:     detect worker

A step goes on when every live rank has delivered it, or `late_rank_s` after the median rank did, by the clock of the
collector, never by those of the ranks. A rank is live until it missed three heartbeats. While ranks come, for
`late_rank_s` at the beginning of an attempt, all of the job are waited for: who registers first would be compared with
nobody. While they come back, for as long as a rank may be silent after nobody was heard for longer, each step that one of
them may still have is waited for: a rank sends its newest batch before what it has kept. Batches that overtake each other
are put back in order: a gap is waited for over a few batches. What comes after its step went on is late: the invariants
have judged it, statistics leave it out.
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

    @property
    def num_records(self) -> int:
        """How much it holds."""
        ...


D = TypeVar("D", bound=Delivered)

MAX_PENDING_STEPS, MAX_PENDING_RECORDS = 512, 1 << 18
"""A batch holds up to 256 steps, and a rank sends what it has kept at once."""
FEW_STEPS, FEW_RECORDS = 64, 1 << 22
"""So many steps may wait whatever they hold, up to so many records."""
VERY_FEW_STEPS = 8
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
    keeps: bool = False  # batches on its disk


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
        self._pending_records = 0
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
        self._ranks_come_until: float | None = None  # those that have not registered
        self._come_back_until: float | None = None  # those that have
        self._clock_behind = 0.0  # of the collector's clock: it was set back by so much

    def restart(self) -> list[list[D]]:
        """A new attempt: hands out what is pending, whole or not, and forgets the ranks."""
        rest = [list(self._pending[s].views.values()) for s in sorted(self._pending)]
        self._pending.clear()
        self._pending_records = 0
        self._ranks.clear()
        self.last_step, self._stride, self._apart = None, 1, 1
        self._newest = -1
        self._heard_at = self._ranks_come_until = self._come_back_until = None
        return rest

    def adopt(self, fresh: Assembly[D]) -> None:
        """Read back from a state: nothing is pending, and the limits are those of `fresh`."""
        for name, value in vars(fresh).items():  # an earlier version did not know all of them
            self.__dict__.setdefault(name, value)
        self._late_rank_s, self._silence_s = fresh._late_rank_s, fresh._silence_s
        self._pending, self._pending_records = {}, 0
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
        self._unheard |= state.heard_at is None  # it is heard of when the clock next moves: this one may be of long ago

    def heard(self, rank: int, at: float | None, *, ended: bool = False, keeps: bool = False) -> None:
        """A batch of this rank came.

        Args:
            at: by the collector's clock.
            ended: nothing comes behind it.
            keeps: others lie on the rank's disk, and come behind it.
        """
        state = self._rank(rank)
        state.heard_at = at if at is not None else state.heard_at
        state.num_batches += 1
        state.ended, state.keeps = ended, keeps
        self.tick(at)
        now = self._now
        if at is not None and now is not None:
            if self._heard_at is None:
                self._ranks_come_until = now + self._late_rank_s
            if keeps if self._heard_at is None else now - self._heard_at > self._silence_s:
                self._come_back_until = now + self._silence_s
            self._heard_at = now

    def tick(self, at: float | None) -> None:
        """The collector's clock moved on."""
        if at is not None:
            at += self._clock_behind
            if self._now is not None and at < self._now - self._silence_s:
                self._clock_behind += self._now - at
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
        self._pending_records += view.num_records
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
        taken = list(self._pending.pop(step).views.values())
        self._pending_records -= sum(view.num_records for view in taken)
        return taken

    @property
    def first_pending(self) -> int | None:
        """The first step that waits."""
        return min(self._pending, default=None)

    @property
    def settling(self) -> bool:
        """Whether steps wait for ranks that come, or come back."""
        return bool(self._pending) and (self._ranks_come() or self._before(self._come_back_until))

    def _complete(self, step: int) -> bool:
        pending = self._pending[step]
        if self._is_full():
            return True
        if self._ranks_come():
            return False
        if self._is_awaited(pending.awaited, step, pending) and not self._may_go_on_without(pending):
            return False  # of many ranks one that is missing is enough, and most often it is the same
        pending.looked_at = self._now
        waiting = [r for r in self._ranks if self._is_awaited(r, step, pending)]
        pending.awaited = waiting[-1] if waiting else None
        if not waiting and not self._is_gap(step, pending):
            return True
        if self._before(self._come_back_until) or self._now is None or not pending.at:
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
        if self._before(self._come_back_until):
            return not state.ended
        return state.last_step < step and self._is_live(state, self._newest)

    def _may_go_on_without(self, pending: _Pending[D]) -> bool:
        """Whether the median rank may have delivered so long ago: at the earliest the median of those that have.

        Who is missing is a question to all ranks, so it is asked again after a while, not with each batch.
        """
        if self._before(self._come_back_until) or self._now is None or not pending.at:
            return False
        if pending.looked_at is not None and 0 <= self._now - pending.looked_at < self._late_rank_s * LOOK_AGAIN:
            return False
        return self._now - pending.at[len(pending.at) // 2] >= self._late_rank_s

    def _ranks_come(self) -> bool:
        """Whether a rank of the job may still register."""
        return len(self._ranks) < self._num_ranks and self._before(self._ranks_come_until)

    def _before(self, until: float | None) -> bool:
        return self._now is not None and until is not None and self._now < until

    def _is_full(self) -> bool:
        num, records = len(self._pending), self._pending_records
        if num > FEW_STEPS:
            return num > MAX_PENDING_STEPS or records > MAX_PENDING_RECORDS
        return num > VERY_FEW_STEPS and records > FEW_RECORDS

    def _is_live(self, rank: _Rank, newest: int) -> bool:
        if rank.ended or (rank.last_step >= 0 and rank.last_step < newest - LIVE_RANK_STEPS * self._stride):
            return False
        if self._now is None or rank.heard_at is None:
            return True
        return self._now - rank.heard_at <= self._silence_s

    def _is_gap(self, step: int, pending: _Pending[D]) -> bool:
        """Whether a batch with the steps before this one may still come. Within a batch nothing is missing."""
        if self.last_step is None:
            return self._before(self._come_back_until) and any(rank.keeps for rank in self._ranks.values())
        if not any(v.opens_batch for v in pending.views.values()):
            return False
        apart = step - self.last_step
        later = [other for other in self._pending if other > step]
        if apart in (self._stride, self._apart) or (later and min(later) - step == apart):
            return False  # as far apart as those before, or those behind: the sampling
        if self._before(self._come_back_until):
            return True
        return all(self._ranks[r].num_batches - n < GAP_BATCHES for r, n in pending.batches.items())
