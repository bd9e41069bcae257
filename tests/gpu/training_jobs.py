"""What is to be run, and which trainings share a process."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from typing import Any

from training_registry import Scenario, scenarios

MODES_A_PROCESS = 4
"""Of a training that shares its process with no other."""
SHARED_TRAININGS, SHARED_MODES = 6, 16
"""Of one process, at most."""
CALL = "import sys; from {} import main; sys.exit(main(sys.argv[1:]))"
SUBJECT = "training_subject:build"
COMMANDS: dict[str, list[str]] = {
    "check-gemm": [CALL.format("fp8watch.diagnose.check_gemm")],
    "check-gemm-float32": [CALL.format("fp8watch.diagnose.check_gemm"), "--dtype", "float32"],
    "check-gemm-large": [CALL.format("fp8watch.diagnose.check_gemm"), "--shape", "4096,4096,4096"],
    "loss-impact": [CALL.format("fp8watch.diagnose.command"), "loss-impact", SUBJECT, "--measure", "--backward"],
    "what-if": [CALL.format("fp8watch.diagnose.command"), "what-if", SUBJECT, "--summary"],
    "moments": [CALL.format("fp8watch.diagnose.command"), "moments", SUBJECT],
    "collectives": [CALL.format("fp8watch.diagnose.command"), "collectives", SUBJECT],
    "calibrate": [CALL.format("fp8watch.diagnose.calibrate_command"), SUBJECT],
}
"""What a user runs beside training."""


@dataclass(frozen=True)
class Job:
    """A process: trainings as NAME@MODE, one after the other, or a command."""

    tasks: tuple[str, ...]
    timeout_s: float  # without another line
    weight: int
    alone: bool = False


def told(task: str, verdict: str, error: str) -> dict[str, Any]:
    """A line of what left none itself."""
    name, _, mode = task.partition("@")
    return {"name": name, "mode": mode, "verdict": verdict, "error": error}


def jobs_of(args: argparse.Namespace) -> tuple[list[Job], list[dict[str, Any]]]:
    """What is to be run, and lines of what needs a package that is not installed."""
    out, absent = list[Job](), list[dict[str, Any]]()
    shared = list[tuple[Scenario, list[str]]]()
    for of in scenarios().values():
        tasks = [task for task in (f"{of.name}@{mode}" for mode in of.modes) if wanted(task, args)]
        if of.cuda and args.device != "cuda":
            continue
        if of.needs and importlib.util.find_spec(of.needs) is None:
            absent += [told(task, "not installed", of.needs) for task in tasks]
        elif of.apart:
            size = len(of.modes) if of.world > 1 or of.alone else MODES_A_PROCESS
            out += [
                Job(tuple(tasks[i : i + size]), of.timeout_s * args.slower, of.weight, of.alone)
                for i in range(0, len(tasks), size)
            ]
        else:
            shared += [(of, tasks[i : i + SHARED_MODES // 2]) for i in range(0, len(tasks), SHARED_MODES // 2)]
    chunk: list[tuple[Any, list[str]]] = []
    for of, tasks in [*sorted(shared, key=lambda part: -part[0].weight), (None, [])]:
        num = sum(len(some) for _, some in chunk) + len(tasks)
        if chunk and (of is None or len(chunk) == SHARED_TRAININGS or num > SHARED_MODES):
            timeout = max(each.timeout_s for each, _ in chunk) * args.slower
            # as early as those that take longest: there is much in it
            out.append(Job(tuple(task for _, some in chunk for task in some), timeout, 6))
            chunk = []
        chunk.append((of, tasks))
    for name in COMMANDS:
        if wanted(f"command@{name}", args) and (name != "check-gemm-large" or args.device == "cuda"):
            out.append(Job((f"command@{name}",), 90.0 * args.slower, 4))
    return out, absent


def wanted(task: str, args: argparse.Namespace) -> bool:
    """Whether NAME@MODE was asked for."""
    name = task.partition("@")[0]
    return name not in args.without and (not args.only or name in args.only or task in args.only)
