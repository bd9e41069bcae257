"""Session identity (one attach of one process) and the registry of its sites.

Thread:     made where attach runs, read by the sender
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

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
    key: str = ""  # secret, shown with every request: nobody else can send under this session; empty: none
    tags: list[str] = field(default_factory=list)  # of the run, for people to find it by

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-zA-Z]{0,64}", self.key):
            raise ValueError("key=(hidden): must be up to 64 letters and digits; give token_hex(16)")
        if not re.fullmatch(r"[0-9a-zA-Z]{1,64}", self.session):  # used in file names and URLs
            raise ValueError(f"session={self.session!r}: must be 1 to 64 letters and digits; give uuid4().hex")

    def run_facts(self) -> dict[str, str | int | list[str]]:
        """The body of `PUT /v1/runs/{run_id}`."""
        tags: dict[str, str | int | list[str]] = {"tags": self.tags} if self.tags else {}
        return tags | {
            "name": self.run_name,
            "recipe": self.recipe,
            "backend": self.backend,
            "world_size": self.world_size,
        }

    def session_facts(self) -> dict[str, Any]:
        """The body of `PUT /v1/runs/{run_id}/sessions/{session}`: all but the key, which is a header."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "key"}


class Registration:
    """A session and its sites in registration order; a site whose facts changed is listed again.

    One thread appends, another reads: an append-only list needs no lock for that.
    """

    def __init__(self, session: Session, sites: Iterable[Site] = ()) -> None:
        self.session = session
        self.version = 0  # version of the session facts; a collector with an older one gets them again
        self._sites: list[Site] = []
        self._by_id: dict[int, Site] = {}
        self.add(sites)

    def __len__(self) -> int:
        return len(self._sites)

    def add(self, sites: Iterable[Site]) -> list[Site]:
        """Register sites; returns those that are new or changed."""
        fresh = [s for s in sites if self._by_id.get(s.id) != s]
        for site in fresh:
            self._by_id[site.id] = site
            self._sites.append(site)
        return fresh

    def update_facts(self, facts: Mapping[str, str | int | float | bool]) -> bool:
        """Add session facts that become known at run time; False when nothing is new."""
        if all(self.session.facts.get(name) == value for name, value in facts.items()):
            return False
        self.session = replace(self.session, facts={**self.session.facts, **facts})
        self.version += 1
        return True

    def sites(self, start: int = 0) -> list[Site]:
        """Sites registered from index `start` on, each once, in its newest form."""
        return list({s.id: s for s in self._sites[start:]}.values())


class _Stored(msgspec.Struct):
    session: Session
    sites: list[Site] = []


def encode_registration(session: Session, sites: list[Site]) -> bytes:
    """Session and sites as JSON, for files that must be readable after the process is gone."""
    return msgspec.json.encode(_Stored(session=session, sites=sites))


def decode_registration(raw: bytes) -> Registration:
    """Inverse of `encode_registration`.

    Raises:
        msgspec.MsgspecError: not such a JSON.
    """
    stored = msgspec.json.decode(raw, type=_Stored)
    return Registration(stored.session, stored.sites)
