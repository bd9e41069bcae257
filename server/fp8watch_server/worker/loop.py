"""The worker: pulls batches from its lanes of the queue, commits them, and acknowledges them after the commit.

Upstream:   fp8watch_server.queue.jetstream
Downstream: fp8watch_server.ingest.group_commit
Shapes:     messages of a lane, in order -> one transaction -> acknowledgements
Thread:     an event loop; decoding has threads, and each stream a committer

Whatever fails between a pull and its acknowledgements, the lane begins again at its first batch that is not acknowledged:
what was committed before is known by its key. Each lane works for itself, so that one whose consumer elects a leader holds
up no other, and urgent batches do not wait for the commit of healthy ones. A batch that no database will take (its run was
deleted, its key has another body) goes to a stream of its own, and blocks nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from nats.aio.msg import Msg
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from fp8watch_agent.wire import Batch, WireError, decode_batch, decompress
from fp8watch_server.db.dialect import OF_THE_VALUES
from fp8watch_server.db.fence import RunHasMoved, is_fenced
from fp8watch_server.db.lease import BEAT_S
from fp8watch_server.db.schema import DEFAULT_TENANT
from fp8watch_server.ingest.group_commit import Committer
from fp8watch_server.ingest.request_sender import RequestSender
from fp8watch_server.queue.jetstream import JetStream, Message, QueueError, Reader
from fp8watch_server.queue.subjects import (
    ID_HEADER,
    KEY_HEADER,
    REFUSED,
    WHY_HEADER,
    WORK,
    Stream,
    num_lanes_of,
    subject_of,
)
from fp8watch_server.store.commit import Committed
from fp8watch_server.store.registrations import KeyReused, RankMismatch, Unknown, WrongKey
from fp8watch_server.worker.lanes import Lanes

log = logging.getLogger("fp8watch.queue")

WAIT_S = 5.0
"""How long an idle pull waits at the server."""
SHARE_EVERY_S = 1.0
RETRY_S, LANE_RETRY_S = 0.5, 0.2
BEGIN_AT_ONCE = 8
"""Lanes that begin at the same time: each may make a replicated consumer."""
DEAF_S = 5.0
"""After so long without an answer to any lane, another server of the queue may have a quorum."""
CALM_S = 30.0
"""Work that went on for so long was not stopped by what stopped it before."""
FINISH_S = 5.0
"""How long an end waits for commits in hand: a database that hangs never finishes them."""
REFUSALS = (
    KeyReused,
    RankMismatch,
    RunHasMoved,
    Unknown,
    WrongKey,
    WireError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
)


@dataclass
class Counts:
    """What a worker has done."""

    committed: int = 0
    refused: int = 0
    passed_on: int = 0
    restarts: int = 0
    lanes_begun_again: int = 0


class _LaneWaits(Exception):
    """What a lane has in hand cannot be committed yet."""


class _Lane:
    """A lane that is ours: a task for each stream."""

    def __init__(self, serve: Callable[[Stream, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
        self.ending = asyncio.Event()
        self.tasks = [asyncio.create_task(serve(stream, self.ending)) for stream in WORK]

    async def end(self, timeout_s: float) -> None:
        """Finish what is in hand, or leave it to whoever has the lane next."""
        self.ending.set()
        _, late = await asyncio.wait(self.tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Worker:
    """One per process and database: one that is away, or hangs, holds up no other.

    Args:
        engine: the database.
        queue: a connection of its own.
        shard: name of the database; "": home.
        require: raises ShardAway where the database must not be used now.
    """

    def __init__(
        self, engine: Engine, queue: JetStream, shard: str = "", require: Callable[[], object] = lambda: None
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._shard, self._require = shard, require
        self._lanes = Lanes(engine, num_lanes_of(shard))
        self._committers = {stream: Committer(engine, _decoded) for stream in WORK}
        self._mine: dict[int, _Lane] = {}
        self._beginning = asyncio.Semaphore(BEGIN_AT_ONCE)
        self._answered_at = 0.0
        self._stopping = asyncio.Event()
        self._said = ""
        self.counts = Counts()

    def stop(self) -> None:
        """Finish the commit in hand, and end."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until stopped; waits for a queue or a database that is away."""
        beats = asyncio.create_task(self._beat())
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                try:
                    await self._work()
                except QueueError as e:
                    log.warning("the worker begins again: %s", e)
                    await self._queue.close()  # another node may have a quorum
                except SQLAlchemyError as e:
                    self._say(str(e).splitlines()[0], again=time.monotonic() - began > CALM_S)
                except Exception:
                    log.exception("the worker failed; it begins again")
                await self._let_go()
                self.counts.restarts += not self._stopping.is_set()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), RETRY_S)
        finally:
            beats.cancel()
            await self._let_go()
            for committer in self._committers.values():
                await asyncio.to_thread(committer.stop, FINISH_S)
            await self._queue.close()

    def _say(self, why: str, again: bool) -> None:
        """Why it waits, once, or `again` where it has worked since."""
        if why != self._said or again:
            log.warning("the worker waits for the database%s: %s", f" of {self._shard!r}" if self._shard else "", why)
        self._said = why

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.to_thread(self._lanes.beat)

    async def _let_go(self) -> None:
        """Of everything in hand; whoever has a lane next begins at its first batch that is not acknowledged."""
        mine, self._mine = self._mine, {}
        finish_s = FINISH_S if self._stopping.is_set() else 0.0
        await asyncio.gather(*(lane.end(finish_s) for lane in mine.values()))
        with suppress(asyncio.TimeoutError):  # a database that hangs ends the session itself
            await asyncio.wait_for(asyncio.to_thread(self._lanes.release), FINISH_S)

    async def _work(self) -> None:
        """Hold lanes, each with tasks of its own, until one of them cannot go on.

        Raises:
            QueueError, SQLAlchemyError: something is away; begin again.
        """
        self._require()
        if not self._queue.ready:
            await self._queue.open()
        self._answered_at = time.monotonic()
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                await self._share()
                tasks = [task for lane in self._mine.values() for task in lane.tasks]
                await asyncio.wait({*tasks, stopping}, timeout=SHARE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            stopping.cancel()

    async def _share(self) -> None:
        """Which lanes are ours: new ones begin at their first batch, and those that are given back have nothing in hand."""
        held = await asyncio.to_thread(self._lanes.hold)
        surplus = [self._mine.pop(number) for number in self._mine.keys() - held]
        await asyncio.gather(*(lane.end(FINISH_S) for lane in surplus))
        await asyncio.to_thread(self._lanes.give_back)
        for number in sorted(held - self._mine.keys()):
            self._mine[number] = _Lane(partial(self._serve, number))

    async def _serve(self, lane: int, stream: Stream, ending: asyncio.Event) -> None:
        """Read a lane of a stream until it ends.

        Raises:
            QueueError: the queue does not answer anybody.
            SQLAlchemyError: the database is away.
        """
        while not ending.is_set():
            try:
                async with self._beginning:
                    await self._queue.begin_lane(stream, lane, self._shard)
                reader = await self._queue.reader(stream, lane, self._shard)
                self._answered_at = time.monotonic()
                try:
                    await self._read(reader, stream, ending)
                finally:
                    await reader.close()
            except (QueueError, _LaneWaits) as e:
                if time.monotonic() - self._answered_at > DEAF_S:
                    raise QueueError(str(e)) from e
                log.info("lane %d of %s %s begins again: %s", lane, stream.name, self._shard, e)
                self.counts.lanes_begun_again += 1
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ending.wait(), LANE_RETRY_S)

    async def _read(self, reader: Reader, stream: Stream, ending: asyncio.Event) -> None:
        """Pull, commit, acknowledge."""
        end = asyncio.create_task(ending.wait())
        try:
            while not ending.is_set():
                pull = asyncio.create_task(reader.pull(WAIT_S))
                try:
                    await asyncio.wait({pull, end}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not pull.done():
                        pull.cancel()
                if not pull.done():  # it has nothing that this worker would take
                    return
                found = pull.result()
                self._answered_at = time.monotonic()
                if found:
                    await self._commit(stream, found)
                    await self._queue.acknowledge(found)
        finally:
            end.cancel()

    async def _commit(self, stream: Stream, messages: list[Msg]) -> None:
        """Commit all; what can never be committed is put aside."""
        batches = await asyncio.to_thread(_decode_all, messages)
        waiting: list[asyncio.Future[Any]] = []
        for msg, batch in zip(messages, batches, strict=True):
            if isinstance(batch, Batch):
                sender = RequestSender(key_sha256=(msg.headers or {}).get(KEY_HEADER, ""))
                waiting.append(self._committers[stream].hand_in(batch, msg.data, sender))
            else:
                waiting.append(_failed(batch))
        done = await asyncio.gather(*waiting, return_exceptions=True)
        refused: list[tuple[Msg, BaseException]] = []
        for msg, outcome in zip(messages, done, strict=True):
            if isinstance(outcome, Committed):
                self.counts.committed += 1
            elif _is_refusal(outcome):
                refused.append((msg, outcome))
            elif is_fenced(outcome):
                raise _LaneWaits("a run of it is being moved") from outcome
            else:
                raise outcome
        await self._put_aside(refused)

    async def _pass_on(self, msg: Msg, shard: str) -> None:
        """Publish a batch whose run has moved for the database that has it now; a collector accepted it too late."""
        header = _decoded(msg.data).header
        stream = next(s for s in WORK if msg.subject.startswith(f"{s.prefix}."))
        subject = subject_of(stream, DEFAULT_TENANT, header.run, header.rank, shard)
        kept = {k: v for k, v in (msg.headers or {}).items() if k in (ID_HEADER, KEY_HEADER)}
        kept[ID_HEADER] = f"{kept.get(ID_HEADER, '')}.{shard or 'home'}"  # under its own it would be known, and dropped
        (failed,) = await self._queue.publish([Message(stream, subject, msg.data, kept)])
        if failed is not None:
            raise QueueError(f"a batch cannot be passed on ({failed})") from failed
        self.counts.passed_on += 1

    async def _put_aside(self, refused: Sequence[tuple[Msg, BaseException]]) -> None:
        for msg, why in refused:
            if isinstance(why, RunHasMoved):
                await self._pass_on(msg, why.to)
                continue
            said = f"{type(why).__name__}: {why}"
            log.error("a batch (%s) cannot be committed and goes to %s: %s", msg.subject, REFUSED.name, said)
            headers = {**(msg.headers or {}), WHY_HEADER: said[:200].replace("\n", " ").replace("\r", " ")}
            subject = ".".join([REFUSED.prefix, *msg.subject.split(".")[1:]])
            kept = {name: headers[name] for name in (ID_HEADER, KEY_HEADER, WHY_HEADER) if name in headers}
            (failed,) = await self._queue.publish([Message(REFUSED, subject, msg.data, kept)])
            if failed is not None:
                raise QueueError(f"a refused batch cannot be kept ({failed})") from failed
            self.counts.refused += 1


def _is_refusal(outcome: BaseException) -> bool:
    """Whether a batch can never be committed; what the database refuses of its values counts, too. Anything else that a database
    says is about the database: it is read-only, or lacks a right or a table."""
    if isinstance(outcome, DBAPIError):
        return isinstance(outcome, OF_THE_VALUES) and not outcome.connection_invalidated
    return isinstance(outcome, REFUSALS)


def _failed(why: Exception) -> asyncio.Future[Any]:
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    made.set_exception(why)
    return made


def _decode_all(messages: Sequence[Msg]) -> list[Batch | Exception]:
    out: list[Batch | Exception] = []
    for msg in messages:
        try:
            out.append(_decoded(msg.data))
        except Exception as e:  # noqa: BLE001  this message alone
            out.append(e)
    return out


def _decoded(body: bytes) -> Batch:
    return decode_batch(decompress(body), compressed=False)
