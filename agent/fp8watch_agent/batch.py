"""Bundles ring frames into encoded batches, and splits a batch that the collector finds too large.

Upstream:   fp8watch_agent.sender
Downstream: fp8watch_agent.wire
Shapes:     frames of one step each -> one parcel: (kind, seq, body, number of records)
Thread:     sender
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np

from fp8watch_agent.bounded_decompress import WireError
from fp8watch_agent.expert_vectors import unpack
from fp8watch_agent.record import ROW, STEP, TileFlag, TileMap
from fp8watch_agent.ring_file import Frame
from fp8watch_agent.session import Session
from fp8watch_agent.wire import (
    MAX_HEADER_BYTES,
    SPLIT_SHIFT,
    Header,
    decode_batch,
    decode_tile_maps,
    encode_batch,
    encode_tile_maps,
    in_step_order,
    rows_of,
)

MAX_BATCH_STEPS = 256
BATCH_STEPS = 8  # that a batch waits for: their columns differ little, and its fixed costs are paid once
LINGER_INTERVALS = 8  # batch intervals for which it waits at most: below late_rank_s of the detectors
PROMPT_STEPS = 16  # of a session, that leave without waiting: somebody is looking
MAX_EXTRA_BYTES = 32 << 10  # logs and batch ids of one batch, before they become header columns
MAX_RAW_BYTES = 8 << 20
MAX_SPLIT_PATH = 1 << (63 - SPLIT_SHIFT)


class Kind(IntEnum):
    """Content of a body: a batch of records, or tile maps."""

    BATCH = 1
    MAPS = 2


@dataclass(frozen=True)
class Parcel:
    """One encoded body with its idempotency key. The same key always has the same bytes."""

    kind: Kind
    seq: int
    body: bytes
    amount: int  # records, or tile maps
    end: int = 0  # ring position after its last frame; 0 when it does not come from the ring
    frames_to: int = 0
    precious: bool = False  # dropped last when the disk is full


class BatchBuilder:
    """Accumulates frames until the next one does not fit."""

    def __init__(self, session: Session, max_records: int) -> None:
        self._session = session
        self._max_records = max_records
        self.frames: list[Frame] = []
        self.num_records = 0
        self._raw_bytes = 0
        self._extra_bytes = 0

    def fits(self, frame: Frame) -> bool:
        """Whether a frame can join: steps ascend, or it has more of the last one, and the limits hold. An empty builder
        takes any frame.
        """
        if not self.frames:
            return True
        first, last = self.frames[0].steps["step"][0], self.frames[-1].steps["step"][0]
        step = frame.steps["step"][0]
        return bool(
            len(self.frames) < MAX_BATCH_STEPS
            and (last < step or _is_more(frame, self.frames[-1]))
            and step - first < 1 << 32
            and self.num_records + frame.num_records <= self._max_records
            and self._raw_bytes + frame.rows.nbytes <= MAX_RAW_BYTES
            and self._extra_bytes + frame.num_extra_bytes <= MAX_EXTRA_BYTES
        )

    def add(self, frame: Frame) -> None:
        """Append a frame for which `fits` is true."""
        self._raw_bytes += frame.rows.nbytes
        self._extra_bytes += frame.num_extra_bytes
        self.num_records += frame.num_records
        self.frames.append(frame)

    def build(
        self, seq: int, clock: float, health: dict[str, float], yield_gil: Callable[[], None] = lambda: None
    ) -> Parcel:
        """Encode the collected frames as one body. `yield_gil` is called between pieces of the work.

        Raises:
            WireError, ValueError: they cannot be encoded.
        """
        frames = self.frames
        opens = [not i or not _is_more(f, frames[i - 1]) for i, f in enumerate(frames)]
        of_steps = [f for f, first in zip(frames, opens, strict=True) if first]  # the frame that each step began with
        steps = np.concatenate([f.steps for f in of_steps])
        header = Header(
            run=self._session.run_id,
            session=self._session.session,
            rank=self._session.rank,
            seq=seq,
            step0=int(steps["step"][0]),
            num_steps=len(steps),
            num_records=self.num_records,
            clock=clock,
            health=health,
            logs=_columns_of_logs(of_steps),
            batch_ids=[f.batch_id for f in of_steps] if any(f.batch_id is not None for f in of_steps) else [],
        )
        if len(msgspec.msgpack.encode(header)) > MAX_HEADER_BYTES:  # thousands of names, each logged once
            header = msgspec.structs.replace(header, logs={})
        step = np.repeat([f.steps["step"][0] for f in frames], [f.num_records for f in frames])
        site = np.concatenate([f.site_ids for f in frames])
        rows = np.empty(self.num_records, ROW)
        at = 0
        for f in frames:
            rows[at : at + f.num_records] = f.rows
            at += f.num_records
            yield_gil()
        if not all(opens):
            later = [f.site_ids for f, first in zip(frames, opens, strict=True) if not first]
            order = in_step_order(step, site, [f.site_ids for f in of_steps] + later)
            step, site, rows = step[order], site[order], rows[order]
        experts = [v for f in frames for v in unpack(f.experts, int(f.steps["step"][0]))]
        body = encode_batch(header, steps, step, site, rows, experts=experts, yield_gil=yield_gil)
        yield_gil()
        precious = any(f.precious for f in frames)
        return Parcel(Kind.BATCH, seq, body, self.num_records, frames[-1].end, frames[-1].number + 1, precious)


def _is_more(frame: Frame, before: Frame) -> bool:
    return frame.more and frame.steps.tobytes() == before.steps.tobytes()


def _columns_of_logs(frames: list[Frame]) -> dict[str, list[float | None]]:
    names: dict[str, None] = {}
    for f in frames:
        names.update(dict.fromkeys(f.logs))
    return {name: [f.logs.get(name) for f in frames] for name in names}


def complete(frames: list[Frame], waited_intervals: float, urgent_to: int) -> bool:
    """Whether frames that have waited for an interval at least leave now, or wait for more steps.

    Args:
        frames: what is in the batch so far.
        waited_intervals: how long the first has waited, in batch intervals.
        urgent_to: frames before this number do not wait.
    """
    return (
        not frames
        or frames[0].number < max(urgent_to, PROMPT_STEPS)
        or len(frames) >= BATCH_STEPS
        or any(f.precious for f in frames)
        or waited_intervals >= LINGER_INTERVALS
    )


def batches(session: Session, frames: Iterable[Frame], max_records: int) -> Iterable[BatchBuilder]:
    """Group frames into builders, in order."""
    builder = BatchBuilder(session, max_records)
    for frame in frames:
        if not builder.fits(frame):
            yield builder
            builder = BatchBuilder(session, max_records)
        builder.add(frame)
    if builder.frames:
        yield builder


def end_parcel(session: Session, seq: int, clock: float, health: dict[str, float]) -> Parcel:
    """A batch without steps, sent for its health alone."""
    header = Header(
        run=session.run_id, session=session.session, rank=session.rank, seq=seq, step0=0, num_steps=0,
        num_records=0, clock=clock, health=health,
    )  # fmt: skip
    none = np.zeros(0, np.int64)
    return Parcel(Kind.BATCH, seq, encode_batch(header, np.zeros(0, STEP), none, none, np.zeros(0, ROW)), 0)


def maps_parcel(session: Session, seq: int, maps: list[TileMap]) -> Parcel:
    """Encode tile maps as one body."""
    body = encode_tile_maps(session.run_id, session.session, session.rank, seq, maps)
    broken = TileFlag.NAN | TileFlag.INF | TileFlag.SENTINEL | TileFlag.OFF_SCALE
    return Parcel(Kind.MAPS, seq, body, len(maps), precious=any(bool((m.flags & broken).any()) for m in maps))


def split(parcel: Parcel) -> tuple[Parcel, Parcel] | None:
    """Two halves of a body that the collector finds too large: by steps, then by records. None: it cannot be split, or
    passes a limit of the wire format, so that it cannot be read here either.

    Keys and bytes depend on the parent alone, so splitting it again after a restart gives the same halves.
    """
    try:
        return _halves(parcel)
    except WireError:
        return None


def _halves(parcel: Parcel) -> tuple[Parcel, Parcel] | None:
    path = (parcel.seq >> SPLIT_SHIFT) or 1
    if path * 2 + 1 >= MAX_SPLIT_PATH:
        return None
    base = parcel.seq & ((1 << SPLIT_SHIFT) - 1)
    seqs = [((path * 2 + k) << SPLIT_SHIFT) | base for k in range(2)]
    if parcel.kind == Kind.MAPS:
        got = decode_tile_maps(parcel.body)
        if len(got.maps) < 2:
            return None
        middle = len(got.maps) // 2
        left, right = (
            Parcel(Kind.MAPS, seq, encode_tile_maps(got.run, got.session, got.rank, seq, maps), len(maps))
            for seq, maps in zip(seqs, (got.maps[:middle], got.maps[middle:]), strict=True)
        )
        return left, right
    batch = decode_batch(parcel.body)
    rows, header, num_steps = rows_of(batch), batch.header, len(batch.steps)
    if num_steps > 1:
        cut = batch.steps["step"][num_steps // 2]
        takes = [(slice(None, num_steps // 2), batch.step < cut), (slice(num_steps // 2, None), batch.step >= cut)]
    elif len(rows) > 1:
        place = np.arange(len(rows))
        takes = [(slice(None), place < len(rows) // 2), (slice(None), place >= len(rows) // 2)]
    else:
        return None
    halves: list[Parcel] = []
    for seq, (of_steps, of_rows) in zip(seqs, takes, strict=True):
        steps = batch.steps[of_steps]
        part = msgspec.structs.replace(
            header,
            seq=seq,
            step0=int(steps["step"][0]),
            num_steps=len(steps),
            num_records=int(of_rows.sum()),
            logs={name: values[of_steps] for name, values in header.logs.items()},
            batch_ids=header.batch_ids[of_steps],
        )
        kept, mine = batch.experts if num_steps > 1 or not halves else [], set(steps["step"].tolist())
        experts = [v for v in kept if v.step in mine]
        body = encode_batch(part, steps, batch.step[of_rows], batch.site[of_rows], rows[of_rows], experts=experts)
        halves.append(Parcel(Kind.BATCH, seq, body, part.num_records))
    return halves[0], halves[1]


def rekeyed(parcel: Parcel) -> Parcel | None:
    """The same content under another key: its own was taken by somebody else's body. None: there is no key left, or the
    body cannot be read here.

    The key is the one of its first half, which is never made of a body that came back with this answer.
    """
    try:
        return _under_another_key(parcel)
    except WireError:
        return None


def _under_another_key(parcel: Parcel) -> Parcel | None:
    path = (parcel.seq >> SPLIT_SHIFT) or 1
    if path * 2 >= MAX_SPLIT_PATH:
        return None
    seq = (path * 2) << SPLIT_SHIFT | parcel.seq & ((1 << SPLIT_SHIFT) - 1)
    if parcel.kind == Kind.MAPS:
        got = decode_tile_maps(parcel.body)
        body = encode_tile_maps(got.run, got.session, got.rank, seq, got.maps)
    else:
        batch = decode_batch(parcel.body)
        header = msgspec.structs.replace(batch.header, seq=seq)
        body = encode_batch(header, batch.steps, batch.step, batch.site, rows_of(batch), experts=batch.experts)
    return Parcel(parcel.kind, seq, body, parcel.amount)
