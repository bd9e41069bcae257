"""Fail the n-th call: every function of the observer, and every call of it into the system, may be the one that fails.

A profile function sees each call that begins; where it raises, the call fails before it has done anything. That is
how SQLite's tests fail the n-th malloc: for n = 1, 2, … until a run is clean, nothing is left out.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import fp8watch
import fp8watch_agent

AGENT = Path(fp8watch_agent.__file__).parent
LIBRARY = Path(fp8watch.__file__).parent
SYSTEM = ("posix", "mmap", "fcntl", "zlib", "msgspec._core", "zstandard.backend_c", "_socket")
"""Modules in C whose calls fail in earnest: no room, no memory, no file."""

NEVER = frozenset({"guard.py", "settings.py", "record.py"})
"""The guard is what is under test; settings that are refused and names of sites are attach's own business."""

SEAM = frozenset(
    {
        "Watch.__init__",
        "Watch._parameter_ids",
        "Watch.log",
        "Watch.flush",
        "Watch.detach",
        "Overhead.__init__",
        "Sender._run",
        "HostCopies.__init__",
        "Slab.__init__",
        "unobserved_rows",  # checks an argument of attach
        "plain_name",  # with the next one: which Linears compute in FP8, and that raises like any module
        "role_of",
    }
)
"""Where the host, or the interpreter, calls in: the guard begins behind them."""
CHECKS = "checks.py"
"""Of arguments: what is wrong with them raises at attach."""
TAKES_BACK = frozenset({"close", "unlink", "ftruncate", "lseek"})


class Planted(Exception):
    """The fault. Nothing in the product knows it, so nothing but the guard can have swallowed it."""


class Nth:
    """Counts the calls of some files on the threads that it watches, and fails one of them."""

    def __init__(self, files: Iterable[Path], fail_at: int) -> None:
        self._names = {str(p) for p in files if p.name != CHECKS}
        self._fail_at = fail_at
        self.count = 0
        self.failed: str | None = None  # what the fault hit

    def hook(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.failed is not None or event not in ("call", "c_call"):
            return
        code = frame.f_code
        if code.co_filename not in self._names or code.co_flags & inspect.CO_GENERATOR:
            return  # a generator is also resumed to be thrown away, where nothing can be raised
        name = _qualname(frame)
        if name.split(".<locals>")[0] in SEAM and event == "call":
            return
        if event == "c_call" and (getattr(arg, "__module__", None) not in SYSTEM or arg.__name__ in TAKES_BACK):
            return
        self.count += 1
        if self.count == self._fail_at:
            self.failed = f"{Path(code.co_filename).name}:{name}" + (f" -> {arg.__name__}" if event == "c_call" else "")
            raise Planted(self.failed)


def _qualname(frame: FrameType) -> str:
    if sys.version_info >= (3, 11):
        return frame.f_code.co_qualname
    owner = frame.f_locals.get("self")
    return f"{type(owner).__name__}.{frame.f_code.co_name}" if owner is not None else frame.f_code.co_name


def sources(folder: Path, *, but: Iterable[str] = ()) -> list[Path]:
    """The Python files of a package's own folder."""
    return [p for p in folder.glob("*.py") if p.name not in NEVER and p.name not in set(but)]


def named(names: Iterable[str]) -> list[Path]:
    """Files of the training library; each must be there, or nothing would be failed in it."""
    found = [LIBRARY / name for name in names]
    assert [p for p in found if not p.is_file()] == []
    return found


@contextmanager
def on_this_thread(nth: Nth) -> Iterator[Nth]:
    """Watch the thread that trains."""
    before = sys.getprofile()
    sys.setprofile(nth.hook)
    try:
        yield nth
    finally:
        sys.setprofile(before)


@contextmanager
def on_thread(nth: Nth, name: str) -> Iterator[Nth]:
    """Watch the thread of this name that starts inside."""

    def first(frame: FrameType, event: str, arg: Any) -> None:
        sys.setprofile(nth.hook if threading.current_thread().name == name else None)

    threading.setprofile(first)
    try:
        yield nth
    finally:
        threading.setprofile(None)
