"""Names in the queue: two streams, their lanes, the subject and the message id of a batch.

Shapes:     header of a batch -> subject, message id
Thread:     any; pure

A subject is `<prefix>.<tenant>.<run>.<rank group>`, and `<prefix>.<tenant>.<run>.<shard>.<rank group>` where the run lies on a
shard. The rank group is the lane, the unit of order: a lane is read by one worker at a time, and its batches go to one
database, so that one which is away holds back its own lanes. Urgent batches have a stream of their own, so that healthy
ones can never take its room.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass

NUM_LANES = 8
"""Workers that can be busy at once. Part of the subjects: a queue must be empty before it changes."""
NUM_SHARD_LANES = 4
"""Of each shard: a lane costs the queue's servers two replicated consumers."""
RANKS_PER_LANE = 256
KEY_HEADER = "Fp8watch-Session-Key-Sha256"
ID_HEADER = "Nats-Msg-Id"
WHY_HEADER = "Fp8watch-Refused"
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


@dataclass(frozen=True)
class Stream:
    """One stream of the queue.

    Args:
        name: in JetStream.
        prefix: first token of its subjects.
        share: of the queue's bytes, in eighths.
        work: whether workers take its messages away; else it keeps the newest.
    """

    name: str
    prefix: str
    share: int
    work: bool = True


HEALTHY = Stream("FP8WATCH", "fp8", 6)
URGENT = Stream("FP8WATCH_URGENT", "fp8-urgent", 1)
REFUSED = Stream("FP8WATCH_REFUSED", "fp8-refused", 1, work=False)
"""Batches that were accepted and that no worker could commit, for people to look at."""
STREAMS = (HEALTHY, URGENT, REFUSED)
WORK = (URGENT, HEALTHY)
"""In the order in which they are served."""


def num_lanes_of(shard: str) -> int:
    """How many lanes a shard has, or the home database ("")."""
    return NUM_SHARD_LANES if shard else NUM_LANES


def lane_of(run_id: str, rank: int, shard: str = "") -> int:
    """Lane of a rank: the same for all its batches on a shard."""
    return (zlib.crc32(run_id.encode()) + rank // RANKS_PER_LANE) % num_lanes_of(shard)


def subject_of(stream: Stream, tenant: str, run_id: str, rank: int, shard: str = "") -> str:
    """Subject of a batch."""
    return f"{run_subject(stream, tenant, run_id, shard)}{lane_of(run_id, rank, shard)}"


def run_subject(stream: Stream, tenant: str, run_id: str, shard: str) -> str:
    """What the subjects of a run's batches begin with, the dot included."""
    return f"{stream.prefix}.{_token(tenant)}.{_token(run_id)}.{f'{shard}.' if shard else ''}"


def lane_subject(stream: Stream, lane: int, shard: str = "") -> str:
    """Filter for all batches of a lane."""
    return f"{stream.prefix}.*.*.{f'{shard}.' if shard else ''}{lane}"


def consumer_of(lane: int, shard: str = "") -> str:
    """Name of the durable consumer of a lane, the same in both streams."""
    return f"lane-{f'{shard}-' if shard else ''}{lane}"


def message_id(run_id: str, session: str, rank: int, seq: int, sha256: bytes) -> str:
    """Message id of a batch: its key and its body. Another body under the same key is another message, not a repetition."""
    return f"{_token(run_id)}.{_token(session)}.{rank}.{seq}.{sha256.hex()[:32]}"


def _token(name: str) -> str:
    """A name as one token of a subject; `~` begins no plain one."""
    return name if _PLAIN.match(name) else f"~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
