"""Ranks of the demo: replicas of one model in processes of their own, as data parallel training has them.

Process:    the demo's, and one more for each further rank
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

RANK = "FP8WATCH_DEMO_RANK"
"""Environment variable of the processes that the demo starts; not set in the one that a person started."""
TIMEOUT = timedelta(seconds=120)
"""Of a rank that does not come: to the group, or to a step."""
END_S = 20


def own_rank() -> int:
    """Of this process; 0 in the one that a person started."""
    return int(os.environ.get(RANK, "0"))


@contextlib.contextmanager
def joined(world_size: int, *arguments: str) -> Iterator[None]:
    """Be one of `world_size` ranks of a gloo group on loopback; in rank 0 the others are started, with `arguments`."""
    others: list[subprocess.Popen[bytes]] = []
    rank = own_rank()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size), RANK="0")
        for other in range(1, world_size):
            environment = {**os.environ, "RANK": str(other), RANK: str(other)}
            command = [sys.executable, "-m", "fp8watch", "demo", *arguments]
            others.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        yield
        dist.destroy_process_group()
    finally:
        for process in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()


def agreed(stop: bool) -> bool:
    """What rank 0 says, on all ranks: whether the training ends here."""
    flag = torch.tensor([stop])
    dist.broadcast(flag, 0)
    return bool(flag)
