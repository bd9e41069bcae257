"""What the runs of each tenant take, counted from time to time for its quota.

Shapes:     tokens, databases -> tenant -> Usage
Thread:     its own

A run belongs to each tenant one of whose tokens of scope ingest names it. A shard that is away keeps its runs out of the
count meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.auth.grant import Grant
from fp8watch_server.auth.quota import Quotas, Usage
from fp8watch_server.auth.tokens import read_tokens
from fp8watch_server.db import schema as t
from fp8watch_server.db.shards import Shards

log = logging.getLogger("fp8watch.collector")

COUNT_EVERY_S = 10.0


def bytes_of_runs(conn: Connection) -> dict[str, int]:
    """Run -> bytes of its sheets and of its batches that are not compacted."""
    r, c, b = t.run.c, t.cell.c, t.hot_batch.c
    out = dict.fromkeys(conn.execute(sa.select(r.run_id)).scalars(), 0)
    for of in (
        sa.select(c.run_id, sa.func.sum(c.num_bytes)).group_by(c.run_id),
        sa.select(b.run_id, sa.func.sum(sa.func.length(b.body))).group_by(b.run_id),
    ):
        for run_id, num in conn.execute(of):
            out[run_id] = out.get(run_id, 0) + int(num or 0)
    return out


def usage_of(runs: Mapping[str, int], grants: Mapping[str, Grant]) -> dict[str, Usage]:
    """Tenant -> what its runs take."""
    by_tenant: dict[str, list[Grant]] = {}
    for grant in grants.values():
        if "ingest" in grant.scopes:
            by_tenant.setdefault(grant.tenant, []).append(grant)
    out = {}
    for tenant, of in by_tenant.items():
        mine = frozenset(run for run in runs if any(grant.names(run) for grant in of))
        out[tenant] = Usage(mine, sum(runs[run] for run in mine))
    return out


class UsageCounter:
    """Counts for the quotas of one collector.

    Args:
        shards: its databases.
        quotas: are told.
    """

    def __init__(self, shards: Shards, quotas: Quotas) -> None:
        self._shards, self._quotas = shards, quotas
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._watch, name="fp8watch-usage", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def count(self) -> None:
        """Count once.

        Raises:
            SQLAlchemyError: the home database cannot be asked.
        """
        with self._shards.connections() as everywhere:
            runs: dict[str, int] = {}
            for conn in everywhere.conns:
                runs.update(bytes_of_runs(conn))
        self._quotas.usage = usage_of(runs, read_tokens(self._shards.home).grants)

    def _watch(self) -> None:
        while True:
            try:
                self.count()
            except SQLAlchemyError as e:
                log.debug("usage cannot be counted: %s", str(e).splitlines()[0])
            except Exception:
                log.exception("usage cannot be counted")
            if self._stop.wait(COUNT_EVERY_S):
                return
