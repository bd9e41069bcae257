"""The client of JetStream: streams and consumers as this collector needs them, publishing, pulling, acknowledging.

Upstream:   fp8watch_server.ingest.queue_front
Downstream: fp8watch_server.worker.loop
Shapes:     messages -> acknowledged by the stream, or why not
Thread:     the event loop that connected

Imported only where a queue is configured: nats-py comes with `fp8watch[nats]`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from fp8watch_agent.wire import MAX_WIRE_BYTES
from fp8watch_server.queue.subjects import STREAMS, Stream, consumer_of, lane_subject

log = logging.getLogger("fp8watch.queue")

MIN_PAYLOAD_BYTES = MAX_WIRE_BYTES + 4096
"""A body of the largest size, and its headers."""
DUPLICATE_WINDOW_S = 120.0
"""What is published again within it is one message; after it, the database knows the key."""
ACK_WAIT_S, ACK_S = 60.0, 3.0
OPEN_S, RECONNECT_S = 5.0, 0.2
PUBLISH_S = 2.0
REQUEST_S = 5.0
BEGIN_S = 3.0
"""For one lane to begin: while its consumer elects a leader, nobody answers."""
PULL_BATCHES, PULL_BYTES = 64, 8 << 20
HEARTBEAT_S, SILENT_S = 1.0, 2.5
"""How often the leader of a consumer says that it still has a pull, and how long it may say nothing."""
PAUSE_S = 0.05


class QueueError(Exception):
    """Why the queue cannot be used: what is wrong, and the remedy."""


@dataclass(frozen=True)
class Message:
    """What is published."""

    stream: Stream
    subject: str
    body: bytes
    headers: dict[str, str]


class JetStream:
    """One connection.

    Args:
        servers: URLs, separated by commas.
        replicas: of each stream.
        max_bytes: of all streams together.
        client: name of this connection, for the server's monitoring.
    """

    def __init__(self, servers: str, *, replicas: int, max_bytes: int, client: str) -> None:
        self._servers = servers.split(",")
        self._replicas, self._max_bytes, self._name = replicas, max_bytes, client
        self._nc: Client | None = None
        self._js: JetStreamContext | None = None
        self.why = "the queue has not been reached yet"

    @property
    def ready(self) -> bool:
        """Whether it is connected, and the streams are there."""
        return self._js is not None and self._nc is not None and self._nc.is_connected

    async def open(self) -> None:
        """Connect, and make the streams.

        Raises:
            QueueError: it cannot be reached, or is not configured for this.
        """
        try:
            await self._open()
        except QueueError as e:
            self.why = str(e)
            await self.close()
            raise
        except (nats.errors.Error, OSError, asyncio.TimeoutError) as e:
            await self.close()
            self.why = f"the queue cannot be reached ({type(e).__name__}: {e}); check FP8WATCH_QUEUE and that it runs"
            raise QueueError(self.why) from e

    async def _open(self) -> None:
        async def told(e: Exception) -> None:
            log.debug("%s", e)

        async def lost() -> None:
            self.why = "the queue is not connected"
            if nc is self._nc:  # else it was closed on purpose
                log.warning("the connection to the queue is lost; connecting again")

        await self.close()
        self._nc = nc = Client()
        connecting = nc.connect(
            self._servers,
            name=self._name,
            connect_timeout=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]  # it sleeps so long
            ping_interval=5,
            max_outstanding_pings=2,
            error_cb=told,
            disconnected_cb=lost,
            allow_reconnect=True,
        )
        await asyncio.wait_for(connecting, OPEN_S)  # it would try for ever
        if nc.max_payload < MIN_PAYLOAD_BYTES:
            raise QueueError(
                f"the queue takes messages of at most {nc.max_payload} bytes, and a batch may have {MIN_PAYLOAD_BYTES}; "
                "set max_payload: 9MB in the configuration of the NATS servers"
            )
        self._js = nc.jetstream(timeout=REQUEST_S)
        await self.make_streams()

    async def make_streams(self) -> None:
        """Make the streams that are not there, and give those that are there the size and the replicas that are set.

        Raises:
            QueueError: the servers cannot.
        """
        js = self._js
        if js is None:
            raise QueueError(self.why)
        for stream in STREAMS:
            await self._make(js, stream)

    async def _make(self, js: JetStreamContext, stream: Stream) -> None:
        config = api.StreamConfig(
            name=stream.name,
            subjects=[f"{stream.prefix}.>"],
            retention=api.RetentionPolicy.WORK_QUEUE if stream.work else api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.NEW if stream.work else api.DiscardPolicy.OLD,
            storage=api.StorageType.FILE,
            max_bytes=self._max_bytes * stream.share // 8,
            num_replicas=self._replicas,
            duplicate_window=DUPLICATE_WINDOW_S,
        )
        try:
            try:
                there = (await js.stream_info(stream.name)).config
            except NotFoundError:
                await js.add_stream(config)
                return
            if (there.max_bytes, there.num_replicas) != (config.max_bytes, config.num_replicas):
                await js.update_stream(config)
        except APIError as e:
            raise QueueError(
                f"stream {stream.name} cannot be made with {self._replicas} replicas and {config.max_bytes} bytes "
                f"({e.description}); FP8WATCH_QUEUE_REPLICAS is at most the number of servers, "
                "FP8WATCH_QUEUE_BYTES at most what they may store"
            ) from e

    async def publish(self, messages: Sequence[Message]) -> list[Exception | None]:
        """Publish messages in order; None for each one that the stream has acknowledged."""
        if not self.ready:
            return [QueueError(self.why)] * len(messages)
        done = await asyncio.gather(*(self._publish(m) for m in messages), return_exceptions=True)
        return [e if isinstance(e, Exception) else None for e in done]

    async def _publish(self, message: Message) -> None:
        js, headers = self._js, dict(message.headers)
        if js is None:
            raise QueueError(self.why)
        await js.publish(message.subject, message.body, timeout=PUBLISH_S, stream=message.stream.name, headers=headers)

    async def begin_lane(self, stream: Stream, lane: int, shard: str = "") -> None:
        """Take a lane of a shard over: whatever a reader before us had in hand comes again, in the order of the stream.

        Raises:
            QueueError: it did not work; begin again.
        """
        if not self.ready:
            raise QueueError(self.why)
        try:
            await asyncio.wait_for(self._begin(stream, lane, shard), BEGIN_S)
        except (nats.errors.Error, OSError, asyncio.TimeoutError) as e:
            raise QueueError(f"lane {lane} of {stream.name} does not begin ({type(e).__name__}: {e})") from e

    async def _begin(self, stream: Stream, lane: int, shard: str) -> None:
        js = self._js
        if js is None:
            raise QueueError(self.why)
        with suppress(NotFoundError):
            if not (await js.consumer_info(stream.name, consumer_of(lane, shard))).num_ack_pending:
                return  # nobody has anything of it in hand
            await js.delete_consumer(stream.name, consumer_of(lane, shard))
        config = api.ConsumerConfig(
            durable_name=consumer_of(lane, shard),
            filter_subject=lane_subject(stream, lane, shard),
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_ack_pending=4 * PULL_BATCHES,
        )
        await js.add_consumer(stream.name, config)

    async def reader(self, stream: Stream, lane: int, shard: str = "") -> Reader:
        """What reads a lane.

        Raises:
            QueueError: the queue cannot be reached.
        """
        nc = self._nc
        if not self.ready or nc is None:
            raise QueueError(self.why)
        return Reader(nc, await nc.subscribe(nc.new_inbox()), stream, consumer_of(lane, shard))

    async def num_waiting(self, stream: Stream, prefix: str) -> int:
        """How many messages of the lanes under a prefix are not acknowledged by their reader.

        Raises:
            QueueError: the queue cannot be asked.
        """
        js = self._js
        if js is None:
            raise QueueError(self.why)
        try:
            state = (await js.stream_info(stream.name, subjects_filter=f"{prefix}*")).state
        except (nats.errors.Error, OSError, asyncio.TimeoutError) as e:
            raise QueueError(f"the queue does not answer ({type(e).__name__})") from e
        return sum((state.subjects or {}).values())

    async def acknowledge(self, messages: Sequence[Msg]) -> None:
        """They are committed. The last one is confirmed; the server takes acknowledgements in order."""
        if not messages:
            return
        try:
            for msg in messages[:-1]:
                await msg.ack()
            await messages[-1].ack_sync(timeout=ACK_S)
        except (nats.errors.Error, OSError, asyncio.TimeoutError) as e:
            raise QueueError(f"the queue did not take acknowledgements ({type(e).__name__})") from e

    async def close(self) -> None:
        """End the connection."""
        nc, self._nc, self._js = self._nc, None, None
        if nc is not None:
            with suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
                await nc.close()


class Reader:
    """Messages of one lane, in order.

    The inbox outlives each pull: a replicated consumer sends a message after its quorum, and the status that ends a pull
    may come before it.
    """

    def __init__(self, nc: Client, sub: Subscription, stream: Stream, consumer: str) -> None:
        self._nc, self._sub = nc, sub
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{consumer}"
        self._num_asked = 0  # of the pull under way, messages that have not come

    async def pull(self, wait_s: float) -> list[Msg]:
        """Messages that are there, else the first ones that come within `wait_s`, if any.

        Raises:
            QueueError: the consumer is gone or has no leader, or the queue cannot be reached. What it had sent last may be
                lost: begin the lane again.
        """
        if not self._nc.is_connected:
            raise QueueError("the queue is not connected")
        try:
            if self._num_asked <= 0 and not self._sub.pending_msgs:
                self._num_asked = PULL_BATCHES
                ask = {"batch": PULL_BATCHES, "expires": int(wait_s * 1e9), "max_bytes": PULL_BYTES + MIN_PAYLOAD_BYTES}
                ask["idle_heartbeat"] = int(HEARTBEAT_S * 1e9)
                await self._nc.publish(self._subject, json.dumps(ask).encode(), self._sub.subject)
            found = [msg] if self._is_data(msg := await self._sub.next_msg(timeout=SILENT_S)) else []
            while self._sub.pending_msgs and len(found) < PULL_BATCHES:
                if self._is_data(msg := await self._sub.next_msg(timeout=1)):
                    found.append(msg)
        except nats.errors.TimeoutError as e:  # a leader that died in the middle says nothing
            raise QueueError(f"the queue has said nothing for {SILENT_S:g} s") from e
        except (nats.errors.Error, OSError) as e:
            raise QueueError(f"the queue does not answer ({type(e).__name__})") from e
        if not found and self._num_asked <= 0:  # else a sign of life
            await asyncio.sleep(PAUSE_S)
        return found

    def _is_data(self, msg: Msg) -> bool:
        headers = msg.headers or {}
        status = headers.get("Status") if not msg.data else None
        if status is None:
            self._num_asked -= 1
            return True
        why = headers.get("Description", "")
        if status == "503" or "Deleted" in why:
            raise QueueError(f"a pull was answered {status} {why}")
        if status != "100":  # the pull has ended
            self._num_asked = 0
        return False

    async def close(self) -> None:
        """Read no more."""
        with suppress(nats.errors.Error, OSError):
            await self._sub.unsubscribe()
