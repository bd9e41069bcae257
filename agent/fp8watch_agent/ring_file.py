"""On-disk layout of the ring file.

Shapes:     one frame = one step: header, STEP, site ids [N], rows [N] of ROW, extra
Thread:     any; only data and pure functions, but for `create_file`

    page 0         static head, words (each twice, with its complement), session as JSON
    sites          blocks of JSON in zstd, appended as sites are registered
    slot           the one body that is in flight, so that it can be sent again byte for byte
    seals          a CRC a frame, stamped by the sender thread within one poll
    data           frames, addressed by a position that only grows; offset = position mod size

A frame is whole when its header's CRC and its commit word are right: the commit word is written last, and the page
cache outlives a SIGKILL. It does not outlive the machine: after a reboot only sealed frames are believed. So it is of a
file that is written behind its memory (fp8watch_agent.ring_memory).
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import QUANTISER_FAULTS, ROW, STEP, StepPresent, StepStatus
from fp8watch_agent.session import Session

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
SITES_SHARE = 16  # of the file, for facts of sites: one part in so many
NEW_SUFFIX = ".new"  # until the file is locked and whole

WORD_DURABLE, WORD_DURABLE_FRAME, WORD_NEXT_SEQ, WORD_PUSHED_FRAMES, WORD_PUSHED_RECORDS = range(5)

NO_BOOT = "none"
"""In place of a boot id: of a file that is written behind its memory, and may end in the middle of a frame."""

BROKEN = (
    "num_nan", "num_inf", "num_sentinel_tiles", "num_off_scale_tiles", "num_nonfinite_outputs", *QUANTISER_FAULTS,
)  # fmt: skip
"""Counts that are 0 in every healthy step."""


@dataclass(frozen=True)
class Layout:
    """Where each part of the file begins; all follows from its size."""

    total_bytes: int

    @property
    def sites_bytes(self) -> int:
        return self.total_bytes // SITES_SHARE

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


class Extra(msgspec.Struct, array_like=True):
    """What of a step is in no column."""

    logs: dict[str, float]
    batch_id: str | None
    experts: dict[int, bytes] = {}  # site -> VECTOR of each of its experts
    more: bool = False


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
    num_extra_bytes: int  # of logs and batch id
    experts: dict[int, bytes] = field(default_factory=dict)  # site -> VECTOR of each of its experts
    more: bool = False  # rows of more sites of the step in the frame before (Recorder.record_more)

    @property
    def precious(self) -> bool:
        """Whether something broke in this step, or it ended badly: when room runs out, it goes last."""
        step = self.steps[0]
        lost = bool(int(step["present"]) & StepPresent.LOSS) and not np.isfinite(step["loss"])
        return lost or int(step["status"]) != StepStatus.OK or any(self.rows[name].any() for name in BROKEN)


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
    experts: dict[int, bytes] = {}
    more = False
    if num_extra:
        extra = msgspec.msgpack.decode(raw[at : at + num_extra], type=Extra)
        logs, batch_id, experts, more = extra.logs, extra.batch_id, extra.experts, extra.more
    end, small = position + len(raw), num_extra - sum(map(len, experts.values()))
    return Frame(position, end, number, num_records, steps, site_ids, rows, logs, batch_id, small, experts, more)


class DamagedRing(ValueError):
    """A file of which not even the head can be read."""


def read_head(raw: bytes) -> tuple[Layout, Session, str]:
    """Layout, session and boot id of a ring file. The layout is that of the whole file, however much of it is left.

    Raises:
        DamagedRing: no ring, or its head was damaged.
    """
    if len(raw) < HEAD_BYTES:
        raise DamagedRing(f"{len(raw)} bytes are left; the head alone has {HEAD_BYTES}")
    magic, data, sites, slot, seals, size, boot, crc = HEAD.unpack_from(raw)
    session_raw = raw[SESSION_OFFSET : SESSION_OFFSET + size]
    layout = _layout_of(data, sites, slot, seals)
    if magic != MAGIC or layout is None or zlib.crc32(session_raw, zlib.crc32(raw[: HEAD.size - 4])) != crc:
        raise DamagedRing("the head is damaged")
    try:
        return layout, msgspec.json.decode(session_raw, type=Session), boot.decode("ascii").strip("\0")
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise DamagedRing(f"the session cannot be read: {e}") from e


def _layout_of(data: int, sites: int, slot: int, seals: int) -> Layout | None:
    """The layout with parts of these sizes: the length of the file is not believed."""
    for total_bytes in range(sites * SITES_SHARE, (sites + 1) * SITES_SHARE):
        layout = Layout(total_bytes)
        if (layout.data_bytes, layout.sites_bytes, layout.slot_bytes, layout.num_seals) == (data, sites, slot, seals):
            return layout
    return None


def read_boot_id() -> str:
    """Identity of this boot of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def head_bytes(layout: Layout, session: Session, boot_id: str) -> bytes:
    """The static head and the session, as `read_head` reads them.

    Args:
        boot_id: in which frames without a seal are believed, too; `NO_BOOT` for none.

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
        boot_id.encode("ascii"),
    )
    crc = zlib.crc32(session_raw, zlib.crc32(HEAD.pack(*parts, 0)[:-4]))
    return HEAD.pack(*parts, crc).ljust(SESSION_OFFSET, b"\0") + session_raw


def create_file(path: Path, total_bytes: int) -> int:
    """A new file, locked by this process and with all of its room taken.

    Raises:
        OSError: it exists, or the disk is full: an error here, not a SIGBUS in a step.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, total_bytes)
        return fd
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
