"""The worker: pulls batches from its lanes of the queue, commits them, and acknowledges them after the commit.

Upstream:   fp8watch_server.queue.jetstream
Downstream: fp8watch_server.ingest.group_commit
Shapes:     messages of a lane, in order -> one transaction -> acknowledgements
Thread:     an event loop; decoding and the database have threads

Whatever fails between a pull and its acknowledgements, the lane begins again at its first batch that is not acknowledged:
what was committed before is known by its key. Urgent batches go first. One that no database will take (its run was
deleted, its key has another body) goes to a stream of its own, and blocks nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from fp8watch_agent.wire import Batch, WireError, decode_batch, decompress
from fp8watch_server.db.fence import RunHasMoved, is_fenced
from fp8watch_server.db.lease import BEAT_S
from fp8watch_server.db.schema import DEFAULT_TENANT
from fp8watch_server.ingest.group_commit import AWAY, Committer
from fp8watch_server.ingest.request_sender import RequestSender
from fp8watch_server.queue.jetstream import JetStream, Message, QueueError, Reader
from fp8watch_server.queue.subjects import (
    ID_HEADER,
    KEY_HEADER,
    REFUSED,
    URGENT,
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
RETRY_S = 0.5
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

Place = tuple[Stream, int]


@dataclass
class Counts:
    """What a worker has done."""

    committed: int = 0
    refused: int = 0
    passed_on: int = 0
    restarts: int = 0


@dataclass
class _Hand:
    """What is pulled and not acknowledged."""

    ready: dict[Place, list[Msg]] = field(default_factory=dict)
    pulls: dict[asyncio.Task[list[Msg]], Place] = field(default_factory=dict)
    readers: dict[Place, Reader] = field(default_factory=dict)


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
        self._committer = Committer(engine, _decoded)
        self._mine: set[int] = set()
        self._hand = _Hand()
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
                try:
                    await self._work()
                except QueueError as e:
                    log.warning("the worker begins again: %s", e)
                    await self._queue.close()  # another node may have a quorum
                except SQLAlchemyError as e:
                    self._say(str(e).splitlines()[0])
                except Exception:
                    log.exception("the worker failed; it begins again")
                await self._let_go()
                self.counts.restarts += not self._stopping.is_set()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), RETRY_S)
        finally:
            beats.cancel()
            await self._let_go()
            await asyncio.to_thread(self._committer.stop)
            await self._queue.close()

    def _say(self, why: str) -> None:
        """Why it waits, once."""
        if why != self._said:
            log.warning("the worker waits for the database%s: %s", f" of {self._shard!r}" if self._shard else "", why)
        self._said = why

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.to_thread(self._lanes.beat)

    async def _let_go(self) -> None:
        """Of everything in hand; whoever has a lane next begins at its first batch that is not acknowledged."""
        pulls = list(self._hand.pulls)
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        for reader in self._hand.readers.values():
            await reader.close()
        self._hand, self._mine = _Hand(), set()
        await asyncio.to_thread(self._lanes.release)

    async def _work(self) -> None:
        """Pull, commit, acknowledge.

        Raises:
            QueueError, SQLAlchemyError: something is away; begin again.
        """
        self._require()
        if not self._queue.ready:
            await self._queue.open()
        shared_at = -SHARE_EVERY_S
        while not self._stopping.is_set():
            if time.monotonic() - shared_at >= SHARE_EVERY_S:
                await self._share()
                shared_at = time.monotonic()
            self._pull()
            await self._collect()
            urgent = [place for place in self._hand.ready if place[0] is URGENT]
            await self._commit([self._hand.ready.pop(place) for place in urgent or list(self._hand.ready)])

    async def _share(self) -> None:
        """Which lanes are ours: new ones begin at their first batch, and those that are given back have nothing in hand."""
        before = set(self._mine)
        held = await asyncio.to_thread(self._lanes.hold)
        for lane in before - held:
            await self._drop(lane)
        if held - before:
            await self._queue.begin_lanes(held - before, self._shard)
        for lane in held - before:
            for stream in WORK:
                self._hand.readers[stream, lane] = await self._queue.reader(stream, lane, self._shard)
        self._mine = held
        self._said = ""

    async def _drop(self, lane: int) -> None:
        for place in [place for place in self._hand.ready if place[1] == lane]:
            del self._hand.ready[place]
        for pull, place in self._hand.pulls.items():
            if place[1] == lane:
                pull.cancel()
        for stream in WORK:
            if (reader := self._hand.readers.pop((stream, lane), None)) is not None:
                await reader.close()

    def _pull(self) -> None:
        busy = {*self._hand.pulls.values(), *self._hand.ready}
        for lane in sorted(self._mine):
            for stream in WORK:
                if (stream, lane) not in busy:
                    pull = asyncio.create_task(self._hand.readers[stream, lane].pull(WAIT_S))
                    self._hand.pulls[pull] = (stream, lane)

    async def _collect(self) -> None:
        """What the pulls have brought."""
        stopping = asyncio.create_task(self._stopping.wait())
        wait_s = 0 if self._hand.ready else SHARE_EVERY_S
        await asyncio.wait({*self._hand.pulls, stopping}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for pull in [pull for pull in self._hand.pulls if pull.done()]:
            place = self._hand.pulls.pop(pull)
            if not pull.cancelled() and place[1] in self._mine and (found := pull.result()):
                self._hand.ready[place] = found

    async def _commit(self, places: Sequence[list[Msg]]) -> None:
        """Commit all, then acknowledge."""
        messages = [msg for of_place in places for msg in of_place]
        batches = await asyncio.to_thread(_decode_all, messages)
        waiting: list[asyncio.Future[Any]] = []
        for msg, batch in zip(messages, batches, strict=True):
            if isinstance(batch, Batch):
                sender = RequestSender(key_sha256=(msg.headers or {}).get(KEY_HEADER, ""))
                waiting.append(self._committer.hand_in(batch, msg.data, sender))
            else:
                waiting.append(_failed(batch))
        done = await asyncio.gather(*waiting, return_exceptions=True)
        refused: list[tuple[Msg, BaseException]] = []
        for msg, outcome in zip(messages, done, strict=True):
            if isinstance(outcome, Committed):
                self.counts.committed += 1
            elif _is_refusal(outcome):
                refused.append((msg, outcome))
            else:
                raise outcome
        await self._put_aside(refused)
        await asyncio.gather(*(self._queue.acknowledge(of_place) for of_place in places))

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
    """Whether a batch can never be committed; what the database refuses of one batch while it is there counts, too."""
    if is_fenced(outcome):  # its run is being moved
        return False
    if isinstance(outcome, DBAPIError):
        return not isinstance(outcome, AWAY) and not outcome.connection_invalidated
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
