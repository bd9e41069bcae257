"""Disk spool for batches while the collector is away, in self-describing segments.

Upstream:   fp8watch_agent.sender
Shapes:     segment = frames; the first is the registration (session and sites as JSON in zstd), the rest are bodies
Thread:     sender

Each frame has a CRC over its header and one over its payload, its number in the segment, and the count of records
before it: a reader finds the next intact frame after a damaged one and knows what was lost. At the cap the oldest
segment without failures is deleted, then the oldest; its records are counted.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zstandard

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.session import Registration, decode_registration, encode_registration
from fp8watch_agent.wire import WireError, decompress

MAGIC = b"FP8WSPL\x01"
SEGMENT_SUFFIX = ".spool"
KIND_REGISTRATION = 0
FRAME = struct.Struct("<8sIIQQQQII")  # magic, kind, records, seq, number, records before, ring position, length, CRC
HEADER_CRC = struct.Struct("<I")
FRAME_BYTES = FRAME.size + HEADER_CRC.size
SEGMENT_BYTES = 4 << 20
MAX_QUARANTINED = 16


@dataclass
class SegmentContents:
    """Contents of a segment file."""

    registration: Registration | None = None
    parcels: list[Parcel] = field(default_factory=list)
    num_damaged_bytes: int = 0
    num_lost_frames: int = 0  # lost records, as later frames prove
    num_lost_records: int = 0


def pack_frame(kind: int, parcel: Parcel | None, number: int, records_before: int, payload: bytes) -> bytes:
    """Encode one frame, header and payload. `records_before`: in earlier frames of the segment."""
    amount, seq, end = (0, 0, 0) if parcel is None else (parcel.amount, parcel.seq, parcel.end)
    head = FRAME.pack(MAGIC, kind, amount, seq, number, records_before, end, len(payload), zlib.crc32(payload))
    return head + HEADER_CRC.pack(zlib.crc32(head)) + payload


def read_segment(path: Path) -> SegmentContents:
    """All intact frames of a segment, however damaged the rest of it is.

    Raises:
        OSError: the file cannot be read.
    """
    raw = path.read_bytes()
    out = SegmentContents()
    at = good_to = expected = records = 0
    while 0 <= at < len(raw):
        frame = _frame_at(raw, at)
        if frame is None:
            at = raw.find(MAGIC, at + 1)
            continue
        kind, amount, seq, number, records_before, end, payload = frame
        out.num_damaged_bytes += at - good_to
        out.num_lost_frames += max(0, number - expected)
        out.num_lost_records += max(0, records_before - records)
        expected, records = number + 1, records_before + (amount if kind == Kind.BATCH else 0)
        if kind == KIND_REGISTRATION:
            _take_registration(out, payload)
        else:
            out.parcels.append(Parcel(Kind(kind), seq, payload, amount, end))
        at += FRAME_BYTES + len(payload)
        good_to = at
    out.num_damaged_bytes += len(raw) - good_to
    return out


def _frame_at(raw: bytes, at: int) -> tuple[int, int, int, int, int, int, bytes] | None:
    if at + FRAME_BYTES > len(raw):
        return None
    magic, kind, amount, seq, number, records_before, end, length, crc = FRAME.unpack_from(raw, at)
    (header_crc,) = HEADER_CRC.unpack_from(raw, at + FRAME.size)
    if magic != MAGIC or zlib.crc32(raw[at : at + FRAME.size]) != header_crc:
        return None
    payload = raw[at + FRAME_BYTES : at + FRAME_BYTES + length]
    if len(payload) != length or zlib.crc32(payload) != crc or kind not in (KIND_REGISTRATION, *Kind):
        return None
    return kind, amount, seq, number, records_before, end, payload


def _take_registration(out: SegmentContents, payload: bytes) -> None:
    try:
        got = decode_registration(decompress(payload))
    except (WireError, msgspec.MsgspecError):
        out.num_lost_frames += 1
        return
    if out.registration is None:
        out.registration = got
    else:
        out.registration.add(got.sites())


@dataclass
class _Segment:
    path: Path
    num_bytes: int = 0
    num_frames: int = 0
    records: int = 0  # written in total
    open_records: int = 0  # neither delivered nor dropped
    open_maps: int = 0
    precious: bool = False  # holds a step with a failure


class SegmentWriter:
    """Appends frames to one segment file."""

    def __init__(self, path: Path) -> None:
        self.segment = _Segment(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def append_registration(self, registration: Registration) -> None:
        """Write the current session and sites."""
        plain = encode_registration(registration.session, registration.sites())
        self._append(KIND_REGISTRATION, None, zstandard.ZstdCompressor(level=3).compress(plain))

    def append(self, parcel: Parcel) -> None:
        """Write one body."""
        self._append(parcel.kind, parcel, parcel.body)
        self.segment.precious |= parcel.precious
        if parcel.kind == Kind.BATCH:
            self.segment.records += parcel.amount
            self.segment.open_records += parcel.amount
        else:
            self.segment.open_maps += parcel.amount

    def _append(self, kind: int, parcel: Parcel | None, payload: bytes) -> None:
        """Write one frame atomically.

        Raises:
            OSError: no room; what was begun is taken back.
        """
        s = self.segment
        raw = pack_frame(kind, parcel, s.num_frames, s.records, payload)
        written = 0
        try:
            while written < len(raw):
                written += os.write(self._fd, raw[written:])
        except OSError:
            os.ftruncate(self._fd, s.num_bytes)
            os.lseek(self._fd, s.num_bytes, os.SEEK_SET)
            raise
        s.num_bytes += len(raw)
        s.num_frames += 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def quarantine(directory: Path, session: str, parcel: Parcel, reason: str) -> None:
    """Store a refused body under `refused/`.

    Raises:
        OSError: it cannot be written.
    """
    folder = directory / "refused"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / f"{session}-{parcel.seq}-{reason}.zst").write_bytes(parcel.body)


class Spool:
    """The segments of one session, oldest first."""

    def __init__(self, directory: Path, registration: Registration, max_bytes: int) -> None:
        self._directory = directory
        self._registration = registration
        self._max_bytes = max_bytes
        self._segment_bytes = min(SEGMENT_BYTES, max(max_bytes // 4, 4096))
        self._segments: list[_Segment] = []
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
        writer = SegmentWriter(self._directory / name)
        try:
            self._write_registration(writer)
        except OSError:
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
        if self._writer is not None:
            self._writer.close()
            self._writer = None

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
            self._seal()
        counts[0] += segment.open_records
        counts[1] += segment.open_maps
        if place == 0:
            self._reading = None
        segment.path.unlink(missing_ok=True)
