"""Trainings of one process, one after the other: each without a watch, twice, and then in its modes. A line of JSON a mode."""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_faults import fault_arguments
from training_registry import BOTH, CUDA_MODES, MODES, Scenario, scenarios
from training_run import KEPT_FACTS, Run, left_behind, spooled

FAR = 0.1
"""A last loss that is so far from the one without a watch is told of, where FP8 is computed."""
CUDA_BROKEN = 3


class Trained:
    """What one training left: numbers, and no tensor on the device."""

    def __init__(self, run: Run, seconds: float, error: str | None) -> None:
        self.losses, self.weights = run.losses, ({} if error else run.weights())
        self.seconds, self.error, self.peak, self.ended = seconds, error, run.peak, run.ended
        self.waits, self.said = run.waits, dict(run.waits.said)
        self.device_ms, self.host_ms = (math.nan, math.nan) if error else run.times()
        self.left = left_behind(run.models)
        self.summaries, self.facts, self.notes = run.summaries, run.facts, run.notes
        self.log, self.lines = run.log.lines, run.tee.lines


def train(of: Scenario, args: argparse.Namespace, mode: str | None, *, looks: bool = True) -> Trained:
    """Train once; `mode` None: without a watch."""
    folder = Path(tempfile.mkdtemp())
    arguments = None if mode is None else fault_arguments(mode) if of.name == "faults" else MODES[mode]()
    steps = of.steps if args.steps is None else min(of.steps, args.steps)
    run = Run(args.device, arguments, steps, f"{of.name}@{mode}", folder, looks=looks)
    began, error = time.monotonic(), None
    try:
        of.train(run)
        run.finish()
    except (Exception, SystemExit):
        error = traceback.format_exc()
        for watch in run.watches:
            try:
                run._summarise(watch)
                watch.detach()
            except Exception:
                error += "\nand detach: " + traceback.format_exc()
        try:
            run.losses = [float(loss) for loss in run.losses]
        except Exception:
            run.losses = []
    trained = Trained(run, time.monotonic() - began, error)
    run.close()
    shutil.rmtree(folder, ignore_errors=True)
    return trained


def same(a: Trained, b: Trained) -> tuple[bool, bool]:
    """Whether losses, and weights, are the same to the last bit."""
    losses = len(a.losses) == len(b.losses) and all(
        x == y or (x != x and y != y) for x, y in zip(a.losses, b.losses, strict=True)
    )
    weights = a.weights.keys() == b.weights.keys() and all(
        torch.equal(torch.nan_to_num(v.float()), torch.nan_to_num(b.weights[k].float())) for k, v in a.weights.items()
    )
    return losses, weights


def furthest(a: list[float], b: list[float]) -> float:
    """Largest relative difference of the losses of two trainings."""
    return max(
        (abs(x - y) / max(abs(y), 1e-9) for x, y in zip(a, b, strict=False) if math.isfinite(y)), default=math.nan
    )


def _short(value: float, digits: int = 4) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def judged(of: Scenario, mode: str, got: Trained, base: list[Trained], device: str, spool: Path) -> dict[str, Any]:
    """The line of a mode."""
    line: dict[str, Any] = {"name": of.name, "mode": mode, "device": device, "seconds": round(got.seconds, 2)}
    flags: list[str] = []
    errors: dict[str, int] = {}
    for said in got.summaries:
        for place, n in said["internal_errors"].items():
            errors[place] = errors.get(place, 0) + n
    num_steps = sum(said["num_steps"] for said in got.summaries)
    if got.error is not None:
        flags.append("RAISED")
        line["error"] = got.error
    if errors:
        flags.append("ERRORS")
    if got.error is None and got.ended >= 0 and got.summaries and num_steps != got.ended:
        flags.append("STEPS")
    if got.waits.ours:
        flags.append("WAITS")
    if got.left:
        flags.append("LEFT")
    observes = mode.startswith("observe") or mode.endswith("+observe")
    if base and got.error is None:
        a, b = base
        losses, weights = same(got, a)
        line |= {"losses_equal": losses, "weights_equal": weights, "base_deterministic": all(same(a, b))}
        line |= {"furthest_loss": furthest(got.losses, a.losses), "base_furthest_loss": furthest(b.losses, a.losses)}
        if observes and not (losses and weights):
            flags.append("CHANGED" if line["base_deterministic"] else "changed, base too")
        last = furthest(got.losses[-1:], a.losses[-1:])
        if len(got.losses) != len(a.losses) or not last <= (FAR if not observes else 0.02):
            flags.append("FAR")
        line |= {
            "base_losses": a.losses, "base_waits": a.waits.total, "base_peak_mib": a.peak >> 20,
            "base_ms": [_short(a.device_ms), _short(b.device_ms)], "base_host_ms": [_short(a.host_ms), _short(b.host_ms)],
            "base_seconds": [round(a.seconds, 2), round(b.seconds, 2)],
        }  # fmt: skip
    known = {message.rsplit(" (", 1)[0] for trained in base for message in trained.said}
    line |= {
        "verdict": ", ".join(flags) or "ok", "losses": got.losses, "num_steps": num_steps, "ended": got.ended,
        "internal_errors": errors, "waits": got.waits.total, "waits_ours": got.waits.ours,
        "waits_places": dict(got.waits.places.most_common(12)), "first_wait": got.waits.first,
        "ms": _short(got.device_ms), "host_ms": _short(got.host_ms), "peak_mib": got.peak >> 20, "left_behind": got.left,
        "facts": {k: v for k, v in got.facts.items() if k in KEPT_FACTS and v not in ("", None)},
        "all_facts": got.facts, "summaries": [{k: v for k, v in s.items() if k != "spool"} for s in got.summaries],
        "spool": spooled(spool) if spool.is_dir() else {}, "said": got.lines, "log": got.log, "notes": got.notes,
        "warnings": {m: n for m, n in got.said.items() if m.rsplit(" (", 1)[0] not in known},
    }  # fmt: skip
    return line


