"""Named crash points: a SIGKILL before or behind the n-th call of a function, in a process that forked for it.

A point is `module:qualified name:before|after:n`. Nothing in the product knows of them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any


def arm(point: str) -> None:
    """From here on the point kills this process."""
    module_name, name, when, nth = point.split(":")
    owner: Any = importlib.import_module(module_name)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, last)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if when == "before" and calls == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        got = original(*args, **kwargs)
        if when == "after" and calls == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        return got

    setattr(owner, last, call)


def in_a_child(action: Callable[[], int], point: str | None = None) -> int:
    """The wait status of a child that runs `action` with a point armed."""
    pid = os.fork()
    if pid == 0:
        try:
            if point is not None:
                arm(point)
            os._exit(action())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(99)
    return os.waitpid(pid, 0)[1]
