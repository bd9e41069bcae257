"""What a relay has taken of one session and no collector has acknowledged yet: files on disk, written before it is answered.

Shapes:     bodies of a session -> frames in numbered files; a position up to which they were delivered
Thread:     any number append, one advances

Each frame has a CRC over its header and one over its payload. A file that was cut or damaged is read as far as it is
intact. The position is written after delivery: what a crash makes the relay send twice has the same key and the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

SUFFIX = ".relay"
POSITION = "delivered"
FILE_BYTES = 1 << 20
DRAINED_BYTES = 256 << 10
"""A file of which nothing waits is given up from this size on."""
_MAGIC = b"FP8R"
_FIRST_HEAD = "<4sBBHQIII"  # magic, version, kind, bytes of the session, seq, amount, bytes of the body, CRC
_HEADS = {1: struct.Struct(_FIRST_HEAD), 2: struct.Struct(_FIRST_HEAD + "d")}  # from 2 on: when it was taken
VERSION = 2
_URGENT = 0x80
"""Bit of the kind, from version 2 on."""
_HEAD_CRC = struct.Struct("<I")


class Full(OSError):
    """The journal has no room: nothing was taken."""


class Closed(Exception):
    """The journal was closed: nothing was taken."""


class DamagedEntry(Exception):
    """The bytes of an entry are not what was written."""


@dataclass(frozen=True)
class Entry:
    """A body that waits. `file`, `at` and `num_bytes` say where its frame lies, `body_at` where the body begins in it."""

    kind: int
    session: str
    seq: int
    amount: int
    file: int
    at: int
    num_bytes: int
    body_at: int
    taken_at: float  # seconds since 1970; 0: an earlier relay did not write it
    urgent: bool


class Journal:
    """A folder. Its first file is made when something is taken.

    Args:
        directory: exists.
        max_bytes: of what waits; beyond it `append` raises Full. The files may have FILE_BYTES more.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._waiting: deque[Entry] = deque()
        self._sizes: dict[int, int] = {}
        self._fd = -1
        self._written = self._synced = 0
        self._closed = False
        self.num_damaged_bytes = 0
        done_file = self._read_all()
        self._num_bytes = sum(entry.num_bytes for entry in self._waiting)
        self._file = max(self._sizes, default=done_file)  # the last one; the next is opened to write
        if not self._waiting:
            self._forget(self._file + 1)

    def _path(self, file: int) -> Path:
        return self._directory / f"{file:08d}{SUFFIX}"

    def _read_all(self) -> int:
        """Find what waits; returns the file of the last delivery."""
        done_file, done_at = self._position()
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            file = int(path.name.removesuffix(SUFFIX))
            if file < done_file:
                path.unlink(missing_ok=True)
                continue
            raw = path.read_bytes()
            self._sizes[file] = len(raw)
            at = done_at if file == done_file else 0
            while at < len(raw):
                entry = _entry_at(raw, file, at)
                if entry is None:
                    following = raw.find(_MAGIC, at + 1)
                    self.num_damaged_bytes += (len(raw) if following < 0 else following) - at
                    at = len(raw) if following < 0 else following
                    continue
                self._waiting.append(entry)
                at += entry.num_bytes
        return done_file

    def _forget(self, keep: int) -> None:
        """Delete files before one. Which one cannot be deleted is tried again the next time."""
        for file in [f for f in self._sizes if f < keep]:
            with contextlib.suppress(OSError):
                self._path(file).unlink(missing_ok=True)
                del self._sizes[file]

    def _position(self) -> tuple[int, int]:
        try:
            file, at = (self._directory / POSITION).read_text().split()
            return int(file), int(at)
        except (OSError, ValueError):  # nothing was delivered, or it is delivered once more
            return 0, 0

    def _open(self, file: int) -> None:
        fd = os.open(self._path(file), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            folder = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:  # the next one that is opened has this name again
            os.close(fd)
            self._path(file).unlink(missing_ok=True)
            raise
        self._close()
        self._fd, self._file = fd, file
        self._sizes[file] = 0

    def _close(self) -> None:
        """Close the file that is written to, once: after an error, too, its number may be that of another file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # what was answered for is on disk
                os.close(fd)

    @property
    def num_waiting(self) -> int:
        """Bodies that are not delivered."""
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Of what waits."""
        return self._num_bytes

    def append(self, kind: int, session: str, seq: int, amount: int, body: bytes, *, urgent: bool = False) -> Entry:
        """Write a body, and return its entry when it is on disk.

        Raises:
            OSError: it is not; Full where there is no room.
            Closed: the journal was closed.
        """
        name, now = session.encode(), time.time()
        payload = name + body
        marked = kind | (_URGENT if urgent else 0)
        fields = (VERSION, marked, len(name), seq, amount, len(body), zlib.crc32(payload), now)
        head = _HEADS[VERSION].pack(_MAGIC, *fields)
        raw = head + _HEAD_CRC.pack(zlib.crc32(head)) + payload
        with self._lock:
            if self._closed:
                raise Closed(str(self._directory))
            if self._fd < 0:
                self._open(self._file + 1)
            elif self._sizes[self._file] >= FILE_BYTES:
                self._sync()
                self._open(self._file + 1)
            if self._num_bytes + len(raw) > self._max_bytes:
                raise Full(f"{self._max_bytes} bytes wait already")
            at = self._sizes[self._file]
            written = 0
            try:
                while written < len(raw):
                    written += os.pwrite(self._fd, raw[written:], at + written)
            except OSError:
                os.ftruncate(self._fd, at)
                raise
            self._sizes[self._file] = at + len(raw)
            self._written += len(raw)
            mine = self._written
            body_at = len(raw) - len(body)
            entry = Entry(kind, session, seq, amount, self._file, at, len(raw), body_at, now, urgent)
            self._waiting.append(entry)
            self._num_bytes += len(raw)
        with self._sync_lock:  # one fsync for all that were written while the last one went on
            if self._synced < mine:
                with self._lock:
                    fd, upto = os.dup(self._fd) if self._fd >= 0 else -1, self._written
                if fd >= 0:  # else all of it has been delivered meanwhile
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)
                self._synced = max(self._synced, upto)
        return entry

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced = self._written

    def first(self, max_entries: int) -> list[Entry]:
        """The oldest entries."""
        with self._lock:
            return list(islice(self._waiting, max_entries))

    def urgent(self) -> list[Entry]:
        """The broken batches that wait."""
        with self._lock:
            return [entry for entry in self._waiting if entry.urgent]

    def waits(self, entry: Entry) -> bool:
        """Whether an entry is not delivered yet."""
        with self._lock:
            return bool(self._waiting) and (entry.file, entry.at) >= (self._waiting[0].file, self._waiting[0].at)

    def body(self, entry: Entry) -> bytes:
        """The body of an entry.

        Raises:
            DamagedEntry: it is not what was written, or its file is gone.
        """
        try:
            with self._path(entry.file).open("rb") as f:
                f.seek(entry.at)
                raw = f.read(entry.num_bytes)
        except FileNotFoundError:
            raw = b""
        if _entry_at(raw, entry.file, 0) is None:
            raise DamagedEntry(f"{self._path(entry.file)}: damaged at {entry.at}")
        return raw[entry.body_at :]

    def advance(self, last: Entry) -> None:
        """The entries up to this one are delivered, or given up. A full disk is no error."""
        with self._lock:
            place = (last.file, last.at)
            while self._waiting and (self._waiting[0].file, self._waiting[0].at) <= place:
                self._num_bytes -= self._waiting.popleft().num_bytes
            if not self._waiting and self._fd >= 0 and self._sizes[self._file] >= DRAINED_BYTES:
                self._close()
                self._forget(self._file + 1)
            self._forget(self._waiting[0].file if self._waiting else self._file)
            part = self._directory / f"{POSITION}.new"
            with contextlib.suppress(OSError):  # a full disk: the next relay sends some of it again, under its keys
                part.write_text(f"{last.file} {last.at + last.num_bytes}")
                os.replace(part, self._directory / POSITION)

    def close_drained(self) -> bool:
        """Close it if nothing waits: nothing more is taken then, and its files may go."""
        with self._lock:
            self._closed = not self._waiting
        if self._closed:
            self.close()
        return self._closed

    def close(self) -> None:
        """Close the file; what waits is found again."""
        with self._lock:
            self._closed = True
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.fsync(self._fd)
            self._close()


def _entry_at(raw: bytes, file: int, at: int) -> Entry | None:
    layout = _HEADS.get(raw[at + 4]) if at + 4 < len(raw) else None
    if layout is None or at + layout.size + _HEAD_CRC.size > len(raw):
        return None
    magic, version, kind, name, seq, amount, length, crc, *rest = layout.unpack_from(raw, at)
    (head_crc,) = _HEAD_CRC.unpack_from(raw, at + layout.size)
    if magic != _MAGIC or zlib.crc32(raw[at : at + layout.size]) != head_crc:
        return None
    head = layout.size + _HEAD_CRC.size
    payload = raw[at + head : at + head + name + length]
    if len(payload) != name + length or zlib.crc32(payload) != crc:
        return None
    urgent = version > 1 and bool(kind & _URGENT)
    session, taken_at = payload[:name].decode(), rest[0] if rest else 0.0
    num_bytes = head + name + length
    return Entry(kind & ~_URGENT, session, seq, amount, file, at, num_bytes, head + name, taken_at, urgent)
