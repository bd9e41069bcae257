"""Memory of a ring: a mapped file, locked while its process lives, or plain memory.

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

live_paths: set[Path] = set()  # a POSIX lock does not exclude its own process: this set does


class RingMemory:
    """Zeroed memory with every page touched, so that no step takes a page fault.

    Raises:
        OSError: the file cannot be made, or the disk has no room for it.
    """

    def __init__(self, path: Path | None, total_bytes: int) -> None:
        self.path = path
        self._fd = -1
        if path is None:
            self.map = mmap.mmap(-1, total_bytes)
        else:
            self._fd, self.map = create_file(path.with_suffix(NEW_SUFFIX), total_bytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, dtype=np.uint8)
        self.bytes[:] = 0  # page faults happen here, not in a step

    def publish(self) -> None:
        """Give the file its final name, now that it is locked and complete: `fp8watch sync` may scan at any moment."""
        if self.path is not None:
            os.rename(self.path.with_suffix(NEW_SUFFIX), self.path)
            live_paths.add(self.path.resolve())

    @property
    def vanished(self) -> bool:
        """Whether somebody has deleted the file: the memory is there, and dies with the process."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

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
