"""A pool that keeps nothing once it is disposed of: what is given back later is closed.

Shapes:     connections -> connections
Thread:     any

One of SQLAlchemy keeps what was in use then, for nobody: it is open until the garbage is collected.
"""

from __future__ import annotations

import threading
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import ConnectionPoolEntry


class ClosingPool(sa.QueuePool):
    """Connections that are in use while it is disposed of work on, and are closed where they come back.

    Args:
        args, kwargs: as of QueuePool.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_over = False
        self._turn = threading.RLock()  # the garbage collector gives back, too, in any thread at any time

    def dispose(self) -> None:
        """Close all connections that nobody uses; the others follow."""
        with self._turn:
            self._is_over = True
        super().dispose()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        with self._turn:
            if not self._is_over:
                super()._do_return_conn(record)
                return
        record.close()
        super()._do_return_conn(record)  # empty: who still waits here opens it again
