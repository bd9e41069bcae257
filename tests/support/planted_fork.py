"""A process that has imported what tests import and forks: a run of pytest costs what its tests cost, not the imports.

Only packages of others are imported before the fork, none of fp8watch's own: a run reads these from its own tree, with
whatever is broken there. A run is a process and a process group of its own, with its own environment, files and
signals, and ends as an interpreter ends; only what Python does before the first line of pytest is shared.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

MAX_ORDER_BYTES = 1 << 17
PR_SET_PDEATHSIG = 1
WARMED = (
    "_pytest.assertion.rewrite _pytest.python _pytest.fixtures _pytest.junitxml _pytest.terminal pytest "
    "numpy msgspec zstandard urllib3 prometheus_client yaml jinja2 hypothesis.strategies httpx "
    "sqlalchemy sqlalchemy.dialects.sqlite sqlalchemy.dialects.postgresql psycopg psycopg_binary alembic.command "
    "fastapi fastapi.testclient uvicorn uvicorn.lifespan.on uvicorn.protocols.http.httptools_impl uvloop "
    "torch torch._dynamo torch.distributed torch.utils.checkpoint playwright.sync_api apprise "
)
"""Modules of others. What is missing here costs time, and what cannot be imported is left to the tests that need it."""


@dataclass(frozen=True)
class Ended:
    """A run of pytest that is over."""

    status: int | None  # its exit status, negative for a signal; None where it was killed for taking too long
    text: str  # what it wrote


class Warmed:
    """The process that forks; this is its end in the tests."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Threads of a library would not live on in a fork.
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            env.pop("PYTHONDONTWRITEBYTECODE", None)  # the tree that is tested many times over is compiled once
            command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=env)
        atexit.register(self.stop)
        self._hear(None)  # its imports may take minutes on a busy machine, and what is told late is taken for a status

    def _hear(self, timeout_s: float | None) -> int | None:
        """The next number that is told; None where none comes in time."""
        if not select.select([self._sock], [], [], timeout_s)[0]:
            return None
        got = self._sock.recv(32)
        if not got:
            raise RuntimeError("the process that forks has ended; what it wrote tells why")
        return int(got)

    def pytest(self, args: Sequence[str], cwd: Path, env: dict[str, str], timeout_s: float) -> Ended:
        """Run pytest with these arguments in a folder, with the folders of PYTHONPATH before all others."""
        with tempfile.TemporaryFile() as out:
            message = json.dumps([list(args), str(cwd), env]).encode()
            assert len(message) < MAX_ORDER_BYTES
            socket.send_fds(self._sock, [message], [out.fileno()])
            group = self._hear(None)
            status = self._hear(timeout_s)
            if status is None:
                assert group is not None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
                self._hear(None)
            out.seek(0)
            return Ended(status, out.read().decode(errors="replace"))

    def stop(self) -> None:
        """Nothing runs there between two tests."""
        self._sock.close()
        self._process.wait(20)


@lru_cache(maxsize=1)
def warmed() -> Warmed:
    """One for all tests of this process."""
    return Warmed()


def _die_with_parent() -> None:
    """A test run that is killed leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _become(args: list[str], cwd: str, env: dict[str, str], out: int) -> None:
    """In the child: what `python -m pytest` would find."""
    _die_with_parent()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [cwd, *env["PYTHONPATH"].split(os.pathsep)]
    sys.argv = ["pytest", *args]
    random.seed()


def _tend(sock: socket.socket) -> None:
    """Fork for each order. Returns in the child, to run; the parent ends here when nobody is left to order."""
    while True:
        message, fds, _, _ = socket.recv_fds(sock, MAX_ORDER_BYTES, 1)
        if not message:
            sys.exit(0)
        args, cwd, env = json.loads(message)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            sock.send(str(os.getpid()).encode())
            sock.close()
            _become(args, cwd, env, fds[0])
            return
        os.close(fds[0])
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it left running; its number is not given away before it is waited for
        sock.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _run_pytest() -> int:
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """As an interpreter ends, but for taking apart what was imported: that would copy every page of it."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and tells those of executors to end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main() -> None:
    _die_with_parent()
    del sys.path[0]  # the folder of this file: a child has the one of its tree
    sock = socket.socket(fileno=int(sys.argv[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in WARMED.split():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    ours = sorted(name for name in sys.modules if name.partition(".")[0].startswith("fp8watch"))
    assert not ours, f"imported before the fork, so that no bug in it takes effect: {ours}"
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/task")) == 1, "who forks has one thread"
    gc.collect()
    gc.freeze()
    sock.send(str(os.getpid()).encode())
    _tend(sock)
    _end(_run_pytest())


if __name__ == "__main__":
    _main()
