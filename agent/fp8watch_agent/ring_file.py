"""The ring's file as it lies on disk: its layout, and how to read it once its process is gone.

Upstream:   fp8watch_agent.ring        Downstream: fp8watch_agent.sync
Shapes:     one frame = one step: header, STEP, site ids [N], rows [N] of ROW, extra
Thread:     whoever recovers; no live process may own the file

    page 0         static head, words (each twice, with its complement), session as JSON
    sites          blocks of JSON in zstd, appended as sites are registered
    slot           the one body that is in flight, so that it can be sent again byte for byte
    seals          a CRC a frame, stamped by the sender thread within one poll
    data           frames, addressed by a position that only grows; offset = position mod size

A frame is whole when its header's CRC and its commit word are right: the commit word is written last, and the page
cache outlives a SIGKILL. It does not outlive the machine: after a reboot only sealed frames are believed.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .record import ROW, STEP
from .session import Registration, Session, decode_registration
from .wire import decompress

MAGIC = b"FP8WRNG1"
FRAME_MAGIC = b"fp8wFRM\x01"
ALIGN_BYTES = 64
HEAD_BYTES = 64 << 10  # static head, words and session
SESSION_OFFSET = 1024
WORDS_OFFSET = 512

HEAD = struct.Struct("<8sIIIII36sI")  # magic, data, sites, slot bytes, seals, session bytes, boot id, CRC of it all
WORD = struct.Struct("<QQ")  # value, complement
FRAME = struct.Struct("<8sQQQIIII")  # magic, position, frame number, records before, length, records, extra bytes, CRC
FRAME_CRC_BYTES = FRAME.size - 4
COMMIT = struct.Struct("<I")  # right behind FRAME
SEAL = struct.Struct("<QII")  # frame number, CRC of the body, CRC of both
SLOT = struct.Struct("<QQQIIII")  # end position, frames to, seq, records, kind, body bytes, CRC of body
SITES_BLOCK = struct.Struct("<II")  # bytes, CRC
STEP_BYTES = 56  # STEP, padded so that site ids and rows lie on 8 bytes
BODY_OFFSET = 64

WORD_DURABLE, WORD_DURABLE_FRAME, WORD_NEXT_SEQ = range(3)


@dataclass(frozen=True)
class Layout:
    """Where each part of the file begins; all follows from its size."""

    total_bytes: int

    @property
    def sites_bytes(self) -> int:
        return self.total_bytes // 16

    @property
    def slot_bytes(self) -> int:
        return self.total_bytes // 32

    @property
    def num_seals(self) -> int:
        return min(8192, self.total_bytes // 2048)

    @property
    def sites(self) -> int:
        return HEAD_BYTES

    @property
    def slot(self) -> int:
        return self.sites + self.sites_bytes

    @property
    def seals(self) -> int:
        return self.slot + self.slot_bytes

    @property
    def data(self) -> int:
        return -(-(self.seals + self.num_seals * SEAL.size) // 4096) * 4096

    @property
    def data_bytes(self) -> int:
        return (self.total_bytes - self.data) // ALIGN_BYTES * ALIGN_BYTES


@dataclass
class Frame:
    """One step out of the ring, copied: a later overwrite does not touch it."""

    position: int
    end: int
    number: int
    num_records: int
    steps: npt.NDArray[np.void]  # [1] of STEP
    site_ids: npt.NDArray[np.uint64]  # [N]
    rows: npt.NDArray[np.void]  # [N] of ROW
    logs: dict[str, float]
    batch_id: str | None
    num_extra_bytes: int


def frame_bytes(num_records: int, num_extra: int) -> int:
    """Length of a frame, aligned."""
    raw = BODY_OFFSET + STEP_BYTES + num_records * (8 + ROW.itemsize) + num_extra
    return -(-raw // ALIGN_BYTES) * ALIGN_BYTES


def commit_word(position: int) -> int:
    """Never 0, and another one in the next lap."""
    return ((position // ALIGN_BYTES) & 0x7FFFFFFF) | 0x80000000


def parse_frame(raw: bytes, position: int, number: int, num_records: int, num_extra: int) -> Frame:
    """Body and header of a frame, as copied out of the file, as arrays over that copy."""
    at = BODY_OFFSET
    steps = np.frombuffer(raw, dtype=STEP, count=1, offset=at)
    at += STEP_BYTES
    site_ids = np.frombuffer(raw, dtype=np.uint64, count=num_records, offset=at)
    at += 8 * num_records
    rows = np.frombuffer(raw, dtype=ROW, count=num_records, offset=at)
    at += ROW.itemsize * num_records
    logs: dict[str, float] = {}
    batch_id: str | None = None
    if num_extra:
        logs, batch_id = msgspec.msgpack.decode(raw[at : at + num_extra], type=tuple[dict[str, float], str | None])
    end = position + len(raw)
    return Frame(position, end, number, num_records, steps, site_ids, rows, logs, batch_id, num_extra)


@dataclass
class InFlight:
    """The body that was being sent when the process died."""

    seq: int
    kind: int
    num_records: int
    body: bytes


@dataclass
class Recovered:
    """What a ring file held that no collector has acknowledged, oldest first."""

    registration: Registration
    frames: list[Frame] = field(default_factory=list)
    in_flight: InFlight | None = None
    next_seq: int = 0
    num_lost_frames: int = 0  # damaged: known to have been there
    num_lost_records: int = 0


class DamagedRing(ValueError):
    """A file of which not even the head can be read."""


def read_word(raw: bytes | memoryview, index: int) -> int | None:
    """A word, from whichever of its two copies is whole; None where neither is."""
    values = []
    for copy in range(2):
        value, complement = WORD.unpack_from(raw, WORDS_OFFSET + index * 2 * WORD.size + copy * WORD.size)
        if value ^ complement == (1 << 64) - 1:
            values.append(int(value))
    return max(values) if values else None


def read_head(raw: bytes) -> tuple[Layout, Session, str]:
    """Layout, session and boot id of a ring file.

    Raises:
        DamagedRing: no ring, or its head was damaged.
    """
    if len(raw) < HEAD_BYTES:
        raise DamagedRing(f"{len(raw)} bytes; a ring has more than {HEAD_BYTES}")
    magic, data, sites, slot, seals, size, boot, crc = HEAD.unpack_from(raw)
    session_raw = raw[SESSION_OFFSET : SESSION_OFFSET + size]
    layout = Layout(len(raw))
    same = (layout.data_bytes, layout.sites_bytes, layout.slot_bytes, layout.num_seals) == (data, sites, slot, seals)
    if magic != MAGIC or not same or zlib.crc32(session_raw, zlib.crc32(raw[: HEAD.size - 4])) != crc:
        raise DamagedRing("the head is damaged, or the file was cut")
    try:
        return layout, msgspec.json.decode(session_raw, type=Session), boot.decode("ascii").strip("\0")
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise DamagedRing(f"the session cannot be read: {e}") from e


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
    """Every frame header whose CRC is right, of any lap."""
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
    """Read a dead process's ring: what was neither acknowledged nor spooled.

    Args:
        boot_id: of the machine now; in another boot only sealed frames are believed.
        spooled_to: position up to which the spool holds it, whatever the ring's own word says.

    Raises:
        DamagedRing: nothing can be read.
        OSError: the file cannot be opened.
    """
    raw = path.read_bytes()
    layout, session, written_in = read_head(raw)
    out = Recovered(Registration(session))
    # Without its sites a record still arrives; the collector will say which ones it does not know.
    with contextlib.suppress(ValueError, msgspec.MsgspecError):
        _read_sites(raw, layout, out.registration)
    durable = max(read_word(raw, WORD_DURABLE) or 0, spooled_to)
    frames_to = read_word(raw, WORD_DURABLE_FRAME) or 0
    out.in_flight, durable, slot_frames_to = _read_slot(raw, layout, durable)
    frames_to = max(frames_to, slot_frames_to)
    out.next_seq = read_word(raw, WORD_NEXT_SEQ) or 0
    if out.in_flight is not None:
        out.next_seq = max(out.next_seq, out.in_flight.seq + 1)
    headers = _scan(raw, layout)
    if not headers:
        return out
    # A frame that was begun has overwritten what lies one lap behind its end, whether it was committed or not.
    floor = max(h.position + h.length for h in headers) - layout.data_bytes
    expected = frames_to
    records_seen = None if frames_to else 0
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
    return out


def _believe(raw: bytes, layout: Layout, h: _Header, *, sealed_only: bool) -> Frame | None:
    if h.length != frame_bytes(h.num_records, h.num_extra):
        return None
    body = raw[h.offset : h.offset + h.length]
    at = layout.seals + (h.number % layout.num_seals) * SEAL.size
    number, crc, check = SEAL.unpack_from(raw, at)
    whole = zlib.crc32(raw[at : at + SEAL.size - 4]) == check
    if not whole and any(raw[at : at + SEAL.size]):
        return None  # it was sealed, and the seal is damaged
    sealed = whole and number == h.number  # else it is that of an earlier lap, or none
    if (sealed and zlib.crc32(body[BODY_OFFSET:]) != crc) or (sealed_only and not sealed):
        return None
    try:
        return parse_frame(body, h.position, h.number, h.num_records, h.num_extra)
    except (ValueError, msgspec.MsgspecError):
        return None


def read_boot_id() -> str:
    """Identity of this boot of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def head_bytes(layout: Layout, session: Session) -> bytes:
    """The static head and the session, as `read_head` reads them.

    Raises:
        ValueError: the session is too large for the head.
    """
    session_raw = msgspec.json.encode(session)
    if SESSION_OFFSET + len(session_raw) > HEAD_BYTES:
        raise ValueError(f"session of {len(session_raw)} bytes: at most {HEAD_BYTES - SESSION_OFFSET}; shorten facts")
    parts: tuple[Any, ...] = (
        MAGIC,
        layout.data_bytes,
        layout.sites_bytes,
        layout.slot_bytes,
        layout.num_seals,
        len(session_raw),
        read_boot_id().encode("ascii"),
    )
    crc = zlib.crc32(session_raw, zlib.crc32(HEAD.pack(*parts, 0)[:-4]))
    return HEAD.pack(*parts, crc).ljust(SESSION_OFFSET, b"\0") + session_raw
