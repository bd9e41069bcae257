"""Recovers unsent records from the ring file of a dead process.

Thread:     the process that recovers; no live one may own the file

Damage costs only the frames that it hits: they are found by their headers wherever they lie. Gaps in the frame numbers,
the record count that each header carries, and the totals in the head tell how many records were lost. The head says how
long the file was, so one that was cut is read as far as it goes.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fp8watch_agent.ring_file import (
    ALIGN_BYTES,
    BODY_OFFSET,
    COMMIT,
    FRAME,
    FRAME_CRC_BYTES,
    FRAME_MAGIC,
    HEAD_BYTES,
    SEAL,
    SITES_BLOCK,
    SLOT,
    WORD,
    WORD_DURABLE,
    WORD_DURABLE_FRAME,
    WORD_NEXT_SEQ,
    WORD_PUSHED_FRAMES,
    WORD_PUSHED_RECORDS,
    WORDS_OFFSET,
    Frame,
    Layout,
    commit_word,
    frame_bytes,
    parse_frame,
    read_head,
)
from fp8watch_agent.session import Registration, decode_registration
from fp8watch_agent.wire import decompress


@dataclass
class InFlight:
    """The body that was being sent when the process died."""

    seq: int
    kind: int
    num_records: int
    body: bytes


@dataclass
class Recovered:
    """Contents of a ring file that no collector has acknowledged, oldest first."""

    registration: Registration
    frames: list[Frame] = field(default_factory=list)
    in_flight: InFlight | None = None
    next_seq: int = 0
    num_lost_frames: int = 0  # damaged records that are known to have existed
    num_lost_records: int = 0
    num_missing_bytes: int = 0  # cut off at the end of the file


def read_word(raw: bytes | memoryview, index: int) -> int | None:
    """A word, from whichever of its two copies is valid; None when neither is."""
    values = []
    for copy in range(2):
        value, complement = WORD.unpack_from(raw, WORDS_OFFSET + index * 2 * WORD.size + copy * WORD.size)
        if value ^ complement == (1 << 64) - 1:
            values.append(int(value))
    return max(values) if values else None


def note_durable(path: Path, position: int) -> None:
    """Store in a dead process's ring up to which position the spool has it: `recover` then needs no spool to tell.

    In place, and on disk when this returns: it takes no room.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("r+b", buffering=0) as f:
        head = f.read(HEAD_BYTES)
        position = max(position, read_word(head, WORD_DURABLE) or 0)
        f.seek(WORDS_OFFSET + WORD_DURABLE * 2 * WORD.size)
        f.write(2 * WORD.pack(position, position ^ ((1 << 64) - 1)))
        os.fsync(f.fileno())


def _read_sites(raw: bytes, layout: Layout, registration: Registration) -> None:
    at, end = layout.sites, layout.sites + layout.sites_bytes
    while at + SITES_BLOCK.size <= end:
        size, crc = SITES_BLOCK.unpack_from(raw, at)
        block = raw[at + SITES_BLOCK.size : at + SITES_BLOCK.size + size]
        if size == 0 or at + SITES_BLOCK.size + size > end or zlib.crc32(block) != crc:
            return
        registration.add(decode_registration(decompress(block)).sites())
        at += SITES_BLOCK.size + size


def _read_slot(raw: bytes, layout: Layout, durable: int) -> tuple[InFlight | None, int, int]:
    end, frames_to, seq, records, kind, size, crc = SLOT.unpack_from(raw, layout.slot)
    body = raw[layout.slot + SLOT.size : layout.slot + SLOT.size + size]
    head_crc = zlib.crc32(raw[layout.slot : layout.slot + SLOT.size - 4])
    if size == 0 or SLOT.size + size > layout.slot_bytes or zlib.crc32(body, head_crc) != crc or end <= durable:
        return None, durable, 0
    return InFlight(seq=seq, kind=kind, num_records=records, body=body), end, frames_to


@dataclass(frozen=True)
class _Header:
    position: int
    number: int
    records_before: int
    length: int
    num_records: int
    num_extra: int
    offset: int
    committed: bool


