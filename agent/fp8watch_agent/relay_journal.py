"""What a relay has taken and the collector has not acknowledged yet: files on disk, written before anything is answered.

Upstream:   fp8watch_agent.relay
Downstream: fp8watch_agent.relay_forward, fp8watch_agent.relay_express
Shapes:     bodies with their session -> frames in numbered files; a position up to which they were delivered
Thread:     any number append, one reads

Each frame has a CRC over its header and one over its payload. A file that was cut or damaged is read as far as it is
intact. The position is written after delivery: what a crash makes the relay send twice has the same key and the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".relay"
POSITION = "delivered"
FILE_BYTES = 16 << 20
_MAGIC = b"FP8R"
_HEAD = struct.Struct("<4sBBHQIII")  # magic, version, kind, bytes of the session, seq, amount, bytes of the body, CRC
_HEAD_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _HEAD_CRC.size


class Full(OSError):
    """The journal has no room: nothing was taken."""


class DamagedEntry(Exception):
    """The bytes of an entry are not what was written."""


@dataclass(frozen=True)
class Entry:
    """A body that waits. `file`, `at` and `num_bytes` say where its frame lies."""

    kind: int
    session: str
    seq: int
    amount: int
    file: int
    at: int
    num_bytes: int


class Journal:
    """The folder of a relay.

    Args:
        directory: exists.
        max_bytes: of all files; beyond it `append` raises Full.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._waiting: deque[Entry] = deque()
        self._sizes: dict[int, int] = {}
        self._fd = -1
        self._written = self._synced = 0
        self.num_damaged_bytes = 0
        done_file = self._read_all()
        self._open(max(self._sizes, default=done_file) + 1)
        if not self._waiting:
            self._forget(self._file)

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
        """Delete files before one."""
        for file in [f for f in self._sizes if f < keep]:
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
        folder = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._file = fd, file
        self._sizes[file] = 0

    @property
    def num_waiting(self) -> int:
        """Bodies that are not delivered."""
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        with self._lock:
            return sum(self._sizes.values())

    def append(self, kind: int, session: str, seq: int, amount: int, body: bytes) -> Entry:
        """Write a body, and return its entry when it is on disk.

        Raises:
            OSError: it is not; Full where there is no room.
        """
        name = session.encode()
        payload = name + body
        head = _HEAD.pack(_MAGIC, 1, kind, len(name), seq, amount, len(body), zlib.crc32(payload))
        raw = head + _HEAD_CRC.pack(zlib.crc32(head)) + payload
        with self._lock:
            if self._sizes[self._file] >= FILE_BYTES:
                self._sync()
                self._open(self._file + 1)
            if sum(self._sizes.values()) + len(raw) > self._max_bytes:
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
            entry = Entry(kind, session, seq, amount, self._file, at, len(raw))
            self._waiting.append(entry)
            self._more.notify_all()
        with self._sync_lock:  # one fsync for all that were written while the last one went on
            if self._synced < mine:
                with self._lock:
                    fd, upto = os.dup(self._fd), self._written
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
                self._synced = max(self._synced, upto)
        return entry

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced = self._written

    def wait(self, timeout_s: float) -> bool:
        """Wait until something waits to be delivered."""
        with self._more:
            return bool(self._waiting) or self._more.wait_for(lambda: bool(self._waiting), timeout_s)

    def first(self, max_entries: int, max_bytes: int) -> list[Entry]:
        """The oldest entries; at least one where there is any."""
        out: list[Entry] = []
        size = 0
        with self._lock:
            for entry in self._waiting:
                if out and (len(out) >= max_entries or size + entry.num_bytes > max_bytes):
                    break
                out.append(entry)
                size += entry.num_bytes
        return out

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
        return raw[HEAD_BYTES + len(entry.session.encode()) :]

    def advance(self, num_entries: int) -> None:
        """The oldest entries are delivered, or given up."""
        with self._lock:
            for _ in range(num_entries):
                last = self._waiting.popleft()
            done = (last.file, last.at + last.num_bytes)
            part = self._directory / f"{POSITION}.new"
            part.write_text(f"{done[0]} {done[1]}")
            os.replace(part, self._directory / POSITION)
            self._forget(self._waiting[0].file if self._waiting else self._file)

    def close(self) -> None:
        """Close the file; what waits is found again."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.fsync(self._fd)
                os.close(self._fd)
                self._fd = -1


def _entry_at(raw: bytes, file: int, at: int) -> Entry | None:
    if at + HEAD_BYTES > len(raw):
        return None
    magic, version, kind, name, seq, amount, length, crc = _HEAD.unpack_from(raw, at)
    (head_crc,) = _HEAD_CRC.unpack_from(raw, at + _HEAD.size)
    if magic != _MAGIC or version != 1 or zlib.crc32(raw[at : at + _HEAD.size]) != head_crc:
        return None
    start = at + HEAD_BYTES
    payload = raw[start : start + name + length]
    if len(payload) != name + length or zlib.crc32(payload) != crc:
        return None
    return Entry(kind, payload[:name].decode(), seq, amount, file, at, HEAD_BYTES + name + length)
