"""Ring buffer of the last steps in a memory-mapped file that survives a SIGKILL of its process.

Upstream:   fp8watch_agent.recorder
Downstream: fp8watch_agent.sender
Shapes:     one step of N records -> one frame (layout: fp8watch_agent.ring_file)
Thread:     one producer (training), one consumer (sender)

A push copies memory and does nothing else: no system call, no lock, no wake-up. Both sides share a deque of frame
descriptors, and whoever pops a descriptor accounts for its records, so each is counted once: the producer pops what it
is about to overwrite, the consumer what it takes. A frame that is overwritten while the consumer copies it is detected
afterwards (`_limit` works as a seqlock) and counted as dropped by the consumer.
"""

from __future__ import annotations

import contextlib
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from fp8watch_agent.file_system import maps_well
from fp8watch_agent.record import ROW, STEP, Site
from fp8watch_agent.ring_file import (
    BODY_OFFSET,
    COMMIT,
    FRAME,
    FRAME_CRC_BYTES,
    FRAME_MAGIC,
    NO_BOOT,
    SEAL,
    SITES_BLOCK,
    SLOT,
    STEP_BYTES,
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
    head_bytes,
    parse_frame,
    read_boot_id,
)
from fp8watch_agent.ring_memory import PIECE_BYTES, RingMemory
from fp8watch_agent.session import Session, encode_registration

RING_SUFFIX = ".ring"
_MASK = (1 << 64) - 1


class _Slot(NamedTuple):
    position: int
    length: int
    number: int
    num_records: int
    num_extra: int


