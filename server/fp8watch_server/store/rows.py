"""What read queries return: one type a row, so that a misspelt key is an error of the type checker and no blank on a page.

Shapes:     TypedDicts; only data, as the query API sends it

The names are the API's. A place and its evidence come out of a JSON column: what an older detector did not write is
absent there, and `fp8watch_server.pages.lookup.complete` fills it in.
"""

from __future__ import annotations

from typing import Any, TypedDict


class RunRow(TypedDict):
    """A run."""

    id: str
    name: str
    status: str
    """running | stalled | ended"""
    attempt: int
    created_at: float
    """Seconds since 1970, as every other time."""
    last_seen_at: float
    last_step: int | None
    recipe: str
    backend: str
    world_size: int
    num_sites: int
    num_open_incidents: int
    num_unseen_incidents: int
    """Critical ones and warnings that were over before anybody had seen them."""
    tags: list[str]
    note: str
    archived_at: float | None


class SessionRow(TypedDict):
    """One attach of one process."""

    session: str
    rank: int
    attempt: int
    world_size: int
    mesh: dict[str, int]
    host: str
    pid: int
    started_at: float | None
    versions: dict[str, str]
    recipe: str
    fingerprint: str
    backend: str
    facts: dict[str, Any]
    """What attach said of itself."""
    registered_at: float
    last_seen_at: float
    health: dict[str, Any] | None
    """Counters of the agent, of its newest batch."""
    ended: bool
    num_late_steps: int
    """Its steps that came too late for the detectors' statistics, and to be compared with other ranks'."""
    last_late_step: int | None


class RunWithSessions(RunRow):
    """A run, and at most MAX_LIMIT of its sessions: the newest attempt first, rank by rank."""

    sessions: list[SessionRow]


class ListedRun(RunRow):
    """A run in the list of runs."""

    need: int
    """What it needs: `fp8watch_server.store.run_list.CRITICAL_OPEN` …"""
    not_watching: str
    """Why no step of it ends; "" where steps end."""
    owners: list[str]
    """Who its incidents are assigned to, in alphabetical order."""


class SiteRow(TypedDict):
    """A site."""

    id: int
    module: str
    operand: str
    direction: str
    gemm: str
    order: int
    """In the flow of data."""
    shape: list[int]
    tile: list[int]
    format: str
    power_2_scale: bool
    eps: float
    recipe: str
    backend: str
    evidence: dict[str, str]


class IncidentPlace(TypedDict):
    """Where an incident began; None where it has no such part."""

    ranks: list[int]
    module: str | None
    gemm: str | None
    operand: str | None
    direction: str | None
    tile: list[int] | None
    element: list[int] | None
    expert: int | None


class EvidenceRow(TypedDict):
    """A measurement that an incident rests on. A number that is not finite is "nan", "inf" or "-inf"."""

    field: str
    value: Any
    baseline: Any
    unit: str | None
    since_step: int


class IncidentFields(TypedDict):
    """Columns of the table `incident` that are public, in the order in which notices carry them."""

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
    place: IncidentPlace
    num_sites: int
    evidence: list[EvidenceRow]
    cause: str
    fix: list[dict[str, str]]
    alternatives: list[dict[str, str]]
    opened_at: float
    resolved_at: float | None
    fingerprint: str


class Links(TypedDict):
    """Addresses of an incident: absolute with a public URL, else paths."""

    url: str
    runbook_url: str


class IncidentColumns(IncidentFields):
    """A row of the table `incident`, without its tenant."""

    sites: list[int]
    """Ids, the named one first."""
    updated_at: float
    cause_id: str
    """The same in every run: `fp8watch_server.incidents.causes`. "" in rows of an older collector."""
    seen_at: float | None
    owner: str
    closed_as: str | None
    """fixed | false-alarm"""
    regression_of: str | None
    """Id of the incident of this cause that was said to be fixed."""


class IncidentRow(IncidentColumns, Links):
    """An incident as the API gives it."""

    state: str
    """One of `fp8watch_server.store.incident_states.STATES`."""


class IncidentOfRun(IncidentRow):
    """An incident beside those of other runs."""

    run_name: str


class IncidentEvent(TypedDict):
    """What happened to an incident."""

    seq: int
    kind: str
    at: float
    step: int | None
    detail: dict[str, Any]


class IncidentWithEvents(IncidentRow):
    """An incident, with its events from first to last."""

    events: list[IncidentEvent]


class CauseRow(TypedDict):
    """Incidents of one failure mode at one kind of place."""

    cause_id: str
    state: str
    """`regressed`, or that of its incident."""
    need: int
    """What is above 1 asks for somebody, and the highest first."""
    num_incidents: int
    num_runs: int
    first_seen: float
    last_seen: float
    incident: IncidentRow
    """To look at: the newest that asks, else the newest."""


class SilenceRow(TypedDict):
    """What no messages are sent about, and until when. An empty name stands for every one."""

    id: str
    run_id: str
    mode: str
    module: str
    comment: str
    created_at: float
    expires_at: float
