"""Accounting of the agent: every record is counted once as acknowledged, queued, spooled or dropped.

Thread:     sender writes; any thread takes a snapshot

    produced == acknowledged + queued + spooled + dropped[by reason]
"""

from __future__ import annotations

from dataclasses import dataclass, field

DROP_RING_FULL = "ring_full"  # the oldest step was overwritten because the sender could not keep up
DROP_RING_TOO_LARGE = "step_too_large"  # one step larger than the ring
DROP_SPOOL_FULL = "spool_full"  # the oldest segment was deleted at the cap
DROP_SPOOL_DAMAGED = "spool_damaged"
DROP_ENCODE = "not_encodable"
DROP_UNREGISTERED = "unregistered"  # the collector keeps asking for sites that it refused
DROP_MAPS_FULL = "queue_full"
DROP_MAPS_TOO_LARGE = "map_too_large"  # one map of more tiles than a collector takes
DROP_CLOSED = "closed"  # recorded after close
DROP_REENTRANT = "reentrant"  # recorded from inside another record call (a signal handler, a second thread)


@dataclass(frozen=True)
class Ledger:
    """Counts of everything that was recorded, in records (or tile maps), by where it is."""

    produced: int = 0
    acknowledged: int = 0  # committed by the collector
    queued: int = 0  # in the ring, or in flight
    spooled: int = 0  # on disk, waiting for the collector
    dropped: dict[str, int] = field(default_factory=dict)  # by reason

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        """Whether the identity in the module docstring holds."""
        return self.produced == self.acknowledged + self.queued + self.spooled + self.num_dropped


@dataclass(frozen=True)
class Health:
    """A snapshot of the agent: exact when taken on the thread that records, or while nobody records."""

    state: str  # up | away | held | local | starting | closed | inert (after a fork)
    records: Ledger = field(default_factory=Ledger)
    maps: Ledger = field(default_factory=Ledger)
    num_steps: int = 0  # recorded
    num_batches: int = 0  # acknowledged
    num_retries: int = 0
    num_bytes: int = 0  # acknowledged, on the wire
    internal_errors: dict[str, int] = field(default_factory=dict)  # by place
    last_error: str = ""
    gauges: dict[str, float] = field(default_factory=dict)

    def as_floats(self) -> dict[str, float]:
        """Values for the header of each batch."""
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


class DeliveryCounts:
    """The sender's counters: acknowledged and dropped after leaving the ring."""

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
