"""What a message holds: one notice, or several of a run that go together, or the summary of what was held back.

Shapes:     outbox payload -> notices
Thread:     dispatcher

The payload of an outbox row is a notice as incidents.messages wrote it. When it leads a message, the group adds to it:
see incidents.payload.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8watch_server.incidents.payload import Incident, MessagePayload, NoticePayload, RunName, Told

SUMMARY = "summary"
SEVERITIES = ("info", "warning", "critical")


@dataclass(frozen=True)
class IncidentNotice:
    """One incident that began or ended."""

    kind: str  # firing | resolved
    incident: Incident
    run: RunName
    note: str
    told: Incident  # the incident as it was told first; of a firing, itself


def notices_of(payload: MessagePayload, kind: str) -> list[IncidentNotice]:
    """All notices of a message, the leading one first. Raises KeyError on a payload that is none."""
    lead = _notice(payload, payload, payload.get("lead_kind", "firing") if kind == SUMMARY else kind)
    found = {(lead.kind, lead.incident["id"]): lead}
    for other in payload.get("also", ()):
        notice = _notice(other, other, other["kind"])
        found.setdefault((notice.kind, notice.incident["id"]), notice)  # of a warning that became critical: as critical
    return list(found.values())


def _notice(payload: NoticePayload, before: Told, kind: str) -> IncidentNotice:
    incident = payload["incident"]
    return IncidentNotice(kind, incident, payload["run"], payload.get("note") or "", before.get("told") or incident)


def order_of(kind: str, incident: Incident) -> tuple[bool, int, float]:
    """Sorts what is most urgent to the front: begun before ended, critical before the rest, then the oldest."""
    severity = incident["severity"]
    return (
        kind != "firing",
        -(SEVERITIES.index(severity) if severity in SEVERITIES else 0),
        float(incident.get("opened_at") or 0.0),
    )


def labels_of(notice: IncidentNotice) -> dict[str, str]:
    """Labels as CONTRACT names them. A resolve carries those of its firing, or receivers would not match the two."""
    incident = notice.told if notice.kind == "resolved" else notice.incident
    return {
        "alertname": incident["mode"],
        "run": notice.run["id"],
        "severity": incident["severity"],
        "module": incident["place"].get("module") or "",
        "operand": incident["place"].get("operand") or "",
    }
