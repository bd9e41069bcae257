"""A process that has imported torch and forks: fault programs and examples get processes of their own, without the wait.

Reads lines of JSON from its standard input, lists of {"module", "arguments", "env", "out", "err"}, and answers each with
the largest exit code of the children that ran the module's `main` with these, at the same time, and the seconds of
processor time that they took; a module that is the path of
a script is run as `python` runs it. It has no threads, so a fork of it is whole.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support import time_budget


def child(order: dict[str, object]) -> int:
    """Only in the child: ends as the interpreter would."""
    for number, name in ((1, "out"), (2, "err")):
        fd = os.open(str(order[name]), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(order["env"])  # type: ignore[call-overload]
    module = str(order["module"])
    sys.argv = [module, *order["arguments"]]  # type: ignore[misc]
    try:
        if module.endswith(".py"):
            sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            runpy.run_path(module, run_name="__main__")
        else:
            importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    import torch
    import torch._dynamo  # seconds, which each child would spend anew

    import fp8watch

    fp8watch.attach  # noqa: B018 - imports what is lazy
    torch.set_num_threads(1)
    for line in sys.stdin:
        pids = []
        for order in json.loads(line):
            pids.append(os.fork())
            if pids[-1] == 0:
                os._exit(child(order))
        ended = [os.wait4(pid, 0)[1:] for pid in pids]
        spent_s = sum(used.ru_utime + used.ru_stime for _, used in ended)
        print(max(abs(os.waitstatus_to_exitcode(status)) for status, _ in ended), spent_s, flush=True)


@dataclass
class Zygote:
    """The other end of it."""

    process: subprocess.Popen[str]

    def run(self, folder: Path, module: str, *arguments: str, **env: str) -> list[str]:
        """Lines that the module's `main` printed. A failure raises, with its errors."""
        (printed,) = self.run_ranks(folder, module, *arguments, envs=[env])
        return printed.splitlines()

    def run_ranks(self, folder: Path, module: str, *arguments: str, envs: Sequence[dict[str, str]]) -> list[str]:
        """What processes printed that ran at the same time, each with an environment of its own."""
        orders = [
            {
                "module": module,
                "arguments": arguments,
                "env": env,
                "out": f"{folder}/{i}.out",
                "err": f"{folder}/{i}.err",
            }
            for i, env in enumerate(envs)
        ]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(orders) + "\n")
        self.process.stdin.flush()
        code, spent_s = self.process.stdout.readline().split()
        time_budget.add(float(spent_s))
        errors = "\n".join(Path(o["err"]).read_text() for o in orders if Path(o["err"]).exists())
        assert code == "0", f"{module}: exit {code}\n{errors}"
        return [Path(o["out"]).read_text() for o in orders]


def ranks(world: int) -> list[dict[str, str]]:
    """What a launcher gives each rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def start() -> Zygote:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "faults.zygote"]
    return Zygote(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))


if __name__ == "__main__":
    main()
