"""Memory of a ring: a mapped file, locked while its process lives; plain memory; or both side by side.

Side by side where the file lies on a server (NFS, Lustre …): to store into what is mapped from it would make training wait
for the server, and end it by SIGBUS where that gives up. The sender writes the file there, as far behind as it polls.

Shapes:     total_bytes of one file -> a mapping of as many
Thread:     any; made and closed where the ring is, looked after by the sender
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fp8watch_agent.ring_file import NEW_SUFFIX, create_file

PIECE_BYTES = 1 << 20
"""Copied without letting go of the interpreter's lock."""

live_paths: set[Path] = set()  # a POSIX lock does not exclude its own process: this set does


class RingMemory:
    """Zeroed memory with every page touched, so that no step takes a page fault.

    Args:
        path: of its file; None for none.
        mapped: the memory is that of the file; else `write` brings it there.

    Raises:
        OSError: the file cannot be made, or the disk has no room for it.
    """

    def __init__(self, path: Path | None, total_bytes: int, *, mapped: bool = True) -> None:
        self.path = path
        self.mapped = mapped or path is None
        self.failed: OSError | None = None  # why a file that is not mapped lacks some of the memory
        self._fd = -1 if path is None else create_file(path.with_suffix(NEW_SUFFIX), total_bytes)
        try:
            self.map = mmap.mmap(self._fd if mapped else -1, total_bytes)
        except (OSError, ValueError):
            self.discard()
            raise
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, dtype=np.uint8)
        self.bytes[:] = 0  # page faults happen here, not in a step

    def write(self, begin: int, end: int) -> None:
        """Bring a part of the memory to a file that is not mapped. By the sender, which may have to wait; where that fails
        nothing is written any more until `anew`."""
        if self.mapped or self._fd < 0 or self.failed is not None:
            return
        try:
            self._write(self._fd, begin, end)
        except OSError as e:
            self.failed = e

    def _write(self, fd: int, begin: int, end: int) -> None:
        for at in range(begin, end, PIECE_BYTES):
            piece = memoryview(self.map[at : min(at + PIECE_BYTES, end)])  # overwritten meanwhile: its seal says so
            while piece:
                done = os.pwrite(fd, piece, at)
                piece, at = piece[done:], at + done

    def anew(self) -> None:
        """Another file, with all that is in the memory, in place of one that is not mapped and was deleted or is not whole.

        Raises:
            OSError: it cannot be made.
        """
        assert self.path is not None
        new = self.path.with_suffix(NEW_SUFFIX)
        new.unlink(missing_ok=True)  # of a try that failed
        fd = create_file(new, len(self.map))
        try:
            self._write(fd, 0, len(self.map))
            os.rename(new, self.path)
        except OSError:
            os.close(fd)
            raise
        self.release()
        self._fd, self.failed = fd, None
        live_paths.add(self.path.resolve())

    def discard(self) -> None:
        """Let go of a file that was not published, and remove it."""
        self.release()
        if self.path is not None:
            self.path.with_suffix(NEW_SUFFIX).unlink(missing_ok=True)

    def publish(self) -> None:
        """Give the file its final name, now that it is locked and complete: `fp8watch sync` may scan at any moment."""
        if self.path is not None:
            os.rename(self.path.with_suffix(NEW_SUFFIX), self.path)
            live_paths.add(self.path.resolve())

    @property
    def vanished(self) -> bool:
        """Whether somebody has deleted the file: the memory is there, and dies with the process."""
        try:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0
        except OSError:
            if self.mapped:
                raise
            return True  # deleted by another machine

    def release(self) -> None:
        """Let go of the file and its lock. The memory stays as long as somebody uses it."""
        fd, self._fd = self._fd, -1  # after an error, too, the number may be that of another file
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def close(self, *, keep: bool) -> None:
        """Close the file. `keep`: leave it for `fp8watch sync`; else it is removed."""
        if self.path is None:
            return
        live_paths.discard(self.path.resolve())
        if not keep:
            self.path.unlink(missing_ok=True)
        self.release()

    def unmap(self) -> None:
        """Release the memory."""
        self.bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self.map.close()
