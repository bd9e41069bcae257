"""Group commit: bodies that wait are decoded, checked and written together, and each is answered after the commit.

Upstream:   fp8watch_server.ingest.intake, fp8watch_server.worker.loop
Downstream: fp8watch_server.store.commit, fp8watch_server.pipeline.priority, fp8watch_server.ingest.queue_front
Shapes:     one body -> Committed, or the exception that says why not
Thread:     a few decoders, one committer; futures are settled on the event loop

A commit costs the same for one batch as for a hundred, so the next group is whatever came while the last one was being
committed, and groups begin COMMIT_EVERY_S apart at the earliest, or twice as long as the last one took. A small body that
declares its size is decoded by the committer itself, which costs less than handing it on; the others, which may inflate to
anything, by the decoders. A body that must be refused is left out of its group.
Should the database refuse one (nothing that passed the checks does), every body of the group is tried by itself.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zstandard
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fp8watch_agent.wire import Batch
from fp8watch_server.db.bell import ring
from fp8watch_server.db.dialect import WriterBusy, writing
from fp8watch_server.db.lease import lease_transaction
from fp8watch_server.db.schema import DEFAULT_TENANT
from fp8watch_server.http.db_timeout import WorkClock
from fp8watch_server.ingest.request_sender import RequestSender
from fp8watch_server.pipeline.priority import is_urgent
from fp8watch_server.store import hot_batches
from fp8watch_server.store.commit import Committed, Incoming, KnownSites, Outcome, commit_group

log = logging.getLogger("fp8watch.collector")

NUM_DECODERS = 4
"""Bodies that are inflated at once: each may grow to 64 MiB."""
MAX_GROUP = 256
MAX_GROUP_BYTES = 32 << 20
MAX_DECODED_BYTES = 64 << 20
"""Decoded batches that may wait for the committer before the decoders do: with what they hold themselves, the bound."""
MAX_QUEUED_BYTES = 128 << 20
"""Bodies as they came that may lie here, counting those whose senders were told to come back."""
COMMIT_EVERY_S, MAX_COMMIT_EVERY_S = 0.02, 0.06
NOBODY = RequestSender()
SMALL_BYTES, SMALL_INFLATED_BYTES = 64 << 10, 512 << 10
AWAY = (OperationalError, InterfaceError, PoolTimeoutError)
"""What the database raises when it is not there, or has no time."""


class Closed(Exception):
    """The collector is going down: nothing more is taken."""


@dataclass
class _Waiting:
    body: bytes
    future: asyncio.Future[Committed]
    sender: RequestSender
    batch: Batch | None = None
    num_bytes: int = 0  # decoded
    gated: bool = False  # whether the gate counts it
    decoders_s: float | None = None  # what the decoders had worked when they were done with it


class _Gate:
    """Bytes that were decoded and are not committed yet; decoders wait here."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._free = threading.Condition()

    def take(self, num_bytes: int) -> None:
        """Wait for room. Whoever comes into an empty room fits, however large."""
        with self._free:
            while self._held and self._held + num_bytes > self._limit:
                self._free.wait()
            self._held += num_bytes

    def give(self, num_bytes: int) -> None:
        """They are gone."""
        with self._free:
            self._held -= num_bytes
            self._free.notify_all()


