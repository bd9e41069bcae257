"""Batches accepted into a queue: decoded, checked, published, and answered when the stream has acknowledged them.

Upstream:   fp8watch_server.ingest.group_commit
Downstream: fp8watch_server.queue.jetstream
Shapes:     one body -> Committed, or the exception that says why not
Thread:     a few decoders, one publisher; the connection has an event loop on a thread of its own

The same groups and the same answers as a commit. A full stream, a queue without a quorum and one that is not there are a
503: agents keep their batches, and those with non-finite values have room of their own.

A batch with non-finite values or broken scales takes a short cut besides: it is committed at once from here, so that its
incident waits for no election of the queue and for no worker. A worker commits it later, and finds its key there. Where
the queue does not take it, and the database has it, it is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from sqlalchemy.engine import Engine

from fp8watch_agent.wire import Batch
from fp8watch_server.db.schema import DEFAULT_TENANT
from fp8watch_server.http.db_timeout import unavailable
from fp8watch_server.ingest.group_commit import AWAY, Committer
from fp8watch_server.ingest.registered import Registered
from fp8watch_server.ingest.request_sender import RequestSender
from fp8watch_server.pipeline.priority import is_urgent
from fp8watch_server.queue.jetstream import PUBLISH_S, JetStream, Message, QueueError
from fp8watch_server.queue.subjects import HEALTHY, ID_HEADER, KEY_HEADER, URGENT, message_id, subject_of
from fp8watch_server.settings import Settings
from fp8watch_server.store.commit import Committed, Incoming
from fp8watch_server.store.registrations import KeyReused

log = logging.getLogger("fp8watch.queue")

RETRY_S = 1.0
MAX_SHORT_CUTS = 32
"""Batches on the short cut at once; a storm of broken ones goes through the queue, and its first ones say enough."""
SHORT_CUT_TRIES_S, SHORT_CUT_RETRY_S = 10.0, 0.2
SHORT_CUT_S = 1.0
"""How long a batch that the queue has not taken waits for the database."""
MAX_KEYS = 1 << 16
"""Batches whose body's hash is remembered, so that another body under the same key is refused at once."""


