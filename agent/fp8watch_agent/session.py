"""Who is sending: one attach of one process, and the sites that it registered.

Upstream:   fp8watch.session.attach           Downstream: fp8watch_agent.uploader
Thread:     made where attach runs, read by the sender
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from fp8watch_agent.record import Site


@dataclass(frozen=True)
class Session:
    """One attach of one process. Travels as JSON, once, and lies in the head of the ring file."""

    run_id: str
    run_name: str
    session: str  # UUID in hex
    rank: int
    world_size: int
    mesh: dict[str, int]
    host: str
    pid: int
    started_at: float  # seconds since 1970
    versions: dict[str, str]
    recipe: str
    fingerprint: str
    backend: str
    facts: dict[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-zA-Z]{1,64}", self.session):  # it names files and stands in URLs
            raise ValueError(f"session={self.session!r}: must be 1 to 64 letters and digits; give uuid4().hex")

    def run_facts(self) -> dict[str, str | int]:
        """The body of `PUT /v1/runs/{run_id}`."""
        return {
            "name": self.run_name,
            "recipe": self.recipe,
            "backend": self.backend,
            "world_size": self.world_size,
        }


class Registration:
    """A session and its sites, in the order in which they were registered; a site whose facts changed comes again.

    Appended to by one thread, read by another: a list that only grows needs no lock for that.
    """

    def __init__(self, session: Session, sites: Iterable[Site] = ()) -> None:
        self.session = session
        self.version = 0  # of the session's facts: a collector that took an older one is told again
        self._sites: list[Site] = []
        self._by_id: dict[int, Site] = {}
        self.add(sites)

    def __len__(self) -> int:
        return len(self._sites)

    def add(self, sites: Iterable[Site]) -> list[Site]:
        """Take sites over; returns those that are new or changed."""
        fresh = [s for s in sites if self._by_id.get(s.id) != s]
        for site in fresh:
            self._by_id[site.id] = site
            self._sites.append(site)
        return fresh

    def update_facts(self, facts: Mapping[str, str | int | float | bool]) -> bool:
        """Add facts of the session that are known only while it runs; False where all of it was known."""
        if all(self.session.facts.get(name) == value for name, value in facts.items()):
            return False
        self.session = replace(self.session, facts={**self.session.facts, **facts})
        self.version += 1
        return True

    def sites(self, start: int = 0) -> list[Site]:
        """Registered sites from the `start`-th registration on, each once, in its newest form."""
        return list({s.id: s for s in self._sites[start:]}.values())


class _Stored(msgspec.Struct):
    session: Session
    sites: list[Site] = []


def encode_registration(session: Session, sites: list[Site]) -> bytes:
    """Session and sites as JSON, for files that must explain themselves after the process is gone."""
    return msgspec.json.encode(_Stored(session=session, sites=sites))


def decode_registration(raw: bytes) -> Registration:
    """The inverse of `encode_registration`.

    Raises:
        msgspec.MsgspecError: not such a JSON.
    """
    stored = msgspec.json.decode(raw, type=_Stored)
    return Registration(stored.session, stored.sites)
