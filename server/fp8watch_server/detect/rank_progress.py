"""How far the ranks of a run are: the sessions of each, the steps that they have reached, the steps between two of them.

Shapes:     streams of sessions -> the step that every live rank has delivered
Thread:     detect worker

Asked for with each batch, so nothing here goes over all ranks but `of`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp8watch_server.detect.finding import LEFT_OUT, Notice
from fp8watch_server.detect.session_state import Stream
from fp8watch_server.detect.step_alignment import LIVE_RANK_STEPS
from fp8watch_server.detect.tallies import Tally


class RankProgress:
    """Of one run."""

    def __init__(self) -> None:
        self._sessions: dict[int, list[str]] = {}  # of each rank, the one that came last at the end
        # Where a rank has restarted, what the others said before is of the attempt that ended: it may be far ahead.
        self._reached = Tally()  # of each rank that was heard since, its last step
        self._strides = Tally()  # of each session
        self._left_out: dict[str, Notice] = {}  # of each session, since it was last asked

    @classmethod
    def of(cls, streams: Mapping[str, Stream], restarted: int) -> RankProgress:
        """Rebuilt from streams. `restarted`: number of the batch with which a rank last came back."""
        made = cls()
        for name, stream in streams.items():
            made.begin(name, stream)
        for name, stream in streams.items():
            if made.is_newest(name, stream.rank) and stream.heard >= restarted:
                made.heard(name, stream)
        return made

    def begin(self, name: str, stream: Stream, *, newest: bool = True) -> None:
        """A session has come; one that is known begins anew. `newest`: no session of its rank came after it."""
        names = self._sessions.setdefault(stream.rank, [])
        if name not in names:
            names.insert(len(names) - (not newest), name)
        self._strides.put(name, stream.stride)

    def heard(self, name: str, stream: Stream) -> None:
        """A session has sent something, or gone on."""
        self._strides.put(name, stream.stride)
        if stream.last_step is not None and self.is_newest(name, stream.rank):
            self._reached.put(stream.rank, stream.last_step)

    def left_out(self, name: str, rank: int, step: int) -> None:
        """A step of a session came when those behind it were judged: no statistic has seen it."""
        known = self._left_out.get(name)
        last, num = (step, 1) if known is None else (max(known.step, step), known.num + 1)
        text = f"{num} of its steps came too late for statistics and for comparing ranks, the last of them step {last}"
        self._left_out[name] = Notice(LEFT_OUT, last, rank, text, name, num)

    def take_left_out(self) -> list[Notice]:
        """Steps that were left out since the last call, a line for each session."""
        out, self._left_out = list(self._left_out.values()), {}
        return out

    def is_newest(self, name: str, rank: int) -> bool:
        """Whether no session of the rank came after this one."""
        return self._sessions[rank][-1] == name

    def sessions(self, rank: int) -> list[str]:
        """Sessions of a rank, the newest at the end."""
        return self._sessions.get(rank, [])

    def forget(self, name: str, rank: int) -> None:
        """A session says no more."""
        self._sessions[rank].remove(name)
        self._strides.drop(name)

    def restart(self) -> None:
        """A rank has come back: who has said nothing since is not waited for."""
        self._reached.clear()

    @property
    def settled(self) -> int | None:
        """The last step that every live rank has delivered."""
        last = self._reached.numbers
        return min((n for n in last if n >= max(last) - LIVE_RANK_STEPS * self.stride), default=None)

    @property
    def stride(self) -> int:
        """Steps between observed steps, the most of any session."""
        return max(self._strides.numbers, default=1)
