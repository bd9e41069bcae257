"""Runs as processes, forked from one that has imported everything: a start costs milliseconds, and a leg is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proving.case import Case
from proving.loop import leg_in_child

LEG_S = 600.0
"""What takes longer is ended. A quiet machine needs a twentieth of it."""


@dataclass
class Running:
    """One run: all ranks of one leg at a time."""

    case: Case
    world_size: int
    folder: Path
    collector: str | None
    steps: int | None = None
    leg: int = 0
    began: float = 0.0
    pids: dict[int, int] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """Of rank 0, one for each leg."""

    def start_leg(self) -> None:
        """Fork one process a rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        for rank in range(self.world_size):
            pid = os.fork()
            if pid == 0:
                os._exit(self._child(rank, port))
            self.pids[pid] = rank

    def _child(self, rank: int, port: str) -> int:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            fd = os.open(self.folder / f"leg{self.leg}.rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.environ.update(FP8WATCH_RUN=self.case.id, FP8WATCH_SPOOL_DIR=str(self.folder / f"spool{rank}"))
            if self.world_size > 1:
                os.environ.update(
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(self.world_size), RANK=str(rank),
                    LOCAL_RANK=str(rank),
                )  # fmt: skip
            leg_in_child(self.case, self.leg, rank, self.collector, self.folder, self.steps)
            return 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def ended(self) -> bool:
        """Whether the run is over; begins the next leg where there is one."""
        for pid in list(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[pid]
        if self.pids:
            if time.monotonic() - self.began > LEG_S:
                self.kill()
            return False
        path = self.folder / f"leg{self.leg}.rank0.json"
        out = json.loads(path.read_text()) if path.exists() else {"broken": self._log()}
        self.outcomes.append(out)
        if "broken" in out or "died" in out or "absent" in out or out["next_step"] >= out["steps"]:
            return True
        self.leg += 1
        self.start_leg()
        return False

    def kill(self) -> None:
        """End all ranks."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids.clear()

    def _log(self) -> str:
        path = self.folder / f"leg{self.leg}.rank0.log"
        return "no outcome: " + (path.read_text(errors="replace")[-2000:] if path.exists() else "no log")
