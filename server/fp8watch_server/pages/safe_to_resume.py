"""Which checkpoint to resume from: of a run that broke, and of one incident.

Shapes:     a run or an incident -> what the pages say of its checkpoints
Thread:     worker threads of the server
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from fp8watch_server.store import checkpoints
from fp8watch_server.store.incident_states import FALSE_ALARM
from fp8watch_server.store.rows import IncidentRow


def of_incident(conn: Connection, incident: IncidentRow) -> dict[str, Any]:
    """Its checkpoints {poisoned: newest first, last_clean, num_seen, first_bad, told}.

    `first_bad` is the first step whose update it spoiled, None where it spoiled none. `told` is False where nobody has to
    know: it is not critical, or was a false alarm.
    """
    found = checkpoints.checkpoints(conn, incident["run_id"])
    told = incident["severity"] == "critical" and incident["state"] != FALSE_ALARM
    return {
        "poisoned": [c for c in found["items"] if c["incident"] == incident["id"]],
        "last_clean": found["last_clean"],
        "num_seen": len(found["items"]),
        "first_bad": checkpoints.first_bad(conn, incident) if told else None,
        "told": told,
    }


def of_run(conn: Connection, run_id: str, asking: Sequence[IncidentRow]) -> dict[str, Any] | None:
    """{last_clean} where something critical asks for somebody, and a checkpoint was seen."""
    if not asking or asking[0]["severity"] != "critical":
        return None
    found = checkpoints.checkpoints(conn, run_id)
    return {"last_clean": found["last_clean"]} if found["items"] else None
