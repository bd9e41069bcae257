"""`fp8watch demo`: start a collector, train a small model in FP8 on real text, break it, and see it named."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn.parallel import DistributedDataParallel

from fp8watch import attach
from fp8watch.demo import replicas
from fp8watch.demo.collector import NotStarted, ask, detected_step, incidents, running_collector
from fp8watch.demo.faults import FAULTS, Fault
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch_agent.terminal.collector_client import NotAnswered

BATCH, TOKENS = 4, 64
DEFAULT_PORT = 8420
LEARNING_RATE = 2e-3
MAX_GRAD_NORM = 1.0
FAULT_STEP = 80
STEPS_AFTER_FAULT = 24  # so that the charts show what came after
PATIENCE_STEPS = 120  # time limit for naming the failure
HEALTHY_STEPS = 600
SETTLE_S = 30

console = Console(highlight=False)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fp8watch demo", description=__doc__)
    parser.add_argument("--fault", choices=sorted(FAULTS), default="inf", help="what to break (default: inf)")
    parser.add_argument("--steps", type=int, help=f"training steps of a healthy run (default: {HEALTHY_STEPS})")
    parser.add_argument("--fault-step", type=int, default=FAULT_STEP, help="step of the failure (default: %(default)s)")
    parser.add_argument("--exit", action="store_true", help="end by itself; status 0 only when the failure was named")
    parser.add_argument("--collector", help="URL of a running collector instead of one of the demo's own")
    parser.add_argument("--port", type=int, help="port of the demo's collector (default: 8420, or any free one)")
    parser.add_argument("--dir", type=Path, help="keep the database here (default: a temporary folder)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.fault_step < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--steps and --fault-step must be 1 or more")
    return args


def main(argv: list[str]) -> int:
    """Exit status 0: the failure was named as it is, or nothing was raised in a healthy run. 1: not. 2: usage."""
    args = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the collector must stop with the demo
    fault = FAULTS[args.fault]
    with contextlib.ExitStack() as stack:
        folder = args.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8watch-demo-")))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("FP8WATCH_SPOOL_DIR", str(folder / "spool"))
        try:
            if args.collector is not None:
                _reach(args.collector)
            url = (args.collector or stack.enter_context(running_collector(folder, _port(args.port)))).rstrip("/")
            if fault.world_size > 1:
                same = ("--fault", args.fault, "--fault-step", str(args.fault_step), "--seed", str(args.seed))
                with replicas.joined(fault.world_size, *same, "--collector", url, "--exit"):
                    run_id, named = _train(args, fault, url)
                if replicas.own_rank():
                    return 0
            else:
                run_id, named = _train(args, fault, url)
        except (NotStarted, NotAnswered) as e:
            console.print(str(e), markup=False, style="red")
            return 1
        ok = _report(fault, named, url)
        if not args.exit:
            console.print(f"Run: {url}/runs/{run_id}")
            console.print("The pages stay up. Ctrl-C ends.")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
    return 0 if ok else 1


def _reach(collector: str) -> None:
    """Ask it before the training, not in the middle of it. Raises NotAnswered."""
    try:
        ask(collector, "/api/v1/runs")
    except ValueError as e:
        raise NotAnswered(str(e)) from e


def _port(asked: int | None) -> int:
    """The requested port; else the collector's default, or 0 (any) if that is taken."""
    if asked is not None:
        return asked
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            return 0
    return DEFAULT_PORT


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:.0f} sketches/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield progress


