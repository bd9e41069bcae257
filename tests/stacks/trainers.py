"""Trains something small with each trainer, watched and not, and writes the second table of docs/integrations.md.

    python tests/stacks/trainers.py [--print] [NAME...]      (rows of others stay as they are)

Per trainer: whether the recorded losses are its own, whether its losses and weights are those of the same training without a
watch, to the last bit, how many steps ended, and what a collector says of an Inf that is put into one weight. A trainer is a
process of its own, because engines keep process groups.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATHS = [str(p) for p in (ROOT / "tests", HERE, ROOT, ROOT / "agent", ROOT / "server")]
sys.path[:0] = PATHS

from benchmarks.operating_point import refuse_other_settings  # noqa: E402
from stacks import heads  # noqa: E402
from stacks.trainer_runs import TRAINERS  # noqa: E402

PAGE = ROOT / "docs" / "integrations.md"
BEGIN, END = heads.TRAINERS
PACKAGES = ("torch", "transformers", "lightning", "accelerate", "deepspeed", "torchtitan")


def child(name: str, url: str, folder: Path) -> dict[str, Any]:
    """One trainer, measured: a line of JSON from a process of its own."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FP8WATCH")}
    environ |= {
        "PYTHONPATH": os.pathsep.join(PATHS),
        "FP8WATCH_SPOOL_DIR": str(folder / "spool"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", str(HERE / "trainer_runs.py"), name, url, str(folder)]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=580)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"trainer"')]
    if not lines:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def told(url: str, run: str) -> str:
    """Title of the first incident of a run into which an Inf was put, and the element that it names."""
    from proving import collector
    from stacks.families import element_of

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = collector.incidents(url, run)
        if found:
            return element_of(json.dumps([found[0]["title"], found[0]["cause"]]))
        time.sleep(0.3)
    return "**no incident**"


def line_of(r: dict[str, Any]) -> str:
    """One row."""
    loss, same = ("its own" if r["loss"] else "**another**"), ("yes" if r["identical"] else "**no**")
    return f"| {r['trainer']} | {loss} | {same} | {r['steps']} of {r['made']} | {r['told']} |"


def merged(section: str, rows: list[dict[str, Any]]) -> list[str]:
    """Lines of the table in its order: those that were measured now, and of the others those that the page has."""
    known = {line.split(" | ")[0].removeprefix("| "): line for line in section.splitlines() if line.startswith("| ")}
    known |= {r["trainer"]: line_of(r) for r in rows}
    return [known[name] for name in TRAINERS if name in known]


def table(lines: list[str]) -> str:
    """The section of the page."""
    return "\n".join([*heads.trainers(", ".join(f"{n} {metadata.version(n)}" for n in PACKAGES)), *lines, END])


def main() -> int:
    """Measure, and write or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the section, and leave the page as it is")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    refuse_other_settings()
    chosen = [n for n in TRAINERS if not args.names or any(a.lower() in n.lower() for a in args.names)]
    from proving import collector

    os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)
    rows = []
    with tempfile.TemporaryDirectory() as base, collector.serving(Path(base)) as url:
        for i, name in enumerate(chosen):
            folder = Path(base) / str(i)
            folder.mkdir()
            row = child(name, url, folder)
            row["told"] = told(url, row["run"])
            print(row, flush=True)
            rows.append(row)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    section, _, after = rest.partition(END)
    if args.print:
        print(table([line_of(r) for r in rows]))
    else:
        PAGE.write_text(before + table(merged(section, rows)) + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