class QueueFront(Committer):
    """A committer whose store is the queue.

    Args:
        engine: the database, for what is registered.
        decode: as of Committer.
        settings: where the queue is.
        observe_commit: is told the seconds of each publishing, once for every batch in it.
        hurry: as of Committer, of what took the short cut.
        shard: whose database it is; "": home.
    """

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[bytes], Batch],
        settings: Settings,
        *,
        observe_commit: Callable[[float], None] = lambda seconds: None,
        hurry: Callable[[str, str], None] = lambda run_id, tenant: None,
        shard: str = "",
    ) -> None:
        super().__init__(engine, decode, observe_commit=observe_commit)
        self._direct = Committer(engine, decode, hurry=hurry)
        self._num_short_cuts = 0  # changed by the connection's thread
        self._shard = shard
        self._registered = Registered(engine)
        self._keys: OrderedDict[tuple[str, str, int, int], bytes] = OrderedDict()
        self._queue = JetStream(
            settings.queue,
            replicas=settings.queue_replicas,
            max_bytes=settings.queue_bytes,
            client="fp8watch collector",
        )
        self._loop = asyncio.new_event_loop()
        self._again = asyncio.Event()
        self._main = threading.Thread(target=self._run, name="fp8watch-queue", daemon=True)
        self._main.start()

    @property
    def queue_ready(self) -> bool | None:
        """Whether the queue takes batches."""
        return self._queue.ready

    def stop(self, timeout_s: float = 10.0) -> None:
        """Publish what has been handed in, and end."""
        super().stop(timeout_s)
        self._direct.stop(timeout_s)
        self._registered.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._main.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        keeping = self._loop.create_task(self._keep_open())
        self._loop.run_forever()
        keeping.cancel()
        self._loop.run_until_complete(asyncio.gather(keeping, self._queue.close(), return_exceptions=True))
        self._loop.close()

    async def _keep_open(self) -> None:
        """Connect until it works, and look after the streams when publishing fails."""
        said = ""
        while True:
            try:
                if self._queue.ready:
                    await self._queue.make_streams()
                else:
                    await self._queue.open()
                    log.info("the queue is there")
                said = ""
                await self._again.wait()
                self._again.clear()
            except Exception as e:  # noqa: BLE001  nothing may end it
                if str(e) != said:
                    log.warning("batches are refused: %s", e)
                said = str(e)
                await self._queue.close()  # another node may have a quorum
            await asyncio.sleep(RETRY_S)

    def _write(self, items: list[Incoming]) -> list[Any]:
        """Publish what is right; each batch has its own answer."""
        answers: list[Any] = [
            wrong or self._reused(i) for i, wrong in zip(items, self._registered.check(items), strict=True)
        ]
        at = [n for n, wrong in enumerate(answers) if wrong is None]
        short_cuts = {n: self._short_cut(items[n]) for n in at if is_urgent(items[n].batch)}
        published = dict(zip(at, self._publish([items[n] for n in at]), strict=True))
        committed = _committed({n: of for n, of in short_cuts.items() if published[n] is not None})
        for n, failed in published.items():
            header = items[n].batch.header
            if failed is None or n in committed:
                self._keys[header.run, header.session, header.rank, header.seq] = items[n].sha256
                answers[n] = Committed(header.seq, True, self._registered.captures(header.run))
            else:
                answers[n] = unavailable(f"the queue has not taken it: {failed}")
        while len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return answers

    def _short_cut(self, item: Incoming) -> Future[Committed]:
        """Begin to commit a batch; whatever hinders it, the worker will."""
        return asyncio.run_coroutine_threadsafe(self._commit_now(item), self._loop)

    async def _commit_now(self, item: Incoming) -> Committed:
        if self._num_short_cuts >= MAX_SHORT_CUTS:
            raise QueueError("too many take the short cut")
        self._num_short_cuts += 1
        until, sender = time.monotonic() + SHORT_CUT_TRIES_S, RequestSender(key_sha256=item.key_sha256)
        try:
            while True:
                try:
                    return await self._direct.hand_in(item.batch, item.body, sender)
                except AWAY:  # a connection that died with its server is one of many
                    if time.monotonic() > until:
                        raise
                await asyncio.sleep(SHORT_CUT_RETRY_S)
        finally:
            self._num_short_cuts -= 1

    def _reused(self, item: Incoming) -> KeyReused | None:
        h = item.batch.header
        before = self._keys.get((h.run, h.session, h.rank, h.seq), item.sha256)
        return None if before == item.sha256 else KeyReused()

    def _publish(self, items: Sequence[Incoming]) -> Sequence[Exception | None]:
        if not items:
            return []
        work: Future[list[Exception | None]] = asyncio.run_coroutine_threadsafe(
            self._queue.publish([_message(item, self._shard) for item in items]), self._loop
        )
        try:
            done: Sequence[Exception | None] = work.result(2 * PUBLISH_S)
        except FutureTimeoutError:
            work.cancel()
            done = [QueueError("it does not answer")] * len(items)
        if any(done):
            self._loop.call_soon_threadsafe(self._again.set)
        return done


def _committed(short_cuts: Mapping[int, Future[Committed]]) -> set[int]:
    """Those that the database has, within SHORT_CUT_S."""
    done = wait(short_cuts.values(), SHORT_CUT_S).done
    return {n for n, of in short_cuts.items() if of in done and not of.cancelled() and of.exception() is None}


def _message(item: Incoming, shard: str) -> Message:
    h = item.batch.header
    stream = URGENT if is_urgent(item.batch) else HEALTHY
    headers = {ID_HEADER: message_id(h.run, h.session, h.rank, h.seq, item.sha256)}
    if item.key_sha256:
        headers[KEY_HEADER] = item.key_sha256
    return Message(stream, subject_of(stream, DEFAULT_TENANT, h.run, h.rank, shard), item.body, headers)
