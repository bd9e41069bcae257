"""What a message holds: one notice, or several of a run that go together, or the summary of what was held back.

Shapes:     outbox payload -> notices
Thread:     dispatcher

The payload of an outbox row is a notice as incidents.messages wrote it: {"incident", "run", "note"}. When it leads a
message, the group adds to it:

    also     [{"kind", "incident", "run", "note"}]: the notices that go with it
    with     [[run id, tenant, row id]]: their rows
    open     [incident]: what this channel was told of the run before, and is still open
    told     incident as this channel was told it: the labels of its resolve are those of its firing
    alone    it may not be put together with others: together they were refused
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUMMARY = "summary"
SEVERITIES = ("info", "warning", "critical")


@dataclass(frozen=True)
class Notice:
    """One incident that began or ended."""

    kind: str  # firing | resolved
    incident: Mapping[str, Any]
    run: Mapping[str, Any]
    note: str
    told: Mapping[str, Any]  # the incident as it was told first; of a firing, itself


def notices_of(payload: Mapping[str, Any], kind: str) -> list[Notice]:
    """All notices of a message, the leading one first. Raises KeyError on a payload that is none."""
    lead = _notice(payload, payload.get("lead_kind", "firing") if kind == SUMMARY else kind)
    found = {(lead.kind, lead.incident["id"]): lead}
    for other in payload.get("also", ()):
        notice = _notice(other, other["kind"])
        found.setdefault((notice.kind, notice.incident["id"]), notice)  # of a warning that became critical: as critical
    return list(found.values())


def _notice(payload: Mapping[str, Any], kind: str) -> Notice:
    incident = payload["incident"]
    return Notice(kind, incident, payload["run"], payload.get("note") or "", payload.get("told") or incident)


def order_of(notice: Notice) -> tuple[bool, int, float]:
    """Sorts what is most urgent to the front: begun before ended, critical before the rest, then the oldest."""
    severity = notice.incident["severity"]
    return (
        notice.kind != "firing",
        -(SEVERITIES.index(severity) if severity in SEVERITIES else 0),
        float(notice.incident.get("opened_at") or 0.0),
    )


def labels_of(notice: Notice) -> dict[str, str]:
    """Labels as CONTRACT names them. A resolve carries those of its firing, or receivers would not match the two."""
    incident = notice.told if notice.kind == "resolved" else notice.incident
    return {
        "alertname": incident["mode"],
        "run": notice.run["id"],
        "severity": incident["severity"],
        "module": incident["place"].get("module") or "",
        "operand": incident["place"].get("operand") or "",
    }
