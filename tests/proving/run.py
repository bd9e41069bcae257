"""The proving ground: trains every run of the plan against a real collector, one line of JSON a run.

    python -m proving.run                                        all that is not in the results yet
    python -m proving.run --split dev --part 1/4 --jobs 2
    python -m proving.run --only llama --fault planted-nan        one family, one change, again and again: --again
    python -m proving.run --list

Started by `make prove`. It may be stopped at any time: what is in build/proving/results.jsonl is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from proving import collector, data, plan
from proving.case import Case
from proving.families import build, families, missing
from proving.nest import Running
from proving.training import SEVERITIES, Training

import fp8watch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "proving" / "results.jsonl"
SETTLE_RANKS_S = 14.0
"""From the end of several ranks to the question what the collector says: their steps wait for each other for 10 s."""
GIVE_UP_S = 90.0


@lru_cache(maxsize=64)
def probe(family: str, seed: int) -> Training:
    """A training to draw from."""
    torch.manual_seed(seed)
    return build(family, seed)


def result(ran: Running, url: str | None) -> dict[str, Any]:
    """The line of one run."""
    case, first, last = ran.case, ran.outcomes[0], ran.outcomes[-1]
    line: dict[str, Any] = case.as_dict() | {"split": plan.case_split(case), "generator": plan.generator_of(case)}
    line |= first.get("change", {})
    line["steps"] = last.get("first_step", 0) + len(last.get("loss", ()))
    line["legs"] = [out.get("first_step", 0) for out in ran.outcomes]
    line["step_ms"] = last.get("step_ms")
    for key in ("watch", "broken", "died"):
        if key in last:
            line[key] = last[key]
    line["loss"] = [value for out in ran.outcomes for value in out.get("loss", ())]
    line["grad_norm"] = [value for out in ran.outcomes for value in out.get("grad_norm", ())]
    if url is not None:
        seen = collector.run(url, case.id)
        line["seen_step"] = None if seen is None else seen.get("last_step")
        opened = collector.opened_steps(ran.folder.parent, case.id)
        said = [] if seen is None else collector.incidents(url, case.id)
        line["incidents"] = [collector.brief(incident, opened) for incident in said]
    return line


def settled(ran: Running, url: str, since: float) -> bool:
    """Whether the collector has seen the run's last step and has judged all that it has."""
    waited = time.monotonic() - since
    if waited > GIVE_UP_S:
        return True
    if ran.world_size > 1 and waited < SETTLE_RANKS_S:
        return False
    last = ran.outcomes[-1].get("last_step")
    seen = collector.run(url, ran.case.id)
    arrived = last is None or (seen is not None and (seen.get("last_step") or -1) >= last)
    return arrived and collector.is_judged(ran.folder.parent, ran.case.id)


def execute(
    cases: Iterable[Case], url: str, folder: Path, jobs: int, steps: int | None = None
) -> Iterator[dict[str, Any]]:
    """Train these, `jobs` at a time; lines as they come."""
    waiting, running, settling = deque(cases), list[Running](), list[tuple[float, Running]]()
    try:
        yield from _execute(waiting, running, settling, url, folder, jobs, steps)
    finally:
        for ran in running:
            ran.kill()


