"""A process that has imported torch and forks: each of the fault programs gets a process of its own, without the wait.

Reads lines of JSON from its standard input, {"module", "arguments", "env", "out", "err"}, and answers each with the
exit code of a child that ran the module's `main` with these, and the seconds of processor time that it took. It has no threads, so a fork of it is whole.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import time_budget


def child(order: dict[str, object]) -> int:
    """Only in the child: ends as the interpreter would."""
    for number, name in ((1, "out"), (2, "err")):
        fd = os.open(str(order[name]), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(order["env"])  # type: ignore[call-overload]
    sys.argv = [str(order["module"]), *order["arguments"]]  # type: ignore[misc]
    try:
        importlib.import_module(str(order["module"])).main()
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
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(child(order))
        _, status, used = os.wait4(pid, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)


@dataclass
class Zygote:
    """The other end of it."""

    process: subprocess.Popen[str]

    def run(self, folder: Path, module: str, *arguments: str, **env: str) -> list[str]:
        """Lines that the module's `main` printed. A failure raises, with its errors."""
        out, err = folder / "stdout", folder / "stderr"
        order = {"module": module, "arguments": arguments, "env": env, "out": str(out), "err": str(err)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code, spent_s = self.process.stdout.readline().split()
        time_budget.add(float(spent_s))
        assert code == "0", f"{module}: exit {code}\n{err.read_text() if err.exists() else ''}"
        return out.read_text().splitlines()


def start() -> Zygote:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "faults.zygote"]
    return Zygote(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))


if __name__ == "__main__":
    main()
