"""Record and tile-map accounting: builds the ledgers of a health snapshot from the counts of each part of the agent.

Thread:     any, under the sender's lock

`queued` and `spooled` are counted where the records are, not derived from the rest, so the identity in health is a real
check.
"""

from __future__ import annotations

from fp8watch_agent.batch import Kind
from fp8watch_agent.health import (
    DROP_MAPS_FULL,
    DROP_MAPS_TOO_LARGE,
    DROP_RING_FULL,
    DROP_RING_TOO_LARGE,
    DROP_SPOOL_DAMAGED,
    DROP_SPOOL_FULL,
    Ledger,
    merged,
)
from fp8watch_agent.ring import Ring
from fp8watch_agent.sender import Sender
from fp8watch_agent.tile_map_queue import MapQueue


def _in_hand(sender: Sender, kind: Kind) -> int:
    parcel = sender.in_hand
    return parcel.amount if parcel is not None and parcel.kind == kind else 0


def records_ledger(ring: Ring, sender: Sender, late: dict[str, int]) -> Ledger:
    """Counts of all records by where they are. `late`: records refused by `record_step`, by reason."""
    spool = sender.spool
    from_ring = {
        DROP_RING_FULL: ring.overwritten_records + ring.torn_records,
        DROP_RING_TOO_LARGE: ring.too_large_records,
    }
    from_spool: dict[str, int] = {}
    if spool is not None:
        from_spool = {DROP_SPOOL_FULL: spool.dropped_full[0], DROP_SPOOL_DAMAGED: spool.dropped_damaged[0]}
    return Ledger(
        produced=ring.pushed_records + sum(late.values()),
        acknowledged=sender.records.acknowledged,
        queued=ring.queued_records() + _in_hand(sender, Kind.BATCH) + sender.num_building,
        spooled=0 if spool is None else spool.num_records,
        dropped=merged(from_ring, from_spool, sender.records.dropped, late),
    )


def maps_ledger(maps: MapQueue, sender: Sender, late: dict[str, int]) -> Ledger:
    """Counts of all tile maps by where they are."""
    spool = sender.spool
    from_queue = {DROP_MAPS_FULL: maps.dropped, DROP_MAPS_TOO_LARGE: maps.too_large}
    from_spool: dict[str, int] = {}
    if spool is not None:
        from_spool = {DROP_SPOOL_FULL: spool.dropped_full[1], DROP_SPOOL_DAMAGED: spool.dropped_damaged[1]}
    return Ledger(
        produced=maps.pushed + sum(late.values()),
        acknowledged=sender.map_counts.acknowledged,
        queued=len(maps) + _in_hand(sender, Kind.MAPS),
        spooled=0 if spool is None else spool.num_maps,
        dropped=merged(from_queue, from_spool, sender.map_counts.dropped, late),
    )
