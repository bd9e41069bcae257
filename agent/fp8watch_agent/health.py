"""The agent's own books: every record that was handed over is in exactly one column of them.

Upstream:   fp8watch_agent.accounting     Downstream: fp8watch_agent.wire
Thread:     sender writes; any thread takes a snapshot

    produced == acknowledged + queued + spooled + dropped[by reason]
"""

from __future__ import annotations

from dataclasses import dataclass, field

DROP_RING_FULL = "ring_full"  # the oldest went, because the sender could not keep up
DROP_RING_TOO_LARGE = "step_too_large"  # one step larger than the ring
DROP_SPOOL_FULL = "spool_full"  # the oldest segment went at the cap
DROP_SPOOL_DAMAGED = "spool_damaged"
DROP_ENCODE = "not_encodable"
DROP_UNREGISTERED = "unregistered"  # the collector keeps asking for sites that it has refused
DROP_MAPS_FULL = "queue_full"
DROP_CLOSED = "closed"  # handed over after close
DROP_REENTRANT = "reentrant"  # handed over from inside another hand-over (a signal handler, a second thread)


@dataclass(frozen=True)
class Ledger:
    """Where everything is that was handed over, in records (or in tile maps)."""

    produced: int = 0
    acknowledged: int = 0  # the collector has committed it
    queued: int = 0  # in the ring, or in flight
    spooled: int = 0  # on disk, waiting for a collector
    dropped: dict[str, int] = field(default_factory=dict)  # by reason

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        """The identity of this file."""
        return self.produced == self.acknowledged + self.queued + self.spooled + self.num_dropped


@dataclass(frozen=True)
class Health:
    """A snapshot of the agent: exact when taken on the thread that records, or while nobody records."""

    state: str  # up | away | held | local | starting | closed | inert (after a fork)
    records: Ledger = field(default_factory=Ledger)
    maps: Ledger = field(default_factory=Ledger)
    num_steps: int = 0  # handed over
    num_batches: int = 0  # acknowledged
    num_retries: int = 0
    num_bytes: int = 0  # acknowledged, on the wire
    internal_errors: dict[str, int] = field(default_factory=dict)  # by place
    last_error: str = ""
    gauges: dict[str, float] = field(default_factory=dict)

    def as_floats(self) -> dict[str, float]:
        """What travels in the header of each batch."""
        out = {
            "produced": float(self.records.produced),
            "acknowledged": float(self.records.acknowledged),
            "queued": float(self.records.queued),
            "spooled": float(self.records.spooled),
            "steps": float(self.num_steps),
            "retries": float(self.num_retries),
        }
        out.update({f"dropped_{reason}": float(n) for reason, n in self.records.dropped.items()})
        out.update({f"dropped_maps_{reason}": float(n) for reason, n in self.maps.dropped.items()})
        out["internal_errors"] = float(sum(self.internal_errors.values()))
        out.update(self.gauges)
        return out


class Books:
    """The sender's columns: what was acknowledged or dropped after it had left the ring."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.dropped: dict[str, int] = {}

    def drop(self, reason: str, count: int) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


def merged(*counts: dict[str, int]) -> dict[str, int]:
    """Sum of drop counts by reason, without the zeros."""
    out: dict[str, int] = {}
    for part in counts:
        for reason, n in part.items():
            if n:
                out[reason] = out.get(reason, 0) + n
    return out
