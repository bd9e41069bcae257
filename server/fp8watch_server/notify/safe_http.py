"""Where a message may go: a checked URL, a pinned address, one bounded request.

Shapes:     URL, headers, body -> Answer
Thread:     dispatcher, one per channel

The rule, for every request: http or https only; every address that the host resolves to must be global; the connection
goes to the address that was checked, so a second look-up cannot lead elsewhere; redirects are not followed; 5 s for
connecting, 5 s for each read and 10 s for all of it; at most 64 KiB of an answer is read. One exception: a URL that the operator gave in
the environment (or in a file that the environment names) may also be a loopback address, because a receiver beside the
collector is ordinary. Private networks, link-local addresses (cloud metadata) and all others are refused for everyone.
A URL is a secret: it is never in a message, a log or an error; `masked` is.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError

from fp8watch_server.http.logs import without
from fp8watch_server.settings.webhook_url import TargetError, check_url, split_url

TIMEOUT_S = 5.0
"""For connecting, and again for each read."""
TOTAL_S = 10.0
"""For the whole request: a receiver that sends a byte now and then holds nobody up for longer."""
MAX_ANSWER_BYTES = 64 << 10
_MAX_ERROR_CHARS = 200

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Ending:
    """Breaks the connections of a pool when their time is over; timeouts of a socket begin anew with every byte."""

    def __init__(self, pool: urllib3.HTTPConnectionPool) -> None:
        sockets: list[Any] = []
        kind = pool.ConnectionCls

        class Watched(kind):  # type: ignore[valid-type, misc]
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        pool.ConnectionCls = Watched
        self._sockets = sockets
        self._timer: threading.Timer | None = None

    def after(self, seconds: float) -> None:
        """From now."""
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """It came to its end by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # beneath TLS: it would wait for a goodbye


class Unreachable(Exception):
    """Nothing answered; another try may."""


@dataclass(frozen=True)
class Answer:
    """What the receiver said."""

    status: int
    retry_after_s: float | None
    text: str  # the beginning of an error's body, without the receiver's address


@dataclass(frozen=True)
class Target:
    """A URL to post to.

    Args:
        url: the secret.
        from_operator: it came from the environment of this process, so it may be loopback.
    """

    url: str
    from_operator: bool = False

    def __post_init__(self) -> None:
        check_url(self.url)

    def __repr__(self) -> str:
        return f"Target({self.masked!r})"

    @property
    def masked(self) -> str:
        """Scheme and host: all of the URL that may be shown."""
        parts = split_url(self.url)
        return f"{parts.scheme}://{parts.hostname}/…"

    def post(self, body: bytes, headers: dict[str, str], *, timeout_s: float = TIMEOUT_S) -> Answer:
        """One request, no retries.

        Raises:
            TargetError: the host resolves to an address that is not allowed.
            Unreachable: no address, no connection, no answer in time.
        """
        parts = split_url(self.url)
        host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
        address = self._checked_address(host, port)
        timeout = urllib3.Timeout(connect=timeout_s, read=timeout_s)
        pool: urllib3.HTTPConnectionPool
        if parts.scheme == "https":
            pool = urllib3.HTTPSConnectionPool(
                address, port, timeout=timeout, retries=False, server_hostname=host, assert_hostname=host
            )
        else:
            pool = urllib3.HTTPConnectionPool(address, port, timeout=timeout, retries=False)
        ending = _Ending(pool)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        shown = f"[{host}]" if ":" in host else host
        host_header = shown if parts.port is None else f"{shown}:{parts.port}"
        try:
            ending.after(min(TOTAL_S, 2 * timeout_s))
            answer = pool.urlopen(
                "POST",
                path,
                body=body,
                headers={"Host": host_header, "User-Agent": "fp8watch", **headers},
                redirect=False,
                preload_content=False,
            )
            try:
                ok = 200 <= answer.status < 300
                text = b"" if ok else answer.read(MAX_ANSWER_BYTES)
                return Answer(
                    status=answer.status,
                    retry_after_s=_retry_after_s(answer.headers.get("Retry-After"), answer.headers.get("Date")),
                    text=without(text.decode("utf-8", "replace").strip(), self.url)[:_MAX_ERROR_CHARS],
                )
            finally:
                answer.close()
        except (HTTPError, OSError) as e:
            raise Unreachable(f"{self.masked}: {type(e).__name__}") from None  # the cause may hold the URL
        finally:
            ending.cancel()
            pool.close()

    def _checked_address(self, host: str, port: int) -> str:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Unreachable(f"{self.masked}: the host name does not resolve") from None
        addresses = [str(info[4][0]) for info in found]
        for text in addresses:
            reason = refusal(text, from_operator=self.from_operator)
            if reason:
                raise TargetError(f"{self.masked}: {reason}")
        return addresses[0]


def refusal(address: str, *, from_operator: bool) -> str | None:
    """Why an address may not be connected to; None where it may."""
    ip: Address = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped  # ::ffff:127.0.0.1 is 127.0.0.1
    if ip.is_loopback:
        if from_operator:
            return None
        return f"{ip} is loopback; that is allowed only for URLs from the collector's own environment"
    if not ip.is_global or ip.is_multicast:
        return f"{ip} is not a global address; give a receiver on a global address, or one on loopback that forwards"
    return None


def _retry_after_s(value: str | None, date: str | None) -> float | None:
    """Retry-After in seconds, from seconds or from an HTTP date (by the receiver's own clock)."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value.strip())
    try:
        until = parsedate_to_datetime(value)
        now = parsedate_to_datetime(date or "")
        return max(0.0, (until - now).total_seconds())
    except (TypeError, ValueError):  # TypeError: one of them names no time zone
        return None
