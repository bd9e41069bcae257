"""Connections that somebody else's code opens, held to the rules of our own.

Shapes:     socket.connect -> allowed, or refused
Thread:     dispatcher; what is opened in other threads is not seen

A library that resolves names and follows redirects by itself cannot be handed a checked address. Python tells of every
connection before it is made (an audit event), with the address that was resolved: there each is held to `refusal`, so
that no name, redirect or second look-up leads inside. After TOTAL_S the sockets that were opened are shut.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fp8watch_server.notify.safe_http import TOTAL_S, refusal

_EVENTS = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
_here = threading.local()
_installing = threading.Lock()
_installed = False


class EgressWatch:
    """What was opened while it lasted."""

    def __init__(self) -> None:
        self.refused: str | None = None
        """Why a connection was not made; None where all were allowed."""
        self.late = False
        """Whether the time was over before the work was done."""
        self._sockets: list[Any] = []

    def opens(self, sock: Any, address: Any) -> None:
        """A connection is about to be made. Raises ConnectionRefusedError where it may not be."""
        if isinstance(address, str | bytes):
            reason: str | None = "it is a socket of this machine; give a service on the network"
        elif address is None:  # of a socket that is connected already
            return
        else:
            try:
                reason = refusal(str(address[0]), from_operator=True)
            except ValueError:
                reason = "it is a name that was not resolved; give a service that apprise reaches over HTTP"
        if reason is not None:
            self.refused = self.refused or reason
            raise ConnectionRefusedError(reason)
        self._sockets.append(sock)

    def end(self) -> None:
        """The time is over."""
        self.late = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


@contextlib.contextmanager
def watched(total_s: float | None = None) -> Iterator[EgressWatch]:
    """Hold every connection of this thread to the rules."""
    _install()
    watch = _here.watch = EgressWatch()
    timer = threading.Timer(TOTAL_S if total_s is None else total_s, watch.end)
    timer.daemon = True
    timer.start()
    try:
        yield watch
    finally:
        _here.watch = None
        timer.cancel()


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    watch: EgressWatch | None = getattr(_here, "watch", None)
    if watch is not None:
        watch.opens(args[0], args[1])


def _install() -> None:
    """Once in a process, and only where it is needed: a hook cannot be taken out again."""
    global _installed
    with _installing:
        if not _installed:
            sys.addaudithook(_hook)
            _installed = True
