"""The journals of a relay, one for each session: whoever waits takes no room and no turn from the others.

Upstream:   fp8watch_agent.relay
Downstream: fp8watch_agent.relay_forward, fp8watch_agent.relay_express
Shapes:     bodies of many sessions -> a folder each, under queue/
Thread:     any number append; of each session one takes away

The order of a rank is that of its journal. Between sessions there is none to keep, so a run that is refused for hours has its own
files, and those of the others are deleted as they are delivered.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Container
from heapq import merge
from pathlib import Path

from fp8watch_agent.relay_journal import POSITION, SUFFIX, Closed, DamagedEntry, Entry, Full, Journal
from fp8watch_agent.urgency import is_urgent
from fp8watch_agent.wire import decode_batch

log = logging.getLogger("fp8watch.relay")

FOLDER = "queue"
ROOM_OF_HELD = 0.75
"""Of the room, for all together: sessions that are refused take no more than this, so that others can be taken."""
IDLE_S = 600.0
"""A journal of which nothing waits is closed, and its folder deleted, after this time."""


class Journals:
    """The folder of a relay.

    Args:
        directory: exists.
        max_bytes: of what waits; beyond it `append` raises Full.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = directory / FOLDER, max_bytes
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._more = threading.Condition()
        self._of: dict[str, Journal] = {}
        self._used_at: dict[str, float] = {}
        self._num_damaged_bytes = 0
        for folder in sorted(self._folder.iterdir()):
            journal = Journal(folder, 1 << 62)
            self._num_damaged_bytes += journal.num_damaged_bytes
            if journal.close_drained():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self._of[folder.name] = journal
        self._take_over(directory)

    def _take_over(self, directory: Path) -> None:
        """Entries of an earlier relay, which kept all sessions in one journal."""
        files = sorted(directory.glob(f"*{SUFFIX}"))
        if not files:
            return
        before = Journal(directory, 1 << 62)
        self._num_damaged_bytes += before.num_damaged_bytes
        for entry in before.first(before.num_waiting):
            try:
                body = before.body(entry)
            except DamagedEntry as e:
                log.error("%s; session %s loses %d records", e, entry.session, entry.amount)
                continue
            self._journal(entry.session).append(
                entry.kind, entry.session, entry.seq, entry.amount, body, urgent=_looks_urgent(body)
            )
        before.close()
        for path in (*files, directory / POSITION):  # whoever is ended here finds them again: their keys are known
            path.unlink(missing_ok=True)

    def _journal(self, session: str) -> Journal:
        with self._more:
            self._used_at[session] = time.monotonic()
            if session not in self._of:
                folder = self._folder / session
                folder.mkdir(mode=0o700, exist_ok=True)
                self._of[session] = Journal(folder, 1 << 62)
            return self._of[session]

    def append(
        self,
        kind: int,
        session: str,
        seq: int,
        amount: int,
        body: bytes,
        *,
        urgent: bool = False,
        held: bool = False,
    ) -> Entry:
        """Write a body, and return its entry when it is on disk.

        Args:
            urgent: a broken batch.
            held: what came before it of its session is being refused.

        Raises:
            OSError: it is not; Full where there is no room.
        """
        room = int(self._max_bytes * ROOM_OF_HELD) if held else self._max_bytes
        if self.num_bytes + len(body) > room:
            raise Full(f"{self.num_bytes} bytes wait already; {room} may{' of what is refused' if held else ''}")
        while True:
            try:
                entry = self._journal(session).append(kind, session, seq, amount, body, urgent=urgent)
            except Closed:  # a moment ago, because nothing waited
                continue
            self.wake()
            return entry

    def wake(self) -> None:
        """Something else may be taken now."""
        with self._more:
            self._more.notify_all()

    def wait(self, timeout_s: float, ready: Callable[[], bool]) -> bool:
        """Wait until something holds that `append` or `wake` may have changed."""
        with self._more:
            return self._more.wait_for(ready, timeout_s)

    def _listed(self) -> list[tuple[str, Journal]]:
        with self._more:
            return list(self._of.items())

    @property
    def num_waiting(self) -> int:
        """Bodies that are not delivered."""
        return sum(journal.num_waiting for _, journal in self._listed())

    @property
    def num_bytes(self) -> int:
        """Of what waits."""
        return sum(journal.num_bytes for _, journal in self._listed())

    @property
    def num_damaged_bytes(self) -> int:
        """Bytes that were found damaged when the relay started."""
        return self._num_damaged_bytes

    @property
    def sessions(self) -> set[str]:
        """Those of which something waits."""
        return {session for session, journal in self._listed() if journal.num_waiting}

    def first(self, max_entries: int, max_bytes: int, but: Container[str] = ()) -> list[Entry]:
        """The oldest entries, those of a session in their order; at least one where there is any.

        Args:
            but: sessions whose entries are left out.
        """
        out: list[Entry] = []
        size = 0
        each = (journal.first(max_entries) for session, journal in self._listed() if session not in but)
        for entry in merge(*each, key=lambda e: e.taken_at):
            if out and (len(out) >= max_entries or size + entry.num_bytes > max_bytes):
                break
            out.append(entry)
            size += entry.num_bytes
        return out

    def first_of(self, session: str) -> Entry | None:
        """The oldest entry of a session."""
        with self._more:
            journal = self._of.get(session)
        return next(iter(journal.first(1)), None) if journal is not None else None

    def urgent(self) -> list[Entry]:
        """The broken batches that wait, the newest first."""
        found = [entry for _, journal in self._listed() for entry in journal.urgent()]
        return sorted(found, key=lambda e: e.taken_at, reverse=True)

    def waits(self, entry: Entry) -> bool:
        """Whether an entry is not delivered yet."""
        with self._more:
            journal = self._of.get(entry.session)
        return journal is not None and journal.waits(entry)

    def body(self, entry: Entry) -> bytes:
        """The body of an entry.

        Raises:
            DamagedEntry: it is not what was written, or its file is gone.
        """
        with self._more:
            journal = self._of.get(entry.session)
        if journal is None:
            raise DamagedEntry(f"nothing of session {entry.session} waits")
        return journal.body(entry)

    def advance(self, entry: Entry) -> None:
        """The oldest entry of a session is delivered, or given up."""
        with self._more:
            journal = self._of[entry.session]
        journal.advance(entry)

    def tidy(self) -> None:
        """Delete the folders of sessions that have long said nothing."""
        before = time.monotonic() - IDLE_S
        with self._more:
            for session in [s for s in self._of if self._used_at.get(s, 0.0) < before]:
                if self._of[session].close_drained():
                    del self._of[session]
                    self._used_at.pop(session, None)
                    shutil.rmtree(self._folder / session, ignore_errors=True)

    def close(self) -> None:
        """Close all files; what waits is found again."""
        for _, journal in self._listed():
            journal.close()


def _looks_urgent(body: bytes) -> bool:
    try:
        return is_urgent(decode_batch(body))
    except ValueError:  # tile maps among them
        return False
