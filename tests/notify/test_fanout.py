"""One row for everybody becomes a row a channel, and none that cannot holds up the others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from notify.receiver import Outbox
from support.database import fresh_database

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.notify.fanout import fan_out


def route(_: object) -> list[str]:
    return ["slack", "webhook"]


def spread(outbox: Outbox) -> None:
    with writing(outbox.db) as conn:
        fan_out(conn, route, time.time())


def states(outbox: Outbox, incident: str) -> list[tuple[str, str, str]]:
    return sorted((r["kind"], r["channel"], r["state"]) for r in outbox.rows if r["incident_id"] == incident)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_notice_that_a_channel_has_already_is_dead_and_holds_up_no_other(tmp_path: Path, kind: str) -> None:
    with fresh_database(kind) as url:
        outbox = Outbox(tmp_path, url)
        outbox.put(incident="twice", run="r")
        spread(outbox)
        outbox.put(incident="twice", run="r")
        outbox.put(incident="good", run="r")
        spread(outbox)
        went = [("firing", "slack", "pending"), ("firing", "webhook", "pending")]
        assert states(outbox, "twice") == [("firing", "", "dead"), *went]
        assert states(outbox, "good") == went
        outbox.db.dispose()


def test_a_resolve_waits_while_somebody_else_sends_its_firing_on_its_ways(tmp_path: Path) -> None:
    with fresh_database("postgresql") as url:
        outbox = Outbox(tmp_path, url)
        outbox.put(incident="i", run="r")
        t = schema.outbox.c
        with writing(outbox.db) as other:  # a transaction that has the firing and has not ended
            other.execute(sa.select(t.id).where(t.kind == "firing").with_for_update()).all()
            outbox.put("resolved", incident="i", run="r")
            spread(outbox)
            assert states(outbox, "i") == [("firing", "", "pending"), ("resolved", "", "pending")]
        spread(outbox)
        assert [state for *_, state in states(outbox, "i")] == ["pending"] * 4
        assert {channel for _, channel, _ in states(outbox, "i")} == {"slack", "webhook"}
        outbox.db.dispose()
