"""Worker thread that runs in rounds while its collector is the leader.

Shapes:     work() -> how long to rest
Thread:     its own

Only `stop` ends it: it waits for an unreachable database and retries after any other error. Cached database state is
dropped then, and while another collector leads; not where no connection was free, which says nothing of the database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fp8watch_server.db.leader import Leader

IDLE_S = 1.0
"""How often a collector that does not lead tries to become the leader."""
RETRY_S = 0.5


@dataclass(frozen=True)
class Pause:
    """Pause after a round; `wake` ends it early if it `wakes`, `wake_now` in any case."""

    seconds: float
    wakes: bool = True


class LeaderLoop:
    """A named worker thread.

    Args:
        name: of the thread.
        what: it does, for the log.
        leader: whose turn it is.
        work: one round; says how long to rest. After a PoolTimeoutError it has dropped what it was about.
        log: logger for failed rounds.
        forget: drop what is remembered of the database.
        retry_s: the pause after trouble.
    """

    def __init__(
        self,
        name: str,
        what: str,
        leader: Leader,
        work: Callable[[], Pause],
        log: logging.Logger,
        *,
        forget: Callable[[], None] = lambda: None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._name, self._what, self._leader, self._work = name, what, leader, work
        self._log, self._forget, self._retry_s = log, forget, retry_s
        self._wake = threading.Event()
        self._now = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_failures = 0

    @property
    def stopping(self) -> bool:
        """Whether the current round should end early."""
        return self._stop.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Signal that there may be new work."""
        self._wake.set()

    def wake_now(self) -> None:
        """Signal new work that cannot wait for the end of a pause."""
        self._now.set()
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the work in hand and end the thread."""
        self._stop.set()
        self.wake_now()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            self._now.clear()
            rest = self._one()
            if not self._stop.is_set():
                (self._wake if rest.wakes else self._now).wait(rest.seconds)
        self._leader.release()

    def _one(self) -> Pause:
        try:
            if self._leader.held():
                return self._work()
            self._forget()
            return Pause(IDLE_S, wakes=False)
        except PoolTimeoutError:  # others of this process have all connections: what is remembered still holds
            self._log.warning("%s found no connection free; trying again", self._what)
            self.num_failures += 1
            return Pause(self._retry_s, wakes=False)
        except SQLAlchemyError as e:
            self._log.warning("%s waits for the database: %s", self._what, str(e).splitlines()[0])
        except Exception:  # noqa: BLE001  nothing may end the thread
            self._log.exception("%s failed; trying again", self._what)
        self.num_failures += 1
        self._forget()
        return Pause(self._retry_s, wakes=False)