class Ring:
    """Bounded by the size of its file; the oldest steps are overwritten, and counted."""

    def __init__(self, directory: Path | None, session: Session, total_bytes: int) -> None:
        """Create the file and touch every page of it, so that no step takes a page fault.

        Args:
            directory: None keeps the ring in memory only: it then does not outlive the process.

        Raises:
            OSError: the file cannot be made, or the disk has no room for it.
        """
        self.layout = layout = Layout(total_bytes)
        self._data, self._size, self._max_frames = layout.data, layout.data_bytes, layout.num_seals
        self.session = session
        self.path = None if directory is None else directory / f"{session.session}{RING_SUFFIX}"
        mapped = directory is None or maps_well(directory)
        head = head_bytes(layout, session, read_boot_id() if mapped else NO_BOOT)
        self._memory = RingMemory(self.path, total_bytes, mapped=mapped)
        self._fresh: RingMemory | None = None  # takes the place of one whose file was deleted, at the next step
        self._map = self._memory.map
        self._map[: len(head)] = head
        self._durable = 0
        for word in (WORD_DURABLE, WORD_DURABLE_FRAME, WORD_NEXT_SEQ, WORD_PUSHED_FRAMES, WORD_PUSHED_RECORDS):
            self._put_word(word, 0)
        self._memory.write(0, layout.sites)
        if (failed := self._memory.failed) is not None:
            self._memory.discard()
            raise failed
        self._memory.publish()
        self._frames: deque[_Slot] = deque()
        self._limit = 0  # write position of the producer, set before it writes
        self._head = 0
        self._next_number = 0
        self._sealed_to = 0
        self._declined: Frame | None = None  # claimed by the consumer, and kept for its next batch
        self._sites_at = self._sites_written = layout.sites
        # written by the producer
        self.pushed_records = 0
        self.pushed_frames = 0
        self.overwritten_records = 0
        self.too_large_records = 0
        # written by the consumer
        self.torn_records = 0

    # --- producer: the training thread

    def push(
        self, step: bytes, site_ids: npt.NDArray[np.uint64], rows: npt.NDArray[np.void], extra: bytes = b""
    ) -> None:
        """Append one step. O(bytes), and O(frames overwritten).

        Args:
            step: one STEP as bytes.
            site_ids: [N] uint64, contiguous.
            rows: [N] of ROW, contiguous.
            extra: what is not in a column: logs and batch id as msgpack.
        """
        if self._fresh is not None:
            self._go_over(self._fresh)
        n = len(rows)
        size = self._size
        length = frame_bytes(n, len(extra))
        if length > size:
            self.too_large_records += n
            self.pushed_records += n
            return
        position = self._head
        offset = position % size
        if offset + length > size:  # a frame never wraps
            position += size - offset
            offset = 0
        end = position + length
        frames = self._frames
        floor = end - size
        while frames and (frames[0].position < floor or len(frames) >= self._max_frames):
            with contextlib.suppress(IndexError):  # the consumer popped it first, and accounts for it
                self.overwritten_records += frames.popleft().num_records
        self._limit = end
        at = self._data + offset
        number = self._next_number
        header = FRAME.pack(FRAME_MAGIC, position, number, self.pushed_records & _MASK, length, n, len(extra), 0)
        crc = zlib.crc32(header[:FRAME_CRC_BYTES])
        self._map[at : at + BODY_OFFSET] = (header[:FRAME_CRC_BYTES] + COMMIT.pack(crc)).ljust(BODY_OFFSET, b"\0")
        at_body = at + BODY_OFFSET
        self._map[at_body : at_body + STEP.itemsize] = step
        at_body += STEP_BYTES
        if n:
            # Not through numpy: it releases the GIL for large copies, and would wait to get it back.
            self._map[at_body : at_body + 8 * n] = site_ids.view(np.uint8).data
            at_body += 8 * n
            self._map[at_body : at_body + ROW.itemsize * n] = rows.view(np.uint8).data
            at_body += ROW.itemsize * n
        if extra:
            self._map[at_body : at_body + len(extra)] = extra
        COMMIT.pack_into(self._map, at + FRAME.size, commit_word(position))  # written last: the frame is complete
        self._head = end
        self._next_number = number + 1
        self.pushed_records += n
        self.pushed_frames += 1
        frames.append(_Slot(position, length, number, n, len(extra)))

    def _go_over(self, fresh: RingMemory) -> None:
        """Go on in memory that `renew` has prepared, with what has changed since: no system call."""
        self._copy(self._map, fresh, 0, self._data)
        begin = max(self._durable, self._head - self._size)
        at, end = begin % self._size, begin % self._size + self._head - begin
        self._copy(self._map, fresh, self._data + at, self._data + min(end, self._size))
        self._copy(self._map, fresh, self._data, self._data + max(0, end - self._size))
        self._map, self._memory, self._fresh = fresh.map, fresh, None

    @staticmethod
    def _copy(source: mmap.mmap, fresh: RingMemory, begin: int, end: int) -> None:
        for at in range(begin, end, PIECE_BYTES):
            piece = slice(at, min(at + PIECE_BYTES, end))
            fresh.map[piece] = source[piece]

    # --- consumer: the sender thread

    def renew(self) -> bool:
        """Make the file anew where somebody has deleted it, or it could not be written; the producer goes over to it at its
        next step.

        Returns:
            Whether it had been deleted.

        Raises:
            OSError: it cannot be made; the ring stays in memory.
        """
        if self.path is None or self._fresh is not None:
            return False
        vanished = self._memory.vanished
        if not vanished and self._memory.failed is None:
            return False
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._memory.mapped:
            self._memory.anew()
            return vanished
        fresh = RingMemory(self.path, self.layout.total_bytes)
        self._copy(self._map, fresh, 0, self.layout.total_bytes)  # what a process that ends without another step leaves
        fresh.publish()
        self._memory.release()
        self._fresh = fresh
        return True

    def claim(self, wanted: Callable[[Frame], bool] | None = None) -> Frame | None:
        """Take and copy the oldest step; None when there is none, or when it is not `wanted`.

        Its frame stays in the file until `release`.
        """
        while self._frames or self._declined is not None:
            if self._declined is None:
                self._declined = self._copy_oldest()
            frame = self._declined
            if frame is None:
                continue
            if wanted is not None and not wanted(frame):
                return None  # already claimed, in memory: it comes first the next time
            self._declined = None
            return frame
        return None

    def _copy_oldest(self) -> Frame | None:
        try:
            slot = self._frames.popleft()
        except IndexError:
            return None
        whole = False
        try:
            if not self._memory.mapped and slot.number >= self._sealed_to:
                self._seal(slot)  # from now on this is all that knows of it
            at = self._data + slot.position % self._size
            raw = self._map[at : at + slot.length]
            if self._limit - self._size > slot.position:
                return None
            frame = parse_frame(raw, slot.position, slot.number, slot.num_records, slot.num_extra)
            whole = True
            return frame
        except (ValueError, msgspec.MsgspecError):  # another process wrote to the file
            return None
        finally:  # unreadable for whatever reason: the descriptor is gone, and its records are counted
            if not whole:
                self.torn_records += slot.num_records

    def seal(self) -> None:
        """Write a CRC for each new frame, off the training thread; only sealed frames survive a reboot. Where the file is not
        mapped they are written to it, and may not be: see `failed`."""
        self._note_pushed()
        for slot in list(self._frames):
            if slot.number >= self._sealed_to:
                self._seal(slot)
        sites_to = self._sites_at
        if sites_to > self._sites_written:
            self._memory.write(self._sites_written, sites_to)
            self._sites_written = sites_to

    def _seal(self, slot: _Slot) -> None:
        at = self._data + slot.position % self._size
        crc = zlib.crc32(self._memory.bytes[at + BODY_OFFSET : at + slot.length].data)  # without the GIL
        if self._limit - self._size <= slot.position:
            check = zlib.crc32(SEAL.pack(slot.number, crc, 0)[:12])
            place = self.layout.seals + (slot.number % self.layout.num_seals) * SEAL.size
            SEAL.pack_into(self._map, place, slot.number, crc, check)
            self._memory.write(at, at + slot.length)
            self._memory.write(place, place + SEAL.size)
        self._sealed_to = slot.number + 1

    def _note_pushed(self) -> None:
        """Store how much there was, so that recovery knows what a damaged file lacks."""
        frames, records = self.pushed_frames, self.pushed_records
        if frames == self.pushed_frames:  # else a push came in between, and the next look finds both
            self._put_word(WORD_PUSHED_FRAMES, frames)
            self._put_word(WORD_PUSHED_RECORDS, records)

    def journal(self, seq: int, kind: int, num_records: int, body: bytes, end: int, frames_to: int) -> bool:
        """Store the body that is about to be sent: after a SIGKILL the same bytes are sent under the same key.

        Args:
            end, frames_to: position and number of the first frame that is not in the body.

        Returns:
            False where the body is too large for the slot; it must then be spooled before it is sent.
        """
        if SLOT.size + len(body) > self.layout.slot_bytes:
            return False
        at = self.layout.slot
        head = SLOT.pack(end, frames_to, seq, num_records, kind, len(body), 0)[:-4]
        crc = zlib.crc32(body, zlib.crc32(head))
        SLOT.pack_into(self._map, at, 0, 0, 0, 0, 0, 0, 0)
        self._map[at + SLOT.size : at + SLOT.size + len(body)] = body
        self._map[at : at + SLOT.size] = head + COMMIT.pack(crc)
        self._memory.write(at, at + SLOT.size + len(body))
        self._put_word(WORD_NEXT_SEQ, seq + 1)
        return True

    def release(self, end: int, frames_to: int) -> None:
        """Mark everything before `end` as acknowledged, spooled or dropped: it need not be sent again."""
        self._durable = end
        self._put_word(WORD_DURABLE, end)
        self._put_word(WORD_DURABLE_FRAME, frames_to)

    def note_next_seq(self, seq: int) -> None:
        """Store the next free sequence number, for recovery after a SIGKILL."""
        self._put_word(WORD_NEXT_SEQ, seq)

    @property
    def failed(self) -> OSError | None:
        """Why the file lacks what was pushed since, until `renew` has made another."""
        return self._memory.failed

    # --- any thread

    def add_sites(self, sites: Sequence[Site]) -> bool:
        """Store the facts of sites beside the frames. False when there is no room: they are then in memory only."""
        raw = zstandard.ZstdCompressor(level=3).compress(encode_registration(self.session, list(sites)))
        size = SITES_BLOCK.size + len(raw)
        if self._sites_at + size + SITES_BLOCK.size > self.layout.slot:
            return False
        self._map[self._sites_at + SITES_BLOCK.size : self._sites_at + size] = raw
        SITES_BLOCK.pack_into(self._map, self._sites_at, len(raw), zlib.crc32(raw))
        self._sites_at += size
        return True

    def queued_records(self) -> int:
        """Records in frames that are not claimed yet."""
        declined = self._declined
        waiting = 0 if declined is None else declined.num_records
        return waiting + sum(slot.num_records for slot in list(self._frames))

    def oldest_number(self) -> int:
        """Number of the oldest unclaimed frame; of the next one when there is none."""
        if self._declined is not None:
            return self._declined.number
        try:
            return self._frames[0].number
        except IndexError:
            return self._next_number

    @property
    def fill(self) -> float:
        """Share of the ring that holds unclaimed steps: at 1.0 the next push overwrites the oldest."""
        try:
            oldest = self._frames[0]
        except IndexError:
            return 0.0
        return max((self._head - oldest.position) / self._size, len(self._frames) / self._max_frames)

    def __len__(self) -> int:
        return len(self._frames) + (self._declined is not None)

    def close(self, *, keep: bool) -> None:
        """Close the file. `keep`: leave it for `fp8watch sync`; else it is removed."""
        (self._fresh or self._memory).close(keep=keep)

    def unmap(self) -> None:
        """Release the memory. No push or claim may follow."""
        self._memory.unmap()

    def _put_word(self, index: int, value: int) -> None:
        at = WORDS_OFFSET + index * 2 * WORD.size
        fresh = self._fresh
        for into in (self._map,) if fresh is None else (self._map, fresh.map):
            WORD.pack_into(into, at, value, value ^ _MASK)
            WORD.pack_into(into, at + WORD.size, value, value ^ _MASK)
        self._memory.write(at, at + 2 * WORD.size)
