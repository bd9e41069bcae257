"""Collectors as processes, forked from one that has imported everything: a start costs milliseconds, not seconds.

A child is a process of its own, with its own environment, files and signals; SIGKILL is SIGKILL. Only what Python does
before the first line of `fp8watch serve` is shared.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import lru_cache
from pathlib import Path
from types import FrameType

MAX_REQUEST_BYTES = 1 << 17
PR_SET_PDEATHSIG = 1
BIRTH_S = 240.0
"""For the nursery's own imports before the first child, on a machine that others use."""


class Child:
    """The part of subprocess.Popen that is needed here."""

    def __init__(self, status: socket.socket, out: int, err: int) -> None:
        self._status = status
        self.stdout = io.open(out)  # noqa: SIM115, UP020  closed by communicate
        self._err = io.open(err)  # noqa: SIM115, UP020
        self.returncode: int | None = None
        born = self._line(BIRTH_S)
        if born is None:  # it would be taken for the exit status later, and the child would never be killed
            raise RuntimeError(f"the nursery has not started a collector within {BIRTH_S:g} s")
        self.pid = int(born)

    def _line(self, timeout_s: float) -> str | None:
        if not select.select([self._status], [], [], timeout_s)[0]:
            return None
        got = self._status.recv(32)
        if not got:
            raise RuntimeError("the nursery has ended")
        return got.decode()

    def poll(self) -> int | None:
        """The return code, if it has ended."""
        if self.returncode is None and (line := self._line(0)) is not None:
            self.returncode = int(line)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To a child that has not ended; its number is not given away before its end is read."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; what it has written since."""
        until = time.monotonic() + timeout
        texts = ["", ""]

        def read(i: int, file: io.TextIOWrapper) -> None:
            texts[i] = file.read()

        readers = [threading.Thread(target=read, args=(i, f)) for i, f in enumerate((self.stdout, self._err))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        if self.returncode is None:
            line = self._line(max(0.0, until - time.monotonic()))
            if line is None:
                raise subprocess.TimeoutExpired("a collector", timeout)
            self.returncode = int(line)
        self.stdout.close()
        self._err.close()
        self._status.close()
        return texts[0], texts[1]


class Nursery:
    """The process that forks; this is its end in the tests."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        atexit.register(self.stop)

    def bear(self, args: list[str], env: dict[str, str]) -> Child:
        """A collector with these arguments and this environment."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, err = os.pipe(), os.pipe()
        message = json.dumps([args, env]).encode()
        assert len(message) < MAX_REQUEST_BYTES
        socket.send_fds(self._sock, [message], [out[1], err[1], theirs.fileno()])
        theirs.close()
        os.close(out[1])
        os.close(err[1])
        return Child(mine, out[0], err[0])

    def stop(self) -> None:
        """Its children have ended by now, or end with their tests."""
        self._sock.close()
        self._process.wait(10)


@lru_cache(maxsize=1)
def nursery() -> Nursery:
    """One for all tests."""
    return Nursery()


def _reap(born: dict[int, socket.socket]) -> None:
    while born:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(OSError), born.pop(pid) as told:
            told.send(str(os.waitstatus_to_exitcode(status)).encode())


def _live(args: list[str], env: dict[str, str], fds: list[int]) -> None:
    """In the child. A test run that is killed leaves no collector behind: where the nursery ends, its children do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.environ.clear()
    os.environ.update(env)
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    for fd in fds:
        os.close(fd)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from collector.serve import main

    if "FP8WATCH_TEST_TRACE" in env:
        from cluster.traced import install

        install()
    status = 1
    try:
        status = main(args)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _rehearse() -> None:
    """A short life, so that children know from birth what it takes a tenth of a second to learn: imports, routes, SQL."""
    import httpx
    import uvicorn.lifespan.on  # noqa: F401
    from collector.kit import Agent, Recorder, make_site, served

    import fp8watch_server.detect.rules
    import fp8watch_server.detect.sessions
    import fp8watch_server.incidents.messages
    import fp8watch_server.notify.service
    import fp8watch_server.pages.routes  # noqa: F401  of a whole collector
    from fp8watch_server.app import create_app
    from fp8watch_server.db.dialect import make_engine
    from fp8watch_server.settings import Settings

    make_engine("postgresql+psycopg://nobody@127.0.0.1/nothing").dispose()  # the driver; nothing is opened
    with tempfile.TemporaryDirectory() as folder:
        settings, detection = Settings(database_url=f"sqlite:///{folder}/first.db"), Recorder().detection()
        app = create_app(settings, detection=detection, dispatcher=lambda engine, settings: None, pages=False)
        with served(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
            agent, sites = Agent(client), [make_site()]
            agent.register(sites).send(sites, [1])
        app.state.worker.drain()
        app.state.ingest.stop()
        app.state.engine.dispose()
    assert threading.active_count() == 1, "who forks has one thread"


def _tend(sock: socket.socket) -> None:
    """Fork for everyone who asks, until nobody can ask any more."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import collector.serve  # noqa: F401  with everything behind it

    from fp8watch_server.db import migrations

    migrations.head()
    _rehearse()
    gc.freeze()
    born: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def nothing(number: int, frame: FrameType | None) -> None:
        return None

    signal.signal(signal.SIGCHLD, nothing)
    while True:
        ready = select.select([sock, woken], [], [])[0]
        if woken in ready:
            woken.recv(4096)
            _reap(born)
        if sock not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 3)
        if not message:
            return
        args, env = json.loads(message)
        pid = os.fork()
        if pid == 0:
            sock.close()
            for told in born.values():
                told.close()
            _live(args, env, list(fds))
        born[pid] = socket.socket(fileno=fds[2])
        born[pid].send(str(pid).encode())
        os.close(fds[0])
        os.close(fds[1])


if __name__ == "__main__":
    _tend(socket.socket(fileno=int(sys.argv[1])))
