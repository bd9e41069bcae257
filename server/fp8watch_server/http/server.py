"""uvicorn server that accepts connections within the process's file descriptor limit.

Shapes:     a listening socket -> Connections
Thread:     event loop

Connections are accepted here and not by the event loop, which would accept until the database has no descriptor left,
and counts none before its TLS handshake ends. When all places are taken, the least valuable connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import uvicorn

from fp8watch_server.http.connections import LIMITS, Connection, ConnectionLimits, Connections
from fp8watch_server.http.errors import OUT_OF_DESCRIPTORS

log = logging.getLogger("fp8watch.collector")

RESERVED_DESCRIPTORS = 256
"""For the database, pages and messages: SQLite takes three for each connection of its pool."""
PAUSE_S = 0.05
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def raise_descriptor_limit() -> int | None:
    """Raise this process's limit of open files to the maximum; returns it, or None where there is no limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == resource.RLIM_INFINITY else soft


def limits_within(num_descriptors: int | None, limits: ConnectionLimits = LIMITS) -> ConnectionLimits:
    """The limits, with the number of connections reduced to the available descriptors."""
    if num_descriptors is None:
        return limits
    left = num_descriptors - min(RESERVED_DESCRIPTORS, num_descriptors // 2)
    return replace(limits, max_connections=min(limits.max_connections, left))


class Server(uvicorn.Server):
    """uvicorn's server with connection limits; on shutdown it ends the event streams of open pages first.

    Args:
        app: the application.
        limits: of connections.
        on_started: is called once it listens.
        config: what uvicorn.Config takes.
    """

    def __init__(
        self,
        app: Any,
        *,
        limits: ConnectionLimits = LIMITS,
        on_started: Callable[[], None] = lambda: None,
        **config: Any,
    ) -> None:
        given = {"access_log": False, "log_config": None, "server_header": False, "http": "httptools", "ws": "none"}
        super().__init__(uvicorn.Config(app, **{**given, **config}))
        self.connections = Connections(limits)
        self._on_started = on_started
        self._accepting: list[asyncio.Task[None]] = []
        self._opening: OrderedDict[asyncio.Task[None], socket.socket] = OrderedDict()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections."""
        await super().startup(sockets=[])
        if not self.started:
            return
        loop = asyncio.get_running_loop()
        self.connections.start(loop)
        for sock in sockets or []:
            sock.setblocking(False)
            self._accepting.append(loop.create_task(self._accept(loop, sock)))
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, end the streams, and wait for answers in progress."""
        for task in (*self._accepting, *self._opening):
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        live = getattr(getattr(self.config.app, "state", None), "live", None)  # absent without pages
        if live is not None:
            live.close()
        await super().shutdown(sockets)
        self.connections.stop()

    async def _accept(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as e:
                if e.errno in OUT_OF_DESCRIPTORS:
                    log.warning("no descriptor is left for a connection: %s", e)
                    self._make_room()
                elif e.errno == errno.EBADF:
                    return
                if e.errno != errno.ECONNABORTED:  # no memory, a firewall: transient; yield to the other tasks
                    await asyncio.sleep(PAUSE_S)
                continue  # the client is gone
            if self._is_full() and not self._make_room():
                self._turn_away(accepted)
                continue
            task = loop.create_task(self._open(loop, accepted))
            self._opening[task] = accepted
            task.add_done_callback(functools.partial(self._opened, accepted))

    def _is_full(self) -> bool:
        return len(self.connections) + len(self._opening) >= self.connections.limits.max_connections

    def _make_room(self) -> bool:
        """Close the least valuable connection; one in its TLS handshake is worth the least."""
        if self.config.is_ssl and self._opening:
            task, _ = self._opening.popitem(last=False)
            task.cancel()
            return True
        return self.connections.drop_one()

    def _turn_away(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if not self.config.is_ssl:
                accepted.send(FULL)
        accepted.close()

    async def _open(self, loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
        """Start TLS if configured, and hand over to a Connection."""

        def protocol() -> Connection:
            return Connection(
                self.connections,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )

        tls: dict[str, Any] = {}
        if self.config.is_ssl:
            tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": self.connections.limits.header_s}
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.connect_accepted_socket(protocol, accepted, **tls)

    def _opened(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)
        if task.cancelled() or task.exception() is not None:  # no TLS, too slow, or gone
            accepted.close()
