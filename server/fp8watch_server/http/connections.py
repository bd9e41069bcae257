"""HTTP connections with limits on header size, idle time and number.

Shapes:     bytes of a connection -> requests, or a refusal (400, 408, 431) and the end of the connection
Thread:     event loop

The parser concatenates the pieces of an unfinished header again and again on the event loop, so headers are limited
before they end. Idle time is counted in ticks of the loop and not by the clock, so that a process that was suspended
does not blame its clients. Computing an answer may take any time; a client that does not read it is disconnected.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fp8watch_server.http.errors import Problem


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection, and their maximum number."""

    max_header_bytes: int = 64 << 10
    max_headers: int = 100
    header_s: float = 10.0
    """For a request's header to be complete, counted from its first byte, or from the connection. Also for TLS to begin."""
    idle_s: float = 10.0
    """Without a byte of a body that is on its way; without a new request; without the client reading an answer."""
    min_body_bytes_per_s: int = 1024
    """A body that comes more slowly than this is given up, after the first `idle_s` seconds."""
    linger_s: float = 2.0
    """A refused client may go on sending, so that it reads why; what it sends is thrown away."""
    max_connections: int = 16_384

    @property
    def tick_s(self) -> float:
        """Interval of the idle checks."""
        return min(1.0, self.header_s / 10, self.idle_s / 10)


LIMITS = ConnectionLimits()


class Stage(Enum):
    """State of a connection. Those before ANSWER may be dropped for a new connection, in this order."""

    REFUSED = "refused"  # refused; further input is discarded
    NEW = "new"  # incomplete header
    IDLE = "idle"  # between two requests
    BODY = "body"  # receiving a body
    ANSWER = "answer"  # request complete, answer being computed or sent


