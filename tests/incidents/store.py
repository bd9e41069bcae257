"""A collector's database with one run in it, and the way from batches to incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from detect.healthy_run import Run

from fp8watch_agent.wire import Batch
from fp8watch_server.db import schema
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.incidents.fold import IncidentChange, close_quiet, fold

RUN, TENANT = "run", "default"


class Store:
    def __init__(self, folder: Path, run: Run, url: str = "") -> None:
        self.db = make_engine(url or f"sqlite:///{folder / 'fp8watch.db'}")
        schema.metadata.create_all(self.db)
        with writing(self.db) as conn:
            conn.execute(
                sa.insert(schema.run).values(
                    run_id=RUN, tenant=TENANT, name="<b>my run</b>", created_at=0.0, last_seen_at=0.0
                )
            )
        self.run, self.now = run, 1000.0
        self.restart()

    def restart(self) -> None:
        """The collector starts again: engines are empty."""
        self.engine = DetectionEngine(self.run.facts)

    def take(self, batch: Batch, attempt: int = 1) -> list[IncidentChange]:
        """What the detect worker does with one batch."""
        self.now += 0.1
        findings = self.engine.observe(batch)
        with writing(self.db) as conn:
            where = (conn, RUN, TENANT, attempt)
            changes = fold(*where, findings, self.run.facts, self.now, public_url="https://watch.example")
            settled = self.engine.delivered_step
            if settled is not None:
                changes += close_quiet(
                    *where, settled, self.now, stride=self.engine.stride, public_url="https://watch.example"
                )
        return changes

    def rows(self, table: sa.Table) -> list[dict[str, Any]]:
        with self.db.connect() as conn:
            return [dict(r) for r in conn.execute(sa.select(table)).mappings()]

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return sorted(self.rows(schema.incident), key=lambda r: r["first_step"])

    @property
    def messages(self) -> list[str]:
        rows = sorted(self.rows(schema.outbox), key=lambda r: r["created_at"])
        return [r["kind"] for r in rows]