def _scan(raw: bytes, layout: Layout) -> list[_Header]:
    """All frame headers with a valid CRC, of any lap, whose frame ends within the bytes that are there."""
    found = []
    at = raw.find(FRAME_MAGIC, layout.data)
    while at >= 0:
        if (at - layout.data) % ALIGN_BYTES == 0 and at + BODY_OFFSET <= len(raw):
            _, position, number, before, length, records, extra, crc = FRAME.unpack_from(raw, at)
            good = zlib.crc32(raw[at : at + FRAME_CRC_BYTES]) == crc
            if good and position % layout.data_bytes == at - layout.data and at + length <= len(raw):
                committed = COMMIT.unpack_from(raw, at + FRAME.size)[0] == commit_word(position)
                found.append(_Header(position, number, before, length, records, extra, at, committed))
        at = raw.find(FRAME_MAGIC, at + 1)
    return sorted(found, key=lambda h: h.position)


def recover(path: Path, boot_id: str, spooled_to: int = 0) -> Recovered:
    """Read a dead process's ring: everything neither acknowledged nor spooled.

    Args:
        boot_id: of the machine now; in another boot only sealed frames are believed.
        spooled_to: position up to which the spool holds it, whatever the ring's own word says.

    Raises:
        DamagedRing: nothing can be read.
        OSError: the file cannot be opened.
    """
    there = path.read_bytes()
    layout, session, written_in = read_head(there)
    there = there[: layout.total_bytes]
    raw = there.ljust(layout.total_bytes, b"\0")  # what is missing reads as never written
    out = Recovered(Registration(session), num_missing_bytes=len(raw) - len(there))
    # Records are sent without their sites, too; the collector then names the ones that it does not know.
    with contextlib.suppress(ValueError, msgspec.MsgspecError):
        _read_sites(raw, layout, out.registration)
    durable = max(read_word(raw, WORD_DURABLE) or 0, spooled_to)
    frames_to = read_word(raw, WORD_DURABLE_FRAME) or 0
    out.in_flight, durable, slot_frames_to = _read_slot(raw, layout, durable)
    frames_to = max(frames_to, slot_frames_to)
    out.next_seq = read_word(raw, WORD_NEXT_SEQ) or 0
    if out.in_flight is not None:
        out.next_seq = max(out.next_seq, out.in_flight.seq + 1)
    headers = _scan(there, layout)
    # A frame that was begun has overwritten the data one lap before its end, committed or not.
    floor = max((h.position + h.length for h in headers), default=0) - layout.data_bytes
    expected = frames_to
    records_seen = None if frames_to else 0
    settled = [h for h in headers if h.position + h.length <= durable]
    if settled and settled[-1].number + 1 >= expected:  # its number may not have been noted, and its records are not
        expected, records_seen = settled[-1].number + 1, settled[-1].records_before + settled[-1].num_records
    for h in headers:
        if h.position < max(durable, floor) or not h.committed:
            continue
        frame = _believe(raw, layout, h, sealed_only=written_in != boot_id)
        if frame is None:
            continue
        out.num_lost_frames += max(0, h.number - expected)
        if records_seen is not None:
            out.num_lost_records += max(0, h.records_before - records_seen)
        expected, records_seen = h.number + 1, h.records_before + h.num_records
        out.frames.append(frame)
    num_frames, num_records = read_word(raw, WORD_PUSHED_FRAMES), read_word(raw, WORD_PUSHED_RECORDS)
    if num_frames is not None and num_frames > expected:  # what lay behind the last frame that is left
        out.num_lost_frames += num_frames - expected
        if num_records is not None and records_seen is not None:
            out.num_lost_records += max(0, num_records - records_seen)
    return out


def _believe(raw: bytes, layout: Layout, h: _Header, *, sealed_only: bool) -> Frame | None:
    if h.length != frame_bytes(h.num_records, h.num_extra):
        return None
    body = raw[h.offset : h.offset + h.length]
    at = layout.seals + (h.number % layout.num_seals) * SEAL.size
    number, crc, check = SEAL.unpack_from(raw, at)
    whole = zlib.crc32(raw[at : at + SEAL.size - 4]) == check
    if not whole and any(raw[at : at + SEAL.size]):
        return None  # sealed, and the seal is damaged
    sealed = whole and number == h.number  # else the seal belongs to an earlier lap, or there is none
    if (sealed and zlib.crc32(body[BODY_OFFSET:]) != crc) or (sealed_only and not sealed):
        return None
    try:
        return parse_frame(body, h.position, h.number, h.num_records, h.num_extra)
    except (ValueError, msgspec.MsgspecError):
        return None
