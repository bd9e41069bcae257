"""Sender thread: takes steps out of the ring, encodes them, and sends or spools them.

Upstream:   fp8watch_agent.recorder, fp8watch_agent.ring
Downstream: fp8watch_agent.batch, fp8watch_agent.spool, fp8watch_agent.uploader
Thread:     its own, a daemon; the training thread never waits for it and never wakes it

One parcel is in hand at a time. It leaves acknowledged, refused (counted) or spooled; until then the ring's slot keeps
its bytes. Everything but the network runs under `lock`, so that close can take over from a sender that hangs in a
request: the request's outcome is then ignored, and the same bytes go out later under the same key.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from fp8watch_agent.batch import BatchBuilder, Kind, Parcel, complete, end_parcel, maps_parcel
from fp8watch_agent.folder_watch import FolderWatch
from fp8watch_agent.guard import Guard
from fp8watch_agent.health import DROP_ENCODE, DROP_RING_FULL, DeliveryCounts, merged
from fp8watch_agent.ring import Ring
from fp8watch_agent.ring_file import Frame
from fp8watch_agent.session import Registration
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.spool import Spool
from fp8watch_agent.tile_map_queue import MapQueue
from fp8watch_agent.transport import Answer, ResponseMeaning, judge
from fp8watch_agent.uploader import Receipt, Uploader

logger = logging.getLogger("fp8watch")

ENDED = "ended"
"""Health key that marks the last batch of a session."""

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
FIRST_BYTES_PER_RECORD = 48.0
MAX_MAPS_BYTES = 2 << 20  # raw, in one body
GIL_YIELD_S = 1e-4
THIN_ABOVE = 0.875  # ring fill above which healthy steps are dropped first


class Sender:
    """The consumer side of a recorder."""

    def __init__(
        self,
        settings: AgentSettings,
        registration: Registration,
        ring: Ring,
        maps: MapQueue,
        spool: Spool | None,
        uploader: Uploader | None,
        guard: Guard,
        health: Callable[[], dict[str, float]],
    ) -> None:
        self._settings = settings
        self._registration = registration
        self._ring = ring
        self._maps = maps
        self.spool = spool
        self.uploader = uploader
        self._guard = guard
        self._health = health
        self.lock = threading.RLock()
        self.wake = threading.Event()
        self.records = DeliveryCounts()
        self.map_counts = DeliveryCounts()
        self.in_hand: Parcel | None = None
        self._builder: BatchBuilder | None = None
        self._kept: deque[Frame] = deque()  # claimed, not yet in a batch: steps with failures
        self._max_kept = ring.layout.data_bytes // 8
        self.state = "local" if uploader is None else "starting"
        self.last_error = ""
        self.num_batches = self.num_retries = self.num_bytes = 0
        self.captures: dict[int, tuple[int, int]] = {}
        self.deadline: float | None = None  # set by close: finish by then
        self.abandoned = False  # close has taken over: outcomes are ignored
        self.flushing = False
        self._next_seq = 0
        self._away_until = 0.0
        self._num_failures = 0
        self._due_since: float | None = None
        self._urgent_to = 0  # frames before this number do not wait for others
        self._bytes_per_record = FIRST_BYTES_PER_RECORD
        self._told: set[str] = set()
        self._folder = FolderWatch(ring, spool, self._warn)
        self._announced = -1  # version of the session's facts that the collector has
        self.thread = threading.Thread(target=self._run, name="fp8watch-sender", daemon=True)

    # --- the thread

    def _run(self) -> None:
        closing = False
        while not (closing or self.abandoned):
            self.wake.wait(self._settings.poll_interval_s)
            self.wake.clear()
            closing = self.deadline is not None  # set before this poll: it finds all that was recorded
            self._guard.call("sender", self.tick, None)
            self._guard.emit()
        self._guard.call("farewell", self._send_end, None)

    def _send_end(self) -> None:
        """Send an empty batch whose health marks the session as ended, so that it is not taken for stalled."""
        with self.lock:
            if self.abandoned or self.in_hand is not None or (self._next_seq == 0 and self._announced < 0):
                return  # who took over closes the spool, the parcel in hand carries the mark, or nobody has heard of this session
            health = {**self._health(), ENDED: 1.0}
            parcel = end_parcel(self._registration.session, self._new_seq(), time.time(), health)
        if self.can_send() and self.uploader is not None:
            receipt = self.uploader.send(parcel, self._registration)
            if receipt.verdict is ResponseMeaning.ACKNOWLEDGED:
                return
            self._fail(receipt.verdict, receipt.answer)
        with self.lock:
            if not self.abandoned:
                self._keep(parcel)

    def tick(self) -> None:
        """One poll: everything that is due leaves the ring."""
        self._ring.seal()
        self._announce()
        while True:
            with self.lock:
                if self.abandoned or (self.in_hand is None and not self._take()):
                    break
                parcel = self.in_hand
            if parcel is not None and not self._dispose(parcel):
                break
        self._drain()
        with self.lock:
            self._thin()
            self._folder.look()

    @property
    def num_building(self) -> int:
        """Claimed records that are not in a parcel yet."""
        building = 0 if self._builder is None else self._builder.num_records
        return building + sum(f.num_records for f in self._kept)

    def can_send(self) -> bool:
        if self.uploader is None:
            return False
        now = time.monotonic()
        return now >= self._away_until and (self.deadline is None or now < self.deadline)

    def away_for_s(self) -> float:
        """Seconds until the next attempt to reach the collector."""
        return max(0.0, self._away_until - time.monotonic())

    def oldest_unsent(self) -> int:
        """Number of the oldest frame that is neither acknowledged, dropped nor on disk."""
        with self.lock:
            if self.in_hand is not None or self._kept:
                return -1
            if self._builder is not None and self._builder.frames:
                return self._builder.frames[0].number
            return self._ring.oldest_number()

    # --- from the ring into the hand (under the lock)

    def _take(self) -> bool:
        if self._waiting() and self._due():
            return self._take_batch()
        if len(self._maps) and (maps := self._maps.claim(MAX_MAPS_BYTES)):
            try:
                self.in_hand = maps_parcel(self._registration.session, self._new_seq(), maps)
            except Exception as e:  # noqa: BLE001 - counted, and the next one goes on
                self._guard.swallow("encode", e)
                self.map_counts.drop(DROP_ENCODE, len(maps))
            return True
        return False

    def _yield_gil(self) -> None:
        """Release the GIL long enough for a waiting training thread to take it."""
        if self.deadline is None and not self.flushing:
            time.sleep(GIL_YIELD_S)

    def _waiting(self) -> bool:
        building = self._builder is not None and bool(self._builder.frames)
        return building or self._more()

    def _more(self) -> bool:
        """Whether there are steps behind those of the batch that is being put together."""
        return bool(self._kept) or len(self._ring) > 0

    def hurry(self) -> None:
        """Send what has been recorded so far without waiting for more steps. Any thread; only sets a number."""
        self._urgent_to = self._ring.pushed_frames

    def _due(self) -> bool:
        """Whether a batch leaves: it is full, or has waited. What broke waits one interval for the steps around it."""
        now = time.monotonic()
        if self._due_since is None:
            self._due_since = now
        records = self._ring.queued_records() + self.num_building
        if records * self._bytes_per_record >= self._settings.batch_bytes:
            return True
        if self.flushing or self.deadline is not None or self.abandoned:
            return True
        waited_s = now - self._due_since
        if waited_s < self._settings.batch_interval_s:
            return False
        frames = self._gather().frames
        return self._more() or complete(frames, waited_s / self._settings.batch_interval_s, self._urgent_to)

    def _thin(self) -> None:
        """When sending and spooling both fail and the ring is nearly full, drop healthy steps before those with
        failures.
        """
        while self.in_hand is not None and self._ring.fill > THIN_ABOVE and (frame := self._ring.claim()) is not None:
            if frame.precious:
                self._kept.append(frame)
                frame = self._kept.popleft() if sum(f.rows.nbytes for f in self._kept) > self._max_kept else None
            if frame is not None:
                self.records.drop(DROP_RING_FULL, frame.num_records)

    def _next_frame(self, wanted: Callable[[Frame], bool]) -> Frame | None:
        """The oldest step: frames kept aside are older than all in the ring."""
        if not self._kept:
            return self._ring.claim(wanted)
        return self._kept.popleft() if wanted(self._kept[0]) else None

    def _gather(self) -> BatchBuilder:
        """Claim the frames that fit into the next batch."""
        if self._builder is None:
            max_records = max(1, int(self._settings.batch_bytes / self._bytes_per_record))
            self._builder = BatchBuilder(self._registration.session, max_records)
        builder = self._builder  # kept until the parcel is in hand: an error in between loses nothing
        while (frame := self._next_frame(builder.fits)) is not None:
            try:
                builder.add(frame)
            except Exception:
                self._kept.appendleft(frame)
                raise
            self._yield_gil()
        return builder

    def _take_batch(self) -> bool:
        builder = self._gather()
        if not self._more():
            self._due_since = None
        if not builder.frames:
            return False
        last = builder.frames[-1]
        try:
            seq = self._new_seq()
            parcel = builder.build(seq, time.time(), self._health(), self._yield_gil)
            self._yield_gil()
            journaled = self._ring.journal(seq, parcel.kind, parcel.amount, parcel.body, parcel.end, parcel.frames_to)
        except Exception as e:  # noqa: BLE001 - counted, and the next batch goes on
            self._guard.swallow("encode", e)
            self.records.drop(DROP_ENCODE, builder.num_records)
            self._ring.release(last.end, last.number + 1)
            self._builder = None
            return True
        if builder.num_records:
            self._bytes_per_record += 0.5 * (len(parcel.body) / builder.num_records - self._bytes_per_record)
        self.in_hand, self._builder = parcel, None
        if not journaled and self.spool is not None and not self.abandoned:
            self._keep(parcel)  # spooled before it is sent: after a SIGKILL the same bytes must exist
        return True

    def _new_seq(self) -> int:
        seq = self._next_seq
        self._next_seq = seq + 1
        self._ring.note_next_seq(self._next_seq)
        return seq

    # --- from the hand to the collector or the disk

    def _dispose(self, parcel: Parcel) -> bool:
        """Send or spool the parcel; True when the hand is empty again."""
        if self.can_send() and self.uploader is not None:
            receipt = self.uploader.send(parcel, self._registration)
            with self.lock:
                if self.abandoned:
                    return False
                if self._account(receipt, parcel, partial(self._release, parcel)):
                    return True
        with self.lock:
            return not self.abandoned and self._keep(parcel)

    def _keep(self, parcel: Parcel) -> bool:
        if self.spool is None:
            return False
        try:
            self.spool.append(parcel)
        except OSError as e:
            self._warn("spool", f"cannot spool to disk ({e}); the ring keeps what fits, the rest is counted as dropped")
            return False
        self.in_hand = None  # it is on disk, and is counted there whatever happens now
        self._release(parcel)
        return True

    def _release(self, parcel: Parcel) -> None:
        if parcel.end:
            self._ring.release(parcel.end, parcel.frames_to)
        self.in_hand = None

    def _account(self, receipt: Receipt, parcel: Parcel, release: Callable[[], None]) -> bool:
        """Account for the outcome of a parcel; False when the parcel has to wait.

        `release` removes the parcel from where it is stored. Nothing that could fail runs between it and the counters:
        a parcel whose release failed is delivered and acknowledged again.
        """
        if receipt.verdict is not ResponseMeaning.ACKNOWLEDGED:
            self._fail(receipt.verdict, receipt.answer)
            return False
        counts = self.records if parcel.kind == Kind.BATCH else self.map_counts
        dropped = merged(counts.dropped, receipt.refused)
        release()
        counts.acknowledged += receipt.acknowledged
        counts.dropped = dropped
        if self.state in ("away", "held"):
            logger.info("the collector answers again")
        self.state, self._num_failures = "up", 0
        for refused, reason in receipt.refused_bodies:
            self.last_error = f"batch {refused.seq} refused: {receipt.answer}"
            self._warn(reason, f"{self.last_error}; counted, and kept in the spool folder under refused/")
            if self.spool is not None:
                self._guard.call("quarantine", partial(self.spool.quarantine, refused, reason), None)
        if receipt.num_rekeyed:
            self._warn(
                "rekeyed", "the sequence number of a batch was taken by another body; it was sent under another one"
            )
        self.num_batches += receipt.acknowledged > 0 or not receipt.refused
        self.num_bytes += receipt.num_bytes
        if receipt.captures is not None:
            self.captures = receipt.captures
        return True

    def _fail(self, verdict: ResponseMeaning, answer: Answer) -> None:
        self.num_retries += 1
        self.last_error = str(answer)
        if verdict is ResponseMeaning.HOLD:
            self.state = "held"
            delay_s = MAX_BACKOFF_S
            remedy = "check FP8WATCH_TOKEN" if answer.status in (401, 403) else "check FP8WATCH_COLLECTOR"
            self._warn("held", f"the collector refuses this agent: {answer}; {remedy}; until then data is spooled")
            if self.uploader is not None:
                self.uploader.transport.reload_token()
        else:
            self.state = "away"
            delay_s = random.uniform(0.0, min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(self._num_failures, 16)))
            self._warn("away", f"no answer from the collector ({answer}); data is spooled, training is not touched")
        if answer.retry_after_s is not None:
            delay_s = max(delay_s, answer.retry_after_s)
        self._num_failures += 1
        self._away_until = time.monotonic() + delay_s

    def _warn(self, key: str, message: str) -> None:
        if key not in self._told:
            self._told.add(key)
            logger.warning("%s", message)

    # --- the rest of a tick

    def _announce(self) -> None:
        """Register as soon as there is something to register, so that the run is visible before its first batch, and
        late session facts are sent although no batch may ever follow.
        """
        uploader, version = self.uploader, self._registration.version
        if uploader is None or self._announced == version or not self.can_send():
            return
        failed = uploader.register(self._registration)
        with self.lock:
            if self.abandoned:
                return
            if failed is None:
                self._announced = version
                self.state = "up" if self.state == "starting" else self.state
            else:
                self._fail(judge(failed), failed)

    def _drain(self) -> None:
        """Send the spool, oldest first, until newer data is due."""
        spool, uploader = self.spool, self.uploader
        started = time.monotonic()
        while spool is not None and uploader is not None and self.can_send():
            with self.lock:
                parcel = None if self.abandoned or self.in_hand is not None else spool.peek()
            if parcel is None or time.monotonic() - started > self._settings.batch_interval_s:
                return
            receipt = uploader.send(parcel, self._registration)
            with self.lock:
                if self.abandoned or not self._account(receipt, parcel, spool.advance):
                    return

    def take_over(self) -> None:
        """Spool everything left; called by close, under the lock, when the thread did not end in time."""
        self.abandoned = True
        while self.in_hand is not None or self._take():
            if self.in_hand is not None and not self._keep(self.in_hand):
                return
