"""Who waits for the device, and what fp8watch says on stderr and in its logs."""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import fp8watch
import fp8watch_agent

OURS = tuple(str(Path(package.__file__).parent) + os.sep for package in (fp8watch, fp8watch_agent))
WAITS = "called a synchronizing CUDA operation"


class Waits:
    """Who waits for the device between `begin` and `end`: torch's own warnings, and calls that it does not warn of."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.on = cuda, False
        self.total = self.ours = 0
        self.places: Counter[str] = Counter()
        self.first: str = ""
        self.said: Counter[str] = Counter()
        self._shown, warnings.showwarning = warnings.showwarning, self._show
        self._patched: list[tuple[Any, str, Any]] = []
        for owner, name in (
            (torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"),
        ):  # fmt: skip
            self._patch(owner, name)

    def _patch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def waits(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self._count(f"{getattr(owner, '__name__', owner)}.{name}")
            return original(*args, **kwargs)

        self._patched.append((owner, name, original))
        setattr(owner, name, waits)

    def _show(
        self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if WAITS in str(message):
            if self.on:
                self._count("warned of")
            return
        self.said[f"{category.__name__}: {str(message)[:200]} ({'/'.join(Path(filename).parts[-2:])}:{lineno})"] += 1

    def _count(self, what: str) -> None:
        stack = traceback.extract_stack()[:-2]
        self.total += 1
        ours = [frame for frame in stack if frame.filename.startswith(OURS)]
        if not ours:
            return
        self.ours += 1
        last = ours[-1]
        self.places[f"{'/'.join(Path(last.filename).parts[-3:])}:{last.lineno} {last.name} ({what})"] += 1
        if not self.first:
            self.first = "".join(traceback.format_list(stack))

    def begin(self) -> None:
        """From here on waiting is counted."""
        warnings.filterwarnings("always", message=f".*{WAITS}")
        if self.cuda:
            torch.cuda.set_sync_debug_mode("warn")
        self.on = True

    def end(self) -> None:
        """Until here."""
        self.on = False
        if self.cuda:
            torch.cuda.set_sync_debug_mode("default")

    def close(self) -> None:
        """Put everything back."""
        self.end()
        warnings.showwarning = self._shown
        for owner, name, original in self._patched:
            setattr(owner, name, original)


class Tee:
    """stderr that keeps what fp8watch says on it."""

    def __init__(self, under: Any) -> None:
        self._under, self.lines = under, list[str]()

    def write(self, text: str) -> int:
        self.lines += [line for line in text.splitlines() if line.startswith("fp8watch:")]
        return int(self._under.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


class Kept(logging.Handler):
    """Records of the loggers of fp8watch."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")
