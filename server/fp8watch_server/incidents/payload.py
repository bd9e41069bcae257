"""Types of the JSON that leaves the collector about an incident: the incident itself, and the payload of a notice.

Shapes:     TypedDicts; only data
"""

from __future__ import annotations

from typing import Any, TypedDict


class IncidentFields(TypedDict):
    """Columns of the table `incident` that are public, in the order in which they are sent."""

    id: str
    run_id: str
    attempt: int
    mode: str
    """Slug of the failure mode."""
    title: str
    severity: str
    """info | warning | critical"""
    status: str
    """open | acknowledged | resolved"""
    verdict: str
    """fp8 | shared | unknown"""
    first_step: int
    last_step: int
    num_events: int
    origin: bool
    place: dict[str, Any]
    num_sites: int
    evidence: list[dict[str, Any]]
    cause: str
    fix: list[dict[str, str]]
    alternatives: list[dict[str, str]]
    opened_at: float
    """Seconds since 1970, as `resolved_at`."""
    resolved_at: float | None
    fingerprint: str


class Links(TypedDict):
    """Addresses of an incident: absolute with a public URL, else paths."""

    url: str
    runbook_url: str


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
