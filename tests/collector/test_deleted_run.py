"""Of a run that is deleted nothing is left firing."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from collector.filled_run import SITES, an_incident
from collector.kit import Agent

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents.messages import write_firing
from fp8watch_server.incidents.prune_command import main as prune_main


@pytest.mark.parametrize("by", ["page", "command"])
def test_what_was_told_of_it_is_over(client: Any, app: Any, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Agent(client).register(SITES)
    engine = app.state.engine
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", app.state.settings.database_url)
    with writing(engine) as conn:
        for name, more in (
            ("told", {}),
            ("inhibited", {"severity": "warning", "mode": "outlier-growth"}),
            ("over", {"status": "resolved", "resolved_at": 11.0, "place": {"module": "another"}}),
        ):
            row = an_incident(id=name, **more)
            conn.execute(sa.insert(t.incident), [row])
            write_firing(conn, {**row, "owner": "", "closed_as": None, "seen_at": None, "cause_id": ""}, 12.0, "")
    if by == "page":
        assert client.delete("/api/v1/runs/run-1").status_code == 204
    else:
        assert prune_main(["--run", "run-1", "--delete"]) == 0
    with engine.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(t.run)).scalar_one() == 0
        assert conn.execute(sa.select(sa.func.count()).select_from(t.incident)).scalar_one() == 0
        rows = conn.execute(sa.select(t.outbox).order_by(t.outbox.c.created_at)).mappings().all()
    assert sorted((row["incident_id"], row["kind"], row["state"]) for row in rows) == [
        ("inhibited", "firing", "inhibited"),
        ("over", "firing", "pending"),
        ("told", "firing", "pending"),
        ("told", "resolved", "pending"),
    ]
    told = next(row["payload"] for row in rows if row["kind"] == "resolved")
    assert (told["incident"]["id"], told["incident"]["status"], told["run"]["name"]) == ("told", "resolved", "a run")
