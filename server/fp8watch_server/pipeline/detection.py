"""What the detect worker needs of the rooms before and behind it, injected as callables.

Shapes:     facts -> an engine; findings -> incidents
Thread:     detect worker
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy.engine import Connection

from fp8watch_agent.wire import Batch
from fp8watch_server.detect.thresholds import Thresholds


class DetectEngine(Protocol):
    """One run's detectors: no I/O, no database."""

    thresholds: Thresholds
    """Of its run, as the rules say."""

    def observe(self, batch: Batch, at: float | None = None) -> Sequence[Any]:
        """Findings of one batch, received at a time of this collector's clock."""
        ...

    def tick(self, now: float) -> Sequence[Any]:
        """Findings that waited for a late rank; called while no batches come."""
        ...

    def add_sites(self, sites: Any) -> None:
        """Facts of new or changed sites."""
        ...

    def add_sessions(self, sessions: Any) -> None:
        """All sessions of the run, new and known ones."""
        ...

    def take_notices(self) -> Sequence[Any]:
        """Log-worthy observations that are no faults; each has a `kind`, a `step`, a `rank` and a `text`."""
        ...

    @property
    def delivered_step(self) -> int | None:
        """The last step that every live rank has delivered."""
        ...

    @property
    def settling(self) -> bool:
        """Whether it holds steps back for ranks that come: a state of it would lack them."""
        ...

    @property
    def stride(self) -> int:
        """Steps between observed steps."""
        ...


@dataclass(frozen=True)
class Detection:
    """Downstream stages, injected as callables."""

    make_facts: Callable[[Any], Mapping[int, Any]]  # of a list of record.Site
    make_engine: Callable[[Mapping[int, Any], str, str], DetectEngine]  # facts of the sites, run id, run name
    fold: Callable[..., Sequence[Any]]
    close_quiet: Callable[..., Any]
    queue_resolved: Callable[[Connection, Mapping[str, Any], float, str], None]
    """Queue the message of an incident that a person has resolved: (connection, row, now, public URL)."""
    make_sessions: Callable[[Any], Any] = lambda rows: rows
    """Of rows of the session table what `add_sessions` takes."""
    load_engine: Callable[[bytes, Mapping[int, Any], str, str], DetectEngine] | None = None
    """An engine out of what its `dump` gave, with what `make_engine` takes; a ValueError says that it cannot be."""
