"""Disk spool for batches while the collector is away, in self-describing segments.

Upstream:   fp8watch_agent.sender
Shapes:     parcels -> segment files (fp8watch_agent.spool_segment), oldest first
Thread:     sender

At the cap the oldest segment without failures is deleted, then the oldest; its records are counted.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.session import Registration
from fp8watch_agent.spool_segment import FRAME_BYTES, SEGMENT_SUFFIX, Segment, SegmentWriter, quarantine, read_segment

SEGMENT_BYTES = 4 << 20
MAX_QUARANTINED = 16


class Spool:
    """The segments of one session, oldest first."""

    def __init__(self, directory: Path, registration: Registration, max_bytes: int) -> None:
        self._directory = directory
        self._registration = registration
        self._max_bytes = max_bytes
        self._segment_bytes = min(SEGMENT_BYTES, max(max_bytes // 4, 4096))
        self._segments: list[Segment] = []
        self._writer: SegmentWriter | None = None
        self._written_sites = 0
        self._next_segment = 0
        self._reading: list[Parcel] | None = None  # unsent frames of the oldest segment
        self.dropped_full = [0, 0]  # records, tile maps
        self.dropped_damaged = [0, 0]
        self.num_quarantined = 0

    @property
    def num_records(self) -> int:
        return sum(s.open_records for s in self._segments)

    @property
    def num_maps(self) -> int:
        return sum(s.open_maps for s in self._segments)

    @property
    def num_bytes(self) -> int:
        return sum(s.num_bytes for s in self._segments)

    def __bool__(self) -> bool:
        return bool(self._segments)

    def append(self, parcel: Parcel) -> None:
        """Store a parcel on disk.

        Raises:
            OSError: the disk is full or gone; nothing of the parcel was kept.
        """
        size = FRAME_BYTES + len(parcel.body)
        if self._writer is not None and self._writer.vanished:
            self.look_after()
        if self._writer is not None and self._writer.segment.num_bytes + size > self._segment_bytes:
            self._seal()
        while self._segments and self.num_bytes + size > self._max_bytes:
            if not self._drop_oldest(parcel):
                return
        if self._writer is None:
            self._open()
        writer = self._writer
        if writer is None:
            raise OSError("no segment")
        if self._written_sites < len(self._registration):
            self._write_registration(writer)
        writer.append(parcel)

    def look_after(self) -> bool:
        """Write the newest segment anew where somebody has deleted it, and count those that are gone for good.

        Returns:
            Whether any was deleted.

        Raises:
            OSError: it cannot be written; it is tried again the next time.
        """
        gone = [segment for segment in self._segments if not segment.path.exists()]
        for segment in gone:
            if self._writer is not None and self._writer.segment is segment:
                self._writer.restore()
            else:
                self._give_up(self._segments.index(segment), self.dropped_damaged)
        return bool(gone)

    def peek(self) -> Parcel | None:
        """The oldest parcel on disk; None when there is none."""
        while self._segments:
            oldest = self._segments[0]
            if self._reading is None:
                if self._writer is not None and self._writer.segment is oldest:
                    self._seal()
                try:
                    self._reading = read_segment(oldest.path).parcels
                except OSError:
                    self._reading = []
            if self._reading:
                return self._reading[0]
            self._finish_oldest()
        return None

    def advance(self) -> None:
        """Remove the parcel that `peek` returned, after delivery or final refusal."""
        if self._reading and self._segments:
            parcel, oldest = self._reading.pop(0), self._segments[0]
            if parcel.kind == Kind.BATCH:
                oldest.open_records -= parcel.amount
            else:
                oldest.open_maps -= parcel.amount
            if not self._reading:
                self._finish_oldest()

    def quarantine(self, parcel: Parcel, reason: str) -> None:
        """Keep a few refused bodies for debugging."""
        if self.num_quarantined < MAX_QUARANTINED:
            self.num_quarantined += 1
            quarantine(self._directory, self._registration.session.session, parcel, reason)

    def close(self) -> None:
        self._seal()

    def _open(self) -> None:
        name = f"{self._registration.session.session}-{self._next_segment:06d}{SEGMENT_SUFFIX}"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have deleted it
        writer = SegmentWriter(self._directory / name)
        try:
            self._write_registration(writer)
        except OSError:
            with contextlib.suppress(OSError):
                writer.close()
            writer.segment.path.unlink(missing_ok=True)
            raise
        self._next_segment += 1
        self._writer = writer
        self._segments.append(writer.segment)

    def _write_registration(self, writer: SegmentWriter) -> None:
        count = len(self._registration)
        writer.append_registration(self._registration)
        self._written_sites = count

    def _seal(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _drop_oldest(self, parcel: Parcel) -> bool:
        """Make room by deleting the oldest segment without failures. When all have failures: the parcel itself is
        dropped, or, when it has failures too, the oldest segment. False when the parcel was dropped.
        """
        place = next((i for i, s in enumerate(self._segments) if not s.precious), None)
        if place is None and not parcel.precious:
            self.dropped_full[parcel.kind != Kind.BATCH] += parcel.amount
            return False
        self._give_up(place or 0, self.dropped_full)
        return True

    def _finish_oldest(self) -> None:
        self._give_up(0, self.dropped_damaged)  # only unreadable records are left in it

    def _give_up(self, place: int, counts: list[int]) -> None:
        segment = self._segments.pop(place)
        if self._writer is not None and self._writer.segment is segment:
            with contextlib.suppress(OSError):  # the file goes
                self._seal()
        counts[0] += segment.open_records
        counts[1] += segment.open_maps
        if place == 0:
            self._reading = None
        segment.path.unlink(missing_ok=True)
