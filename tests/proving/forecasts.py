"""How often a forecast holds: slow trends in real trainings at attach's defaults, against a real collector.

    python -m proving.forecasts                          all that is not in the results yet, then the page's part
    python -m proving.forecasts --only llama --again
    python -m proving.forecasts --print                  score what is in docs/detection, write nothing

Started by `make prove-forecasts`. Each run of the plan is a training with one trend (`proving.trends`). When it is over, the
stored series of each site that has a limit, and the logged attention logit, are read as the pages read them: at every
32nd step, nothing behind it, by the function that makes the sentence of the page. What the series did afterwards tells
whether the interval held. It may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from proving import collector
from proving.case import Case
from proving.forecast_score import KEPT, part, put
from proving.run import ROOT, execute, probe, read, warm
from proving.trends import TRENDS
from proving.trends._base import SEVERITIES

from fp8watch_server.detect.trend import MIN_STEPS, WINDOW_STEPS
from fp8watch_server.pages.forecasts import OF_LOGITS, OF_SITES, Limit, ahead

RESULTS = ROOT / "build" / "proving" / "forecasts.jsonl"
FAMILIES = ("gpt", "llama", "delayed", "vit", "ssm", "diffusion")
"""GPT and Llama (blockwise), Llama (delayed), ViT (blockwise), a state space model (mxfp8), diffusion (current)."""
EACH = 32
"""Steps between two looks."""
MOST_POINTS = 1000
ALL_ARRIVE = ("steady",)
"""Trends without a second way."""
OF_SOME = {"tokens-fade": ("gpt", "vit")}
"""Of underflow of gradients, which no forecast asks for."""


def plan() -> list[Case]:
    """Every trend that a family has a place for, arriving in all and levelling off in every second one of them."""
    cases = []
    for name in sorted(TRENDS):
        for family in OF_SOME.get(name, FAMILIES):
            seed = 1 + zlib.crc32(f"{name}/{family}".encode()) % 3
            ways = [SEVERITIES[0]]
            if name not in ALL_ARRIVE and FAMILIES.index(family) % 2 == zlib.crc32(name.encode()) % 2:
                ways.append(SEVERITIES[1])
            for way in ways:
                case = Case(family, name, "trend", "" if name in ALL_ARRIVE else way, seed)
                if case.draw(probe(family, seed)) is not None:
                    cases.append(case)
    return sorted(cases, key=lambda c: zlib.crc32(c.id.encode()))  # a part of it is a sample of all


def crossing(steps: np.ndarray[Any, Any], values: np.ndarray[Any, Any], limit: float) -> int | None:
    """First step from which the running median of nine measurements is above a limit."""
    if len(values) < 9:
        return None
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(values, 4, mode="edge"), 9), axis=1)
    above = np.flatnonzero(smooth > limit)
    return int(steps[above[0]]) if len(above) else None


def looks(series: Mapping[str, Any], limit: Limit) -> dict[str, Any] | None:
    """Every forecast of one series and when it passed the limit: None where there is neither.

    Args:
        series: as the API gives it, every step of the run.
    """
    kept = [(s, v) for s, v in zip(series["steps"], series["values"], strict=True) if v is not None]
    steps, values = np.array([s for s, _ in kept]), np.array([v for _, v in kept], dtype=np.float64)
    if not len(steps):
        return None
    crossed = crossing(steps, values, limit.value)
    said = []
    for at in range(MIN_STEPS, int(steps[-1]), EACH):
        if crossed is not None and at >= crossed:
            break
        seen = (steps <= at) & (steps > at - WINDOW_STEPS)
        found = ahead({"steps": steps[seen].tolist(), "values": values[seen].tolist()}, limit)
        if found is not None:
            said.append([int(found.last_step), found.soonest, found.steps, found.latest])
    if not said and crossed is None:
        return None
    return {"field": limit.quantity.field, "crossed": crossed, "last": int(steps[-1]), "said": said}


def _get(url: str, path: str) -> Any:
    return json.loads(collector._http.request("GET", f"{url}/api/v1/{path}").data)


def of_run(url: str, run_id: str) -> dict[str, Any]:
    """Forecasts of a run that is over: of each site with a limit, of the logged logit; and incidents of limit-ahead."""
    run = f"runs/{quote(run_id, safe='')}"
    found, cursor, num_series = [], "", 0
    while True:
        page = _get(url, f"{run}/sites?limit=1000{cursor}")
        for site in page["items"]:
            for limit in (limit for limit in OF_SITES if limit.holds_for(site)):
                series = _get(url, f"{run}/series?site={site['id']}&field={limit.quantity.field}&points={MOST_POINTS}")
                num_series += 1
                if (seen := looks(series, limit)) is not None:
                    found.append({key: site[key] for key in ("module", "operand", "direction")} | seen)
        if not page.get("next"):
            break
        cursor = f"&cursor={quote(page['next'], safe='')}"
    logits = _get(url, f"{run}/series?field={OF_LOGITS.quantity.field}&points={MOST_POINTS}")
    if "steps" in logits:  # else nobody logged one
        num_series += bool(logits["steps"])
    if "steps" in logits and (seen := looks(logits, OF_LOGITS)) is not None:
        found.append({"module": None, "operand": None, "direction": None} | seen)
    told = [i for i in collector.incidents(url, run_id) if i["mode"] == "limit-ahead"]
    return {"series": found, "num_series": num_series, "told": [_told(i) for i in told]}


def _told(incident: Mapping[str, Any]) -> dict[str, Any]:
    """What an incident says when the run is over: its place, and the numbers of its forecast."""
    evidence = incident["evidence"]
    steps = next((e for e in evidence if e["field"] == "steps_ahead"), None)
    return {
        "module": incident["place"]["module"], "operand": incident["place"]["operand"],
        "direction": incident["place"]["direction"], "field": evidence[0]["field"] if evidence else None,
        "first_step": incident["first_step"], "last_step": incident["last_step"],
        "at": steps and steps["since_step"], "steps": steps and steps["value"], "interval": steps and steps["baseline"],
    }  # fmt: skip


def compact(line: Mapping[str, Any], url: str, folder: Path) -> dict[str, Any]:
    """The line of one run."""
    kept = (
        "id",
        "family",
        "change",
        "kind",
        "severity",
        "seed",
        "drawn",
        "step",
        "steps",
        "seen_step",
        "watch",
        "broken",
        "died",
    )
    opened = collector.opened_steps(folder, line["id"])
    others = sorted({f"{i['mode']}@{i['first_step']}" for i in line["incidents"] if i["mode"] != "limit-ahead"})
    said = {key: line[key] for key in kept if key in line} | of_run(url, line["id"])
    said["opened"] = sorted(step for i, step in opened.items() if _mode(url, i) == "limit-ahead")
    return said | {"others": others}


def _mode(url: str, incident: str) -> str:
    return str(_get(url, f"incidents/{quote(incident, safe='')}")["mode"])


def train(cases: Iterable[Case], results: Path, jobs: int) -> int:
    """Run these; the number of runs that the proving ground broke."""
    todo, num_broken, began = list(cases), 0, time.monotonic()
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="forecasts-") as name, results.open("a") as out:
        folder = Path(name)
        with collector.serving(folder) as url:
            for number, line in enumerate(execute(todo, url, folder, jobs), 1):
                said = compact(line, url, folder)
                num_broken += "broken" in said
                out.write(json.dumps(said) + "\n")
                out.flush()
                num_said = sum(len(s["said"]) for s in said["series"])
                left = (time.monotonic() - began) / number * (len(todo) - number) / 60
                print(
                    f"{number}/{len(todo)} {said['id']}: {num_said} forecasts of {len(said['series'])} series,"
                    f" {len(said['told'])} told{' BROKEN' if 'broken' in said else ''} ({left:.0f} min left)",
                    flush=True,
                )
    return num_broken


def main(argv: list[str]) -> int:
    """0, or 1 where a run was broken by the proving ground itself."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.forecasts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", metavar="FAMILY", choices=FAMILIES)
    parser.add_argument("--trend", choices=sorted(TRENDS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also what is in the results")
    parser.add_argument(
        "--score", action="store_true", help="train nothing more: write the page's part from the results"
    )
    parser.add_argument("--print", action="store_true", help="print the page's part from what is in the tree")
    args = parser.parse_args(argv)
    if args.print:
        print(part(list(read(KEPT).values())))
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # ends collector and children too
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in [n for n in os.environ if n.startswith("FP8WATCH_")]:
        del os.environ[name]  # defaults are what is measured
    warm(FAMILIES)
    cases = [c for c in plan() if args.only in (None, c.family) and args.trend in (None, c.change)]
    done = {} if args.again else read(args.results)
    todo = [] if args.score else [c for c in cases if c.id not in done]
    num_broken = train(todo, args.results, args.jobs) if todo else 0
    if args.only is None and args.trend is None:
        lines = list(read(args.results).values())
        KEPT.write_text("".join(json.dumps(line) + "\n" for line in lines))
        put(part(lines, len(cases)))
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
