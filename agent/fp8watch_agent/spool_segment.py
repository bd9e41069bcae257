"""One file of the disk spool: bodies that explain themselves, read back however damaged the file is.

Shapes:     segment = frames; the first is the registration (session and sites as JSON in zstd), the rest are bodies
Thread:     sender; `fp8watch sync` reads those of dead processes

Each frame has a CRC over its header and one over its payload, its number in the segment, and the count of records
before it: a reader finds the next intact frame after a damaged one and knows what was lost. A header that is whole tells
what is lost with a payload that is not.
"""

from __future__ import annotations

import contextlib
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
REFUSED_FOLDER = "refused"
KIND_REGISTRATION = 0
FRAME = struct.Struct("<8sIIQQQQII")  # magic, kind, records, seq, number, records before, ring position, length, CRC
HEADER_CRC = struct.Struct("<I")
FRAME_BYTES = FRAME.size + HEADER_CRC.size


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


@dataclass(frozen=True)
class _Frame:
    kind: int
    amount: int
    seq: int
    number: int
    records_before: int
    end: int
    payload: bytes | None  # None: damaged, or cut off

    @property
    def num_records(self) -> int:
        return self.amount if self.kind == Kind.BATCH else 0


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
        out.num_lost_frames += max(0, frame.number - expected)
        out.num_lost_records += max(0, frame.records_before - records)
        expected, records = frame.number + 1, frame.records_before + frame.num_records
        if frame.payload is None:  # its header says what is lost with it
            out.num_lost_frames += 1
            out.num_lost_records += frame.num_records
            at = raw.find(MAGIC, at + 1)
            continue
        out.num_damaged_bytes += at - good_to
        if frame.kind == KIND_REGISTRATION:
            _take_registration(out, frame.payload)
        else:
            out.parcels.append(Parcel(Kind(frame.kind), frame.seq, frame.payload, frame.amount, frame.end))
        at += FRAME_BYTES + len(frame.payload)
        good_to = at
    out.num_damaged_bytes += len(raw) - good_to
    return out


def _frame_at(raw: bytes, at: int) -> _Frame | None:
    if at + FRAME_BYTES > len(raw):
        return None
    magic, kind, amount, seq, number, records_before, end, length, crc = FRAME.unpack_from(raw, at)
    (header_crc,) = HEADER_CRC.unpack_from(raw, at + FRAME.size)
    if magic != MAGIC or zlib.crc32(raw[at : at + FRAME.size]) != header_crc:
        return None
    if kind not in (KIND_REGISTRATION, *Kind):
        return None
    payload = raw[at + FRAME_BYTES : at + FRAME_BYTES + length]
    whole = len(payload) == length and zlib.crc32(payload) == crc
    return _Frame(kind, amount, seq, number, records_before, end, payload if whole else None)


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
class Segment:
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
        self.segment = Segment(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

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

    @property
    def vanished(self) -> bool:
        """Whether somebody has deleted the file."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def restore(self) -> None:
        """Write a deleted file anew, out of what the open descriptor still holds, and go on in the new one.

        Raises:
            OSError: it cannot be written; nothing has changed.
        """
        path = self.segment.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            while at < self.segment.num_bytes:
                at += os.write(fd, os.pread(self._fd, min(1 << 20, self.segment.num_bytes - at), at))
        except OSError:
            with contextlib.suppress(OSError):
                os.close(fd)
            path.unlink(missing_ok=True)
            raise
        deleted, self._fd = self._fd, fd
        with contextlib.suppress(OSError):  # nobody needs it any more
            os.close(deleted)

    def close(self) -> None:
        """Close the file, once: after an error, too, its number may be that of another file.

        Raises:
            OSError: what was written may not be on disk.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def quarantine(directory: Path, session: str, parcel: Parcel, reason: str) -> None:
    """Store a refused body under `refused/`.

    Raises:
        OSError: it cannot be written.
    """
    folder = directory / REFUSED_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / f"{session}-{parcel.seq}-{reason}.zst").write_bytes(parcel.body)