class Connections:
    """All connections of a server by stage, each in order of time in that stage."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.limits = limits
        self._at: dict[Stage, OrderedDict[Connection, None]] = {stage: OrderedDict() for stage in Stage}
        self._ticking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._at.values()))

    def move(self, connection: Connection, before: Stage | None, after: Stage | None) -> None:
        """Change the stage of a connection; None: opened, or closed."""
        if before is not None:
            self._at[before].pop(connection, None)
        if after is not None:
            self._at[after][connection] = None

    def drop_one(self) -> bool:
        """Close the least valuable connection. False: all of them wait for answers."""
        for stage in (Stage.REFUSED, Stage.NEW, Stage.IDLE, Stage.BODY):
            if self._at[stage]:
                connection, _ = self._at[stage].popitem(last=False)
                connection.transport.abort()
                return True
        return False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the idle checks."""
        self._ticking = loop.call_later(self.limits.tick_s, self._tick, loop)

    def stop(self) -> None:
        """Stop the idle checks."""
        if self._ticking is not None:
            self._ticking.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.start(loop)
        for of_stage in self._at.values():
            for connection in list(of_stage):
                try:
                    connection.tick(self.limits.tick_s)
                except Exception:  # noqa: BLE001  the others have their limits whatever fails in one (TLS, closed twice)
                    connection.transport.abort()


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits. A NEW one whose transport does not exist yet cannot be dropped."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all, self._limits = connections, connections.limits
        self._stage: Stage | None = None
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._num_framing_bytes = 0  # since the last byte of body: chunk sizes and trailers
        self._waited_s = 0.0  # since the stage began
        self._silent_s = 0.0  # since the last bytes came
        self._unread_s = 0.0  # since the client last read output
        self._num_unread_bytes = 0
        self._refusal: Problem | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start accounting for the connection."""
        super().connection_made(transport)
        self._enter(Stage.NEW)

    def connection_lost(self, exc: Exception | None) -> None:
        """End accounting for the connection."""
        self._enter(None)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """The client has read output."""
        self._unread_s = 0.0
        super().resume_writing()

    def _enter(self, stage: Stage | None) -> None:
        self._all.move(self, self._stage, stage)
        self._stage, self._waited_s, self._silent_s = stage, 0.0, 0.0

    def data_received(self, data: bytes) -> None:
        """Feed the parser, never more of a header than the limit."""
        if self._is_refused():
            return
        self._silent_s = 0.0
        while data and not self.transport.is_closing():
            size = len(data)
            if self._stage in (Stage.NEW, Stage.IDLE):
                size = max(1, self._limits.max_header_bytes - self._num_header_bytes)
                self._num_header_bytes += len(data[:size])
            piece, data = data[:size], data[size:]
            self._num_framing_bytes += len(piece)
            super().data_received(piece)
            if self._is_refused():
                return
            if max(self._num_header_bytes, self._num_framing_bytes) >= self._limits.max_header_bytes:
                self._refuse(self._too_large())
                return

    def _is_refused(self) -> bool:
        return self._stage is Stage.REFUSED

    def on_message_begin(self) -> None:
        """First byte of a request."""
        super().on_message_begin()
        if self._stage is not Stage.NEW:
            self._enter(Stage.NEW)

    def on_headers_complete(self) -> None:
        """Header complete: accept or refuse it."""
        self._refusal = self._wrong()
        if self._refusal is not None:
            raise ValueError("refused")  # the parser stops, and send_400_response is called
        self._num_header_bytes = self._num_body_bytes = self._num_framing_bytes = 0
        super().on_headers_complete()
        self._enter(Stage.BODY)

    def _wrong(self) -> Problem | None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes or len(self.headers) > self._limits.max_headers:
            return self._too_large()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts != 1 and (num_hosts or self.parser.get_http_version() == "1.1"):
            return Problem(400, f"{num_hosts} Host headers", rule="a request names one host", remedy="send one Host")
        return None

    def _too_large(self) -> Problem:
        return Problem(
            431,
            "the request's header is too large",
            rule=f"at most {self._limits.max_header_bytes} bytes and {self._limits.max_headers} lines",
            remedy="send fewer and shorter headers",
        )

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_body_bytes += len(body)
        self._num_framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Request complete."""
        super().on_message_complete()
        self._num_framing_bytes = 0
        self._enter(Stage.IDLE if self.cycle.response_complete else Stage.ANSWER)

    def on_response_complete(self) -> None:
        """Answer complete; a pipelined request is next."""
        super().on_response_complete()
        if self._stage is Stage.ANSWER and self.cycle.response_complete:
            self._enter(Stage.IDLE)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not read, or the limits forbid."""
        self._refuse(self._refusal or Problem(400, msg, rule="HTTP/1.1", remedy="send a valid request"))

    def _refuse(self, problem: Problem) -> None:
        """Send the reason and close, but read on a little: a client that is cut off while sending never reads the
        answer.
        """
        if self.transport.is_closing():
            return
        asked = self._stage in (Stage.BODY, Stage.ANSWER)
        if self.cycle is not None and (self.cycle.response_started if asked else not self.cycle.response_complete):
            self.transport.abort()  # no answer is possible: it would be taken for that of an earlier request
            return
        if asked:
            self.cycle.disconnected = True  # discards any further answer of the application
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        response = problem.response()
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[problem.status] + lines + b"\r\n" + bytes(response.body))
        self._enter(Stage.REFUSED)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def tick(self, seconds: float) -> None:
        """Count elapsed idle time."""
        limits = self._limits
        self._waited_s += seconds
        self._silent_s += seconds
        unread = self.transport.get_write_buffer_size()
        self._unread_s = self._unread_s + seconds if 0 < self._num_unread_bytes <= unread else 0.0
        self._num_unread_bytes = unread
        if self._unread_s > limits.idle_s:
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._stage is Stage.REFUSED and self._waited_s > limits.linger_s:
            self.transport.close()
        elif self.flow.read_paused:  # paused by us: the collector has not read it yet
            self._waited_s = self._silent_s = 0.0
        elif self._stage is Stage.NEW and self._waited_s > limits.header_s:
            self._late("header", limits.header_s)
        elif self._stage is Stage.BODY and self._body_is_late():
            self._late("body", limits.idle_s)
        elif self._stage is Stage.IDLE and self._waited_s > limits.idle_s:
            self.transport.close()

    def _body_is_late(self) -> bool:
        allowed_s = self._limits.idle_s + self._num_body_bytes / self._limits.min_body_bytes_per_s
        return self._silent_s > self._limits.idle_s or self._waited_s > allowed_s

    def _late(self, what: str, seconds: float) -> None:
        if not self._num_header_bytes and self._stage is Stage.NEW:
            self.transport.close()  # no request pending
            return
        rule = f"a {what} comes within {seconds:g} s, and a body no slower than {self._limits.min_body_bytes_per_s} bytes/s"
        self._refuse(Problem(408, f"the request's {what} did not come in time", rule=rule, remedy="send it again"))
