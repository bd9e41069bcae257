"""Types of the JSON that leaves the collector about an incident: the incident itself, and the payload of a notice.

Shapes:     TypedDicts; only data
"""

from __future__ import annotations

from typing import TypedDict

from fp8watch_server.store.rows import IncidentFields, Links


class Escalation(TypedDict, total=False):
    """Only in the notice of an incident that became critical."""

    was_severity: str


class Incident(IncidentFields, Links, Escalation):
    """An incident as notices carry it."""


class RunName(TypedDict):
    """The run of a notice; `name` is the id where it has no name."""

    id: str
    name: str


class NoticePayload(TypedDict):
    """The column `payload` of the outbox."""

    incident: Incident
    run: RunName
    note: str


class Told(TypedDict, total=False):
    """Beside a resolve: the incident as its channel was told it, because its labels are those of its firing."""

    told: Incident


class AlsoPayload(NoticePayload, Told):
    """A notice that goes with another."""

    kind: str
    """firing | resolved"""


_Group = TypedDict(
    "_Group",
    {
        "lead_kind": str,  # of a summary: what its leading notice is
        "also": list[AlsoPayload],  # the notices that go with it
        "with": list[list[str]],  # [run id, tenant, row id] of their rows
        "open": list[Incident],  # what this channel was told of the run before, and is still open
        "flight": str,  # the flight recorder in characters, where the channel shows it
        "alone": bool,  # it may not be put together with others: together they were refused
    },
    total=False,
)


class MessagePayload(NoticePayload, Told, _Group):
    """The column `payload` of a row that leads a message."""
