"""A proxy between agent and collector that does what networks do: nothing, too late, half, or something else.

It runs its own event loop on its own thread. The fault may be changed at any moment; it holds for connections and for
requests that begin afterwards. `num_bitten` counts what it did, so that a test can show that its fault was there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Fault:
    """What happens to a request. Without any of these it is passed on, and so is its answer."""

    delay_s: float = 0.0  # before it is passed on
    blackhole: bool = False  # it is read, and nothing ever comes back
    cut_after_bytes: int | None = None  # of the answer; then the connection is closed
    status: int | None = None  # answered here; the collector never sees it
    headers: str = ""  # of that answer, CRLF behind each
    garbage: bool = False  # bytes that are no HTTP
    bytes_per_s: float | None = None  # of the answer


UP = Fault()


class Proxy:
    """Listens on `url`; passes on to `upstream`."""

    def __init__(self, upstream: str | None) -> None:
        self._upstream = None if upstream is None else urlsplit(upstream)
        self.fault = UP
        self.num_requests = 0
        self.num_bitten = 0
        self.url = ""
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection is at its end."""
        raw = await _message(reader)
        fault = self.fault
        self.num_requests += 1
        self.num_bitten += fault != UP
        if fault.blackhole:
            await self._stop.wait()
            return False
        await asyncio.sleep(fault.delay_s)
        if fault.garbage:
            answer = b"\x16\x03\x01 this is no HTTP\r\n\r\n"
        elif fault.status is not None:
            answer = f"HTTP/1.1 {fault.status} fault\r\n{fault.headers}Content-Length: 0\r\n\r\n".encode()
        else:
            answer = await self._pass_on(raw)
        if fault.cut_after_bytes is not None:
            answer = answer[: fault.cut_after_bytes]
        if fault.bytes_per_s is not None:
            for byte in answer:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1 / fault.bytes_per_s)
        writer.write(answer)
        await writer.drain()
        return fault.cut_after_bytes is None and not fault.garbage

    async def _pass_on(self, raw: bytes) -> bytes:
        if self._upstream is None:
            return b"HTTP/1.1 502 no upstream\r\nContent-Length: 0\r\n\r\n"
        reader, writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        try:
            writer.write(raw)
            await writer.drain()
            return await _message(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one HTTP/1.1 message."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    return head + (await reader.readexactly(length) if length else b"")


@contextlib.contextmanager
def proxy(upstream: str | None) -> Iterator[Proxy]:
    """A proxy that is up, and gone afterwards."""
    made = Proxy(upstream)
    made.start()
    try:
        yield made
    finally:
        made.stop()
