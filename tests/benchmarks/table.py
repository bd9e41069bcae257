"""How benchmarks measure and write: interleaved repetitions, medians, and docs/benchmarks.md section by section.

A script measures one family and replaces the sections of its own name, so that what was measured on another machine
stays. Ratios hold within one section: its rows took turns in one run. Nothing here asserts on time.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.operating_point import headed

OUT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
ORDER = (
    "kernels",
    "linear",
    "agent",
    "light_rows",
    "steps",
    "observe",
    "gpu",
    "store",
    "growth",
    "collector",
    "queued",
    "http_share",
    "pages",
    "many_runs",
    "peers",
)
"""Families, in the order of the page. A family that has not been measured says so."""

HEAD = """# Benchmarks

Written by `make bench` and its sisters (`make bench-gpu`, …). Ratios within one run, medians of interleaved
repetitions; milliseconds are of the machine that is named beside them. A remark on a measurement stands behind it, as *Remark*.
"""
_MISSING = "## Not measured"


def interleaved(
    cases: dict[str, Callable[[], object]], repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, so that a drifting machine hits all of them.

    Args:
        cases: what to run, by name. Each runs once before anything is measured.
        repetitions: how often each is measured.
        clock: time.process_time where a wall clock would be noise.
    """
    return {name: statistics.median(t) for name, t in taking_turns(cases, repetitions, clock).items()}


def taking_turns(
    cases: dict[str, Callable[[], object]], repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each case turn by turn; as `interleaved`."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for _ in range(repetitions):
        for name, run in cases.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return times


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table. Numbers are written by the caller."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def machine(*packages: str) -> str:
    """Processor, cores, Python and the versions of these packages, in a line."""
    model = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    parts = [f"{model[1].strip() if model else platform.processor()}, {os.cpu_count()} cores, {platform.system()}"]
    parts.append(f"Python {platform.python_version()}")
    for name in packages:
        try:
            parts.append(f"{name} {metadata.version(name).partition('+')[0]}")
        except metadata.PackageNotFoundError:
            parts.append(f"{name} not installed")
    return "; ".join(parts) + "."


def write(family: str, text: str) -> None:
    """Replace one family's part of docs/benchmarks.md, and print it. What people wrote behind a part stays where it is.

    Args:
        family: one of ORDER.
        text: Markdown that begins with a `##` heading.
    """
    if family not in ORDER:
        raise ValueError(f"family={family!r}: must be one of {', '.join(ORDER)}")
    page = _read(OUT)
    parts, notes = parts_of(page), notes_of(page)
    parts[family] = headed(family, text)
    missing = [name for name in ORDER if name not in parts]
    pieces = []
    for name in (name for name in ORDER if name in parts):
        pieces += [f"<!-- {name} -->\n{parts[name]}\n<!-- /{name} -->", notes.get(name, "")]
    body = "\n\n".join(piece for piece in pieces if piece)
    left = f"\n\n{_MISSING}\n\n{', '.join(missing)}.\n" if missing else "\n"
    OUT.write_text(f"{HEAD}\n{body}{left}")
    sys.stdout.write(text.strip() + "\n\n")
    if family in notes:
        sys.stdout.write(f"Written by hand behind this part; see whether it still holds:\n\n{notes[family]}\n\n")


def parts_of(page: str) -> dict[str, str]:
    """Family -> what stands between its markers."""
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->", page, re.S))


def notes_of(page: str) -> dict[str, str]:
    """Family -> what stands behind its part, and is nobody's part."""
    behind = re.findall(rf"<!-- /(\w+) -->\n(.*?)(?=<!-- \w+ -->|{_MISSING}|\Z)", page, re.S)
    return {name: text.strip() for name, text in behind if text.strip()}


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