class Committer:
    """Between the routes, which await, and the database, which is written by one thread.

    Args:
        engine: the database.
        decode: bytes to a checked batch; may raise anything, which is the answer to that body alone.
        observe_commit: is told the seconds of each commit, once for every batch in it.
        hurry: is told the run and the tenant of what was committed and cannot wait for the next round of the detectors.
    """

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[bytes], Batch],
        *,
        observe_commit: Callable[[float], None] = lambda seconds: None,
        hurry: Callable[[str, str], None] = lambda run_id, tenant: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._decode = decode
        self._observe_commit = observe_commit
        self._hurry = hurry
        self._clock = clock
        self._known = KnownSites()
        self._bodies: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._decoded: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._gate = _Gate(MAX_DECODED_BYTES)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._commit_clock = WorkClock()
        self._decode_clocks: list[WorkClock] = []
        self._closed = False
        self._queued_bytes = 0  # changed under the lock; also those whose senders have gone
        self.num_groups = 0

    def commit(
        self, body: bytes, sender: RequestSender = NOBODY
    ) -> tuple[asyncio.Future[Committed], Callable[[], float]]:
        """Decode, check and store one body.

        Returns:
            What became of it, once it is committed: KeyReused, Unknown, RankMismatch, WrongKey, SQLAlchemyError of this
            body, what `decode` raises, or the refusal of a run that the sender's token does not name. And the processor time of the threads that have it in hand.

        Raises:
            Closed: the collector is stopping.
            WriterBusy: too much is waiting.
        """
        self._start()
        if self._queued_bytes + len(body) > MAX_QUEUED_BYTES:
            raise WriterBusy
        small = _is_small(body)
        waiting = _Waiting(
            body, asyncio.get_running_loop().create_future(), sender, decoders_s=self._decoders_s() if small else None
        )
        with self._lock:
            self._queued_bytes += len(body)
        (self._decoded if small else self._bodies).put(waiting)
        return waiting.future, functools.partial(self._worked_s, waiting)

    def hand_in(self, batch: Batch, body: bytes, sender: RequestSender) -> asyncio.Future[Committed]:
        """Store a batch that is decoded and checked, after those that were handed in before.

        Raises:
            Closed: the collector is stopping.
        """
        self._start()
        waiting = _Waiting(body, asyncio.get_running_loop().create_future(), sender, batch, 4096 + batch.nbytes)
        with self._lock:
            self._queued_bytes += len(body)
        self._decoded.put(waiting)
        return waiting.future

    def _worked_s(self, waiting: _Waiting) -> float:
        """A body that is decoded is in the hands of the committer alone, whatever the decoders go on with."""
        decoders_s = self._decoders_s() if waiting.decoders_s is None else waiting.decoders_s
        return decoders_s + self._commit_clock.read_s()

    def _decoders_s(self) -> float:
        return sum(clock.read_s() for clock in self._decode_clocks)

    @property
    def queue_ready(self) -> bool | None:
        """Whether the queue takes batches; None where there is none."""
        return None

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish what has been handed in, and end."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        if not threads:
            return
        until = time.monotonic() + timeout_s
        for _ in threads[1:]:
            self._bodies.put(None)
        for thread in threads[1:]:
            thread.join(max(0.0, until - time.monotonic()))
        self._decoded.put(None)
        threads[0].join(max(0.0, until - time.monotonic()))

    def _start(self) -> None:
        if self._threads and not self._closed:
            return
        with self._lock:
            if self._closed:
                raise Closed
            if not self._threads:
                work = [self._commit_loop, *[self._decode_loop] * NUM_DECODERS]
                names = ["fp8watch-commit", *[f"fp8watch-decode-{i}" for i in range(NUM_DECODERS)]]
                made = [threading.Thread(target=w, name=n, daemon=True) for w, n in zip(work, names, strict=True)]
                for thread in made:
                    thread.start()
                self._threads = made

    def _decode_loop(self) -> None:
        clock = WorkClock()
        clock.start()
        self._decode_clocks.append(clock)
        while (waiting := self._bodies.get()) is not None:
            if self._open(waiting):
                waiting.decoders_s = self._decoders_s()
                self._gate.take(waiting.num_bytes)
                waiting.gated = True
                self._decoded.put(waiting)

    def _open(self, waiting: _Waiting) -> bool:
        """Decode a body; one that cannot be is answered."""
        if waiting.batch is not None:
            return True
        try:
            batch = self._decode(waiting.body)
            waiting.sender.grant.require(batch.header.run)
            waiting.sender.charge(waiting.sender.grant, batch.header.num_records)
        except BaseException as e:  # noqa: BLE001  it is the answer to whoever sent this
            self._answer([(waiting, e)])
            return False
        waiting.batch, waiting.num_bytes = batch, 4096 + batch.nbytes
        return True

    def _commit_loop(self) -> None:
        self._commit_clock.start()
        began = took_s = -COMMIT_EVERY_S
        while (first := self._decoded.get()) is not None:
            every_s = min(MAX_COMMIT_EVERY_S, max(COMMIT_EVERY_S, 2 * took_s))
            pause_s = began + every_s - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            began = time.monotonic()
            group, last = [first] if self._open(first) else [], False
            size = first.num_bytes
            while len(group) < MAX_GROUP and size < MAX_GROUP_BYTES:
                try:
                    following = self._decoded.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                    break
                if self._open(following):
                    group.append(following)
                    size += following.num_bytes
            gone = [w for w in group if w.future.done()]  # whoever sent them was told to come back
            group = [w for w in group if not w.future.done()]
            try:
                answers = self._take(group)
            except BaseException as e:  # noqa: BLE001  nobody may wait for ever
                answers = [e] * len(group)
            took_s = time.monotonic() - began
            self._gate.give(sum(w.num_bytes for w in (*group, *gone) if w.gated))
            self._answer([*zip(group, answers, strict=True), *((w, None) for w in gone)])
            if answers and all(isinstance(a, AWAY) for a in answers):
                self._refuse_all(answers[0])
            if last:
                return

    def _refuse_all(self, answer: Any) -> None:
        """The database is away: who has come since would wait as long for the same answer."""
        late: list[_Waiting] = []
        while True:
            try:
                following = self._decoded.get_nowait()
            except queue.Empty:
                break
            if following is None:
                self._decoded.put(None)
                break
            late.append(following)
        self._gate.give(sum(w.num_bytes for w in late if w.gated))
        self._answer([(w, answer) for w in late])

    def _take(self, group: list[_Waiting]) -> Sequence[Outcome | BaseException]:
        items = [
            Incoming(w.batch, w.body, hashlib.sha256(w.body).digest(), w.sender.key_sha256)
            for w in group
            if w.batch is not None
        ]
        assert len(items) == len(group)
        if not items:
            return []
        began = time.perf_counter()
        self.num_groups += 1
        try:
            outcomes: Sequence[Outcome | BaseException] = self._write(items)
        except AWAY as e:
            return [e] * len(items)
        except DBAPIError as e:
            if len(items) == 1 or e.connection_invalidated:
                return [e] * len(items)
            log.warning("the database refused a group of %d batches; trying each by itself", len(items))
            outcomes = [self._alone(item) for item in items]
        self._tell(items, outcomes, time.perf_counter() - began)
        return outcomes

    def _tell(self, items: Sequence[Incoming], outcomes: Sequence[Outcome | BaseException], seconds: float) -> None:
        """Whoever wants to know what was committed."""
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Committed):
                self._observe_commit(seconds)
                if outcome.stored and is_urgent(item.batch):
                    self._hurry(item.batch.header.run, DEFAULT_TENANT)

    def _alone(self, item: Incoming) -> Outcome | BaseException:
        try:
            return self._write([item])[0]
        except Exception as e:  # noqa: BLE001  it is the answer to whoever sent this
            return e

    def _write(self, items: list[Incoming]) -> list[Outcome]:
        """One transaction; a second one where a key turned out to be taken."""
        try:
            return self._write_once(items, replays=False)
        except IntegrityError:
            return self._write_once(items, replays=True)

    def _write_once(self, items: list[Incoming], *, replays: bool) -> list[Outcome]:
        now, urgent = self._clock(), set[str]()
        with writing(self._engine) as conn:
            lease_transaction(conn)
            outcomes = commit_group(conn, items, self._known, now=now, replays=replays)
            for item, outcome in zip(items, outcomes, strict=True):
                if isinstance(outcome, Committed) and outcome.stored:
                    hot_batches.remember(conn, item.batch, now)
                    if is_urgent(item.batch):
                        urgent.add(item.batch.header.run)
            ring(conn, urgent)
        return outcomes

    def _answer(self, answers: list[tuple[_Waiting, Any]]) -> None:
        with self._lock:
            self._queued_bytes -= sum(len(w.body) for w, _ in answers)
        answer_all(answers)


def _is_small(body: bytes) -> bool:
    """Whether a body says that it stays small, and cannot become more: a frame that holds more than it declares is refused."""
    if len(body) > SMALL_BYTES:
        return False
    try:
        return bool(zstandard.get_frame_parameters(body).content_size <= SMALL_INFLATED_BYTES)
    except zstandard.ZstdError:  # the decoders say what it is
        return False


def answer_all(answers: list[tuple[_Waiting, Any]]) -> None:
    """Answer on the event loop of whoever waits: one wake-up for all of them."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiting, Any]]] = {}
    for waiting, answer in answers:
        by_loop.setdefault(waiting.future.get_loop(), []).append((waiting, answer))
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_answer_here, of_loop)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("%d answers came after the end", len(of_loop))


def _answer_here(answers: list[tuple[_Waiting, Any]]) -> None:
    for waiting, answer in answers:
        if waiting.future.done():  # whoever asked has gone
            continue
        if isinstance(answer, BaseException):
            waiting.future.set_exception(answer)
        else:
            waiting.future.set_result(answer)