def second(of: Scenario, args: argparse.Namespace, store: Path) -> list[subprocess.Popen[bytes]]:
    """The other processes of a training that needs them."""
    if of.world == 1 or "TRAINING_RANK" in os.environ:
        return []
    command = [sys.executable, __file__, *sys.argv[1:]]
    return [
        subprocess.Popen(command, env=os.environ | {"TRAINING_RANK": str(rank), "TRAINING_STORE": str(store)})
        for rank in range(1, of.world)
    ]


def begin(of: Scenario) -> None:
    """What a training asks of torch."""
    torch.use_deterministic_algorithms(of.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = not of.deterministic  # type: ignore[attr-defined]


def broken(device: str) -> bool:
    """Whether nothing more can be done with the device in this process."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


def run(of: Scenario, modes: list[str], args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> bool:
    """Modes of one training, a line each; False where the device was lost before the last."""
    begin(of)
    base: list[Trained] = []
    if of.held:
        base = [train(of, args, None), train(of, args, None)]
        failed = next((b.error for b in base if b.error is not None), None)
        if failed is not None:
            for mode in modes:
                write({"name": of.name, "mode": mode, "device": args.device, "verdict": "BASE", "error": failed})
            return not broken(args.device)
    for mode in modes:
        if mode in CUDA_MODES and args.device != "cuda":
            write({"name": of.name, "mode": mode, "device": args.device, "verdict": "needs a GPU"})
            continue
        spool = args.spools / f"{of.name}@{mode}"
        os.environ["FP8WATCH_SPOOL_DIR"] = str(spool)
        got = train(of, args, mode, looks=of.held or mode in BOTH)
        write(judged(of, mode, got, base, args.device, spool))
        if got.error is not None and broken(args.device):
            return False
    return True


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tasks", required=True, help="NAME@MODE, with commas between them; those of one name together"
    )
    parser.add_argument("--device", required=True)
    parser.add_argument("--lines", type=Path, required=True, help="file that lines are added to")
    parser.add_argument("--spools", type=Path, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds without a line, after which it is killed")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    alarm = max(args.timeout - 4, 1)
    faulthandler.dump_traceback_later(alarm, exit=False)
    faulthandler.register(signal.SIGUSR1)
    asked: dict[str, list[str]] = {}
    for task in args.tasks.split(","):
        asked.setdefault(task.partition("@")[0], []).append(task.partition("@")[2])
    known = scenarios()
    first = os.environ.get("TRAINING_RANK", "0") == "0"
    store = Path(os.environ.setdefault("TRAINING_STORE", tempfile.mktemp()))
    others = [other for name in asked for other in second(known[name], args, store)]
    torch.set_num_threads(1 if args.device == "cpu" else 2)
    os.environ.pop("FP8WATCH_COLLECTOR", None)

    def write(line: dict[str, Any]) -> None:
        faulthandler.dump_traceback_later(alarm, exit=False)
        if first:
            with args.lines.open("a") as file:
                file.write(json.dumps(line, default=str) + "\n")

    status = 0
    for name, modes in asked.items():
        if not run(known[name], modes, args, write):
            status = CUDA_BROKEN
            break
    for other in others:
        try:
            other.wait(20)
        except subprocess.TimeoutExpired:
            other.kill()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(status)  # process groups that are taken down may hang, and nothing of them is wanted
    return status


if __name__ == "__main__":
    sys.exit(main())
