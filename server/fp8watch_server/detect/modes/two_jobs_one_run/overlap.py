"""Sessions of one rank that are at work at the same time.

Shapes:     batches of a run -> the session that another one works beside
Thread:     detect worker

A session is at work while its steps come about as fast as they are made: the collector's clock and that of the process
move on alike. So it does not matter what either clock says, and what `fp8watch sync` sends of a session that has ended
does not count, because that comes faster. Nothing of this is saved: after a restart of the collector it is seen anew.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from fp8watch_agent.wire import Batch

OVERLAP_S = 20.0
"""For so long both must have been at work: a job that ends while its successor starts has less."""
NUM_BATCHES = 3
MIN_PACE, MAX_PACE = 0.5, 2.0
"""Seconds of the process that may pass in one of the collector's."""
SILENCE_S = 30.0
MAX_SESSIONS = 4  # of a rank
MAX_HEARD = 64  # batches of a session


@dataclass(frozen=True)
class Beside:
    """The session beside the one that has just sent."""

    session: str
    since_step: int  # of the one that has just sent
    seconds: float


@dataclass(frozen=True)
class _Heard:
    at: float
    made_at: float
    step: int


class Overlap:
    """What was heard of late, by rank and session."""

    def __init__(self) -> None:
        self._heard: dict[int, OrderedDict[str, deque[_Heard]]] = {}

    def observe(self, batch: Batch, at: float | None) -> Beside | None:
        """A batch came, at a time of the collector's clock."""
        h = batch.header
        if at is None or not len(batch.steps) or not math.isfinite(made_at := float(batch.steps["time"][-1])):
            return None
        of_rank = self._heard.setdefault(h.rank, OrderedDict())
        mine = of_rank.setdefault(h.session, deque(maxlen=MAX_HEARD))
        mine.append(_Heard(at, made_at, int(batch.steps["step"][-1])))
        of_rank.move_to_end(h.session)
        if len(of_rank) > MAX_SESSIONS:
            of_rank.popitem(last=False)
        for session, heard in reversed(of_rank.items()):
            if session == h.session or at - heard[-1].at > SILENCE_S:
                continue
            since = max(mine[0].at, heard[0].at)
            both = [[x for x in entries if x.at >= since] for entries in (mine, heard)]
            if all(map(_at_work, both)):
                return Beside(session, both[0][0].step, at - since)
        return None


def _at_work(heard: list[_Heard]) -> bool:
    if len(heard) < NUM_BATCHES:
        return False
    took_s = heard[-1].at - heard[0].at
    return took_s >= OVERLAP_S and MIN_PACE <= (heard[-1].made_at - heard[0].made_at) / took_s <= MAX_PACE