def _execute(
    waiting: deque[Case], running: list[Running], settling: list[tuple[float, Running]], url: str, folder: Path,
    jobs: int, steps: int | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    while waiting or running or settling:
        while waiting and len(running) < jobs:
            case = waiting.popleft()
            world_size = probe(case.family, case.seed).world_size
            running.append(Running(case, world_size, folder / case.id, url, steps))
            running[-1].start_leg()
        for ran in [r for r in running if r.ended()]:
            running.remove(ran)
            settling.append((time.monotonic(), ran))
        for since, ran in list(settling):
            if settled(ran, url, since):
                settling.remove((since, ran))
                yield result(ran, url)
                shutil.rmtree(ran.folder, ignore_errors=True)
        time.sleep(0.05)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Lines by id; a line that was cut off by a kill is left out."""
    found = {}
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            found[line["id"]] = line
    return found


def chosen(args: argparse.Namespace) -> list[Case]:
    """The runs that the arguments ask for, each twin before the first run that needs it."""
    if args.named:
        return [case for case, _ in plan.named()]
    if args.fault and not args.planned:
        kinds = {**dict.fromkeys(plan.TRAPS, "trap"), **dict.fromkeys(plan.FAULTS, "fault")}
        severities = [args.severity] if args.severity else list(SEVERITIES)
        seeds = [args.seed] if args.seed else list(range(1, plan.SEEDS + 1))
        changed = [
            Case(family, args.fault, kind, severity, seed)
            for family in ([args.only] if args.only else sorted(families()))
            for seed in seeds
            for kind in [kinds.get(args.fault, "fault")]
            for severity in (severities if kind == "fault" else [""])
        ]
        changed = [case for case in changed if case.draw(probe(case.family, case.seed)) is not None]
    else:
        changed = plan.cases(probe)
        if args.fault:
            changed = [c for c in changed if c.change == args.fault]
        if args.only:
            changed = [c for c in changed if c.family == args.only]
        if args.split != "all":
            changed = [c for c in changed if plan.case_split(c) == args.split]
    every = plan.with_twins(changed)
    part, parts = (int(n) for n in args.part.split("/"))
    return [case for i, case in enumerate(every) if i % parts == part - 1]


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--split",
        choices=("dev", "held-out", "crossed", "fresh", "unseen", "sealed", "veiled", "concealed", "all"),
        default="all",
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th run, beginning with the I-th")
    parser.add_argument("--only", metavar="FAMILY")
    parser.add_argument(
        "--fault", metavar="NAME", help="a fault or a trap; in all families and severities, planned or not"
    )
    parser.add_argument("--named", action="store_true", help="the small set of tests/proving/named.json")
    parser.add_argument("--planned", action="store_true", help="with --fault: only the runs of the plan")
    parser.add_argument("--severity", choices=SEVERITIES)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="end earlier")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also what is in the results")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    return parser.parse_args(argv)


def warm(names: Iterable[str]) -> None:
    """Import what children need, while there is one thread.

    Raises:
        SystemExit: a family needs a package that is not installed.
    """
    import torch._dynamo

    for name in names:
        if absent := missing(name):
            raise SystemExit(f"family {name} needs {', '.join(absent)}: `make prove` installs what families need")
    torch.set_num_threads(1)
    data.text()
    fp8watch.attach  # noqa: B018 - imports what is lazy
    plan.check()


def main(argv: list[str]) -> int:
    """0, or 1 where a run was broken by the proving ground itself."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # ends collector and children too
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in [n for n in os.environ if n.startswith("FP8WATCH_")]:
        del os.environ[name]  # defaults are what is measured
    warm({case.family for case, _ in plan.named()} if args.named else [args.only] if args.only else families())
    todo = chosen(args)
    if args.list:
        for case in todo:
            print(f"{plan.case_split(case):9} {case.id}")
        return 0
    done = {} if args.again else read(args.results)
    todo = [case for case in todo if case.id not in done]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    print(f"{len(todo)} runs, {len(done)} in {args.results} already", flush=True)
    num_broken, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="proving-") as name, args.results.open("a") as out:
        folder = Path(name)
        with collector.serving(folder) as url:
            for number, line in enumerate(execute(todo, url, folder, args.jobs, args.steps), 1):
                out.write(json.dumps(line) + "\n")
                out.flush()
                num_broken += "broken" in line
                said = ", ".join(f"{i['mode']}@{i['first_step']}" for i in line.get("incidents", ())) or "nothing"
                what = "BROKEN " + line["broken"].strip().splitlines()[-1] if "broken" in line else said
                left = (time.monotonic() - began) / number * (len(todo) - number)
                print(
                    f"{number}/{len(todo)} {line['id']} [{line.get('step')}]: {what} ({left / 60:.0f} min left)",
                    flush=True,
                )
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
