"""Many small trainings on a device, watched and not, in processes side by side; a line of JSON each, and a table.

    python tests/gpu/trainings.py --out FOLDER [--device cuda] [--jobs 6] [--only NAME ...] [--budget 240] [--list]

Each training is run without a watch twice, and then once in each of its modes. Those that leave their process as it was
share one, a few of them one after the other. In FOLDER: results.jsonl, table.txt, logs of those that failed, commands (what
`fp8watch check-gemm` and the like print), spools.tar.gz. The status is 1 where one was not run or is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = [str(p) for p in (HERE, ROOT, ROOT / "agent", ROOT / "server", ROOT / "tests")]
sys.path[:0] = PATHS

from training_jobs import COMMANDS, Job, jobs_of, told  # noqa: E402
from training_table import pack, table  # noqa: E402

RESERVED_S = 22.0
"""Of the budget, for each job that runs alone."""
GOOD = ("ok", "needs a GPU", "not installed", "changed, base too")
CUDA_BROKEN = 3


class Driver:
    """Runs jobs side by side, and collects their lines."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.lines: list[dict[str, Any]] = []
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.reserved_s = 0.0  # for what runs alone
        for name in ("logs", "parts", "spools", "commands"):
            (self.out / name).mkdir(parents=True, exist_ok=True)
        (self.out / "results.jsonl").unlink(missing_ok=True)
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("FP8WATCH")} | {
            "PYTHONPATH": os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "4", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1" if args.device == "cpu" else "2",
        }  # fmt: skip
        self.environ.pop("TRITON_INTERPRET", None)

    def left_s(self) -> float:
        """Of the budget."""
        return float(self.args.budget) - (time.monotonic() - self.began)

    def add(self, line: dict[str, Any]) -> None:
        """A line of the results, written at once."""
        with self._lock:
            self.lines.append(line)
            with (self.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            took = time.monotonic() - self.began
            print(
                f"[{took:5.0f} s] {line['name']}@{line['mode']}: {line['verdict']} ({line.get('seconds', 0)} s)",
                flush=True,
            )

    def run(self, jobs: list[Job]) -> None:
        """All of them; those that run alone come last."""
        beside = deque(sorted((j for j in jobs if not j.alone), key=lambda j: -j.weight))

        def work() -> None:
            while True:
                with self._lock:
                    if not beside:
                        return
                    job = beside.popleft()
                try:
                    left = self.one(job)
                except Exception as e:
                    self.add(told(job.tasks[0], "DRIVER", repr(e)))
                    left = []
                with self._lock:
                    beside.extendleft(left)

        self.reserved_s = RESERVED_S * sum(job.alone for job in jobs)
        workers = [threading.Thread(target=work, daemon=True) for _ in range(self.args.jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for job in (j for j in jobs if j.alone):
            self.one(job)

    def one(self, job: Job) -> list[Job]:
        """Run a job; returns what is left of it where a mode took its process along."""
        left = self.left_s() - (0.0 if job.alone else self.reserved_s)
        if left < 10:
            for task in job.tasks:
                self.add(told(task, "NOT RUN", "no time was left"))
            return []
        if job.tasks[0].startswith("command@"):
            self.command(job, left)
            return []
        part, log = (
            self.out / folder / f"{job.tasks[0]}.{end}" for folder, end in (("parts", "jsonl"), ("logs", "log"))
        )
        command = [
            sys.executable, str(HERE / "training_child.py"), "--tasks", ",".join(job.tasks), "--device", self.args.device,
            "--lines", str(part), "--spools", str(self.out / "spools"), "--timeout", str(min(job.timeout_s, left)),
        ]  # fmt: skip
        if self.args.steps is not None:
            command += ["--steps", str(self.args.steps)]
        part.unlink(missing_ok=True)
        status = self.process(command, log, job, left, part)
        lines = [json.loads(line) for line in part.read_text().splitlines()] if part.exists() else []
        for line in lines:
            self.add(line)
        seen = {f"{line['name']}@{line['mode']}" for line in lines}
        missing = [task for task in job.tasks if task not in seen]
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        for line in (line for line in lines if line["verdict"] not in ("ok", "needs a GPU")):
            text = "".join(
                f"{k}: {line[k]}\n" for k in ("verdict", "error", "first_wait", "internal_errors") if line.get(k)
            )
            name = f"{line['name']}@{line['mode']}.txt"
            (self.out / "logs" / name).write_text(f"{text}\n--- end of the log\n{tail}\n")
        if not missing:
            log.unlink()
            return []
        if status != CUDA_BROKEN or not lines:  # else the one before said so; nothing was tried of these
            self.add(told(missing[0], "TIMEOUT" if status is None else f"CRASH {status}", tail))
            (self.out / "logs" / f"{missing[0]}.txt").write_text(tail)
            missing = missing[1:]
        return [replace(job, tasks=tuple(missing))] if missing else []

    def command(self, job: Job, left: float) -> None:
        """A command of the user's."""
        name = job.tasks[0].partition("@")[2]
        said, began = self.out / "commands" / f"{name}.txt", time.monotonic()
        status = self.process([sys.executable, "-W", "ignore", "-c", *COMMANDS[name]], said, job, left)
        tail = "\n".join(said.read_text(errors="replace").splitlines()[-25:])
        line = told(job.tasks[0], "ok" if status == 0 else f"STATUS {status}", tail if status else "")
        self.add(line | {"seconds": round(time.monotonic() - began, 1), "output": tail})

    def process(self, command: list[str], log: Path, job: Job, left: float, part: Path | None = None) -> int | None:
        """Its exit status; None where it took too long for a line and was killed, with all that it started."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self.environ, cwd=self.out, start_new_session=True
            )
            with self._lock:
                self._running[process.pid] = process
            end, size = time.monotonic() + left, 0
            quiet = time.monotonic()
            try:
                while time.monotonic() < min(end, quiet + job.timeout_s):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(0.5)
                    if part is not None and part.exists() and part.stat().st_size != size:
                        size, quiet = part.stat().st_size, time.monotonic()
                return None
            finally:
                self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nothing else is in it
        process.wait()
        with self._lock:
            self._running.pop(process.pid, None)

    def stop(self) -> None:
        """Kill what runs, and begin nothing more."""
        self.args.budget = 0.0
        for process in list(self._running.values()):
            self._end(process)


def main() -> int:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trainings-out"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME[@MODE]")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds; what has not begun by then is not run")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of the time that each may take")
    parser.add_argument("--steps", type=int, help="at most, for a rehearsal")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    jobs, absent = jobs_of(args)
    if args.list:
        for job in jobs:
            print(*job.tasks)
        print(f"{sum(len(job.tasks) for job in jobs)} trainings and commands in {len(jobs)} processes")
        return 0
    if args.device == "cuda" and not importlib.import_module("torch").cuda.is_available():
        print("no GPU is found; a rehearsal without one: --device cpu", file=sys.stderr)
        return 1
    driver = Driver(args)
    for line in absent:
        driver.add(line)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        driver.run(jobs)
    except KeyboardInterrupt:
        driver.stop()
    finish(driver)
    sys.stdout.flush()
    os._exit(
        any(line["verdict"] not in GOOD for line in driver.lines)
    )  # threads of what was interrupted are not waited for


def finish(driver: Driver) -> None:
    """Write the table and the archive."""
    text = table(driver.lines)
    (driver.out / "table.txt").write_text(text + "\n")
    left_out = pack(driver.out)
    print(text)
    print(f"{time.monotonic() - driver.began:.0f} s; spools left out of the archive: {left_out}; {driver.out}")


if __name__ == "__main__":
    sys.exit(main())
