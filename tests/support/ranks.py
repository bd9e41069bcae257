"""Training on several ranks of one gloo group: torch is imported once for all tests, and each rank is a fork of that.

The process that forks has no threads and runs nothing of its own; a rank has its own environment, files and process
group, and ends as an interpreter ends.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from support import time_budget

TIMEOUT_S = 150.0
SERVER = """
import gc, json, os, sys
import torch, torch._dynamo, torch.distributed, torch.nn.parallel, torch.distributed.device_mesh, torch.distributed.fsdp
import fp8watch, fp8watch.session.attach
torch.set_num_threads(1)
if "tqdm" in sys.modules:  # where it is installed, the compiler shows progress with it, and a thread watches that
    sys.modules["tqdm"].tqdm.monitor_interval = 0
torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1)).backward()  # imports half of torch
torch._dynamo.reset()
assert len(os.listdir("/proc/self/task")) == 1 if sys.platform == "linux" else True, "who forks has one thread"
gc.freeze()
script = None
for line in sys.stdin:
    order = json.loads(line)
    before, ranks = os.times(), []
    for rank in range(order["world"]):
        child = os.fork()
        if not child:
            os.environ.clear()
            os.environ.update(order["env"], RANK=str(rank), LOCAL_RANK=str(rank))
            sys.argv, script = ["rank", *order["arguments"]], order["script"]
            for fd, path in enumerate((os.devnull, f"{order['folder']}/{rank}.out", f"{order['folder']}/{rank}.err")):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if fd else os.O_RDONLY)
                os.dup2(file, fd)
                os.close(file)
            break
        ranks.append(child)
        os.setpgid(child, ranks[0])  # here: by itself a rank may come before the first one has made the group
    if script:
        break
    print(ranks[0], flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    print(json.dumps([codes, spent]), flush=True)
if script:
    exec(compile(script, "<rank>", "exec"), {"__name__": "__main__"})
"""


class _Server:
    """The process that forks; this is its end in the tests."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SERVER]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, bufsize=1
        )
        atexit.register(self._stop)

    def run(self, order: dict[str, object]) -> list[int]:
        """Exit codes of the ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        group = int(self._process.stdout.readline())
        is_late = not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]
        if is_late:
            os.killpg(group, signal.SIGKILL)
        codes, spent_s = json.loads(self._process.stdout.readline())
        time_budget.add(spent_s)
        assert not is_late, f"ranks that take more than {TIMEOUT_S:g} s"
        return list(codes)

    def _stop(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


@lru_cache(maxsize=1)
def _server() -> _Server:
    return _Server()


def run_ranks(folder: Path, script: str, *arguments: str, world: int = 2, codes: int = 0, **environ: str) -> list[str]:
    """What the ranks printed. All must have ended with the same exit code."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FP8WATCH", "TORCHELASTIC"))}
    env |= {"MASTER_ADDR": "127.0.0.1", "FP8WATCH_SPOOL_DIR": str(folder / "spool"), "WORLD_SIZE": str(world)}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env["MASTER_PORT"] = str(s.getsockname()[1])
    logs = folder / "ranks"
    logs.mkdir(exist_ok=True)
    order = {"script": script, "folder": str(logs), "world": world, "arguments": arguments, "env": env | environ}
    ended = _server().run(order)
    out, err = ([(logs / f"{rank}.{name}").read_text() for rank in range(world)] for name in ("out", "err"))
    said = "\n".join(f"rank {rank}: {out[rank]}{err[rank]}" for rank in range(world))
    assert ended == [codes] * world, f"exit codes {ended}\n{said}"
    return out