def _train(args: argparse.Namespace, fault: Fault, url: str) -> tuple[str, list[dict[str, Any]]]:
    torch.set_num_threads(
        max(1, ((os.cpu_count() or 1) - 1) // fault.world_size)
    )  # leaves one core for the collector and a browser
    torch.manual_seed(args.seed)
    rank, is_faulty = replicas.own_rank(), replicas.own_rank() == fault.world_size - 1
    data = batches(load_text(), BATCH, TOKENS, args.seed + 1000 * rank)
    model = ByteModel()
    trained = DistributedDataParallel(model) if fault.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    healthy = fault.mode is None
    last = (args.steps or HEALTHY_STEPS) if healthy else args.fault_step + PATIENCE_STEPS
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{num_parameters / 1e6:.2f} M parameters, batches of {BATCH} × {TOKENS} bytes of Python's own sources"
    )
    if not healthy:
        console.print(f"Step {args.fault_step}: {fault.says}.")
    # attach's defaults: the demo shows what every user gets.
    watch = attach(trained, run=f"demo {fault.name}", recipe=fault.recipe, optimizer=optimizer, collector=url)
    run_id = watch.identity.run_id
    console.print(f"Live: {watch.url}")
    named: list[dict[str, Any]] = []
    asked = time.monotonic()
    with watch, _progress() as progress:
        task = progress.add_task("", total=last, loss=0.0, rate=0.0)
        began = time.monotonic()
        for step in range(last):
            undo = fault.inject(model, optimizer, step) if is_faulty and step == args.fault_step else None
            loss = trained(*next(data))
            optimizer.zero_grad()
            loss.backward()
            watch.log(grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
            optimizer.step()
            if undo is not None:
                undo()
            rate = (step + 1) * watch.summary()["num_sites"] / (time.monotonic() - began)
            progress.update(task, completed=step + 1, loss=float(loss.detach()), rate=rate)
            if not rank and time.monotonic() - asked > 1:
                named, asked = raised(incidents(url, run_id)), time.monotonic()
            stop = not healthy and step >= args.fault_step + STEPS_AFTER_FAULT and bool(named)
            if replicas.agreed(stop) if fault.world_size > 1 else stop:
                break
        watch.flush(10)
        last_step = watch.last_step
    if rank:
        return run_id, []
    deadline = time.monotonic() + SETTLE_S
    while last_step is not None and detected_step(url, run_id) < last_step and time.monotonic() < deadline:
        time.sleep(0.2)
    while time.monotonic() < deadline and not healthy and not raised(incidents(url, run_id)):
        time.sleep(0.2)
    return run_id, incidents(url, run_id)


def raised(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Incidents that notify somebody; the others are notices on the timeline."""
    return [i for i in found if i["severity"] != "info"]


def _is_named(fault: Fault, incident: dict[str, Any]) -> bool:
    place = incident["place"]
    return bool(
        incident["mode"] == fault.mode
        and incident["verdict"] == fault.verdict
        and (fault.module is None or place["module"] == fault.module)
        and (fault.operand is None or place["operand"] == fault.operand)
        and (fault.operand is None or place["tile"] is not None)
    )


def _report(fault: Fault, found: list[dict[str, Any]], url: str) -> bool:
    for i in found:
        place = i["place"]
        console.print()
        console.print(f"{i['severity']}: {i['title']}", markup=False, style="bold")
        where = [f"step {i['first_step']}"]
        where += [
            f"{k} {place[k]}" for k in ("module", "gemm", "operand", "direction", "tile", "element") if place.get(k)
        ]
        console.print(f"where    {', '.join(where)}", markup=False)
        console.print(f"why      {i['cause']}", markup=False)
        for fix in i["fix"]:
            console.print(f"fix      {fix['text']}", markup=False)
        console.print(f"verdict  {i['verdict']}", markup=False)
        console.print(f"page     {url}/incidents/{i['id']}", markup=False)
    console.print()
    found = raised(found)
    if fault.mode is None:
        ok = not found
        console.print("No warning was raised, as it should be." if ok else f"{len(found)} incidents in a healthy run.")
    else:
        ok = len(found) == 1 and _is_named(fault, found[0])
        text = "named as injected" if ok else f"NOT named as injected: wanted {fault.mode} in {fault.module}"
        console.print(f"The failure was {text}; incidents: {len(found)}.")
    return ok
