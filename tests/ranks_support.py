"""Training on several ranks of one gloo group: torch is imported once, and each rank is a fork of that process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

HARNESS = """
import os, sys
import torch, torch.distributed, torch.nn.parallel, torch.distributed.device_mesh, torch.distributed.fsdp
import fp8watch, fp8watch.session.attach
torch.set_num_threads(1)
script, folder, world = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.argv = ["rank", *sys.argv[4:]]
children = []
for rank in range(world):
    child = os.fork()
    if not child:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
            file = os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, stream.fileno())
        break
    children.append(child)
if children and len(children) == world:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print("codes", *codes)
else:
    exec(compile(script, "<rank>", "exec"), {"__name__": "__main__"})
"""


def run_ranks(folder: Path, script: str, *arguments: str, world: int = 2, codes: int = 0, **environ: str) -> list[str]:
    """What the ranks printed. All must have ended with the same exit code."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FP8WATCH", "TORCHELASTIC"))}
    env |= {"MASTER_ADDR": "127.0.0.1", "FP8WATCH_SPOOL_DIR": str(folder / "spool"), "WORLD_SIZE": str(world)}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env["MASTER_PORT"] = str(s.getsockname()[1])
    logs = folder / "ranks"
    logs.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HARNESS, script, str(logs), str(world), *arguments],
        env=env | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    said = "\n".join(
        f"rank {r}: {(logs / f'{r}.err').read_text()}" for r in range(world) if (logs / f"{r}.err").exists()
    )
    assert out.split() == ["codes", *[str(codes)] * world], err + said
    return [(logs / f"{rank}.out").read_text() for rank in range(world)]
