"""Every benchmark that needs nothing but this machine, one after the other, into docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.operating_point import refuse_other_settings  # noqa: E402

FAMILIES = (
    "kernels",
    "linear",
    "agent",
    "light_rows",
    "steps",
    "observe",
    "store",
    "growth",
    "collector",
    "queued",
    "http_share",
    "pages",
    "many_runs",
    "peers",
)


def main() -> None:
    """Run them in processes of their own, so that none inherits another's threads or memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    root = HERE.parents[1]
    refuse_other_settings()
    path = os.pathsep.join(str(root / p) for p in ("tests", "agent", "server", "."))
    for family in args.families:
        if family not in FAMILIES:
            parser.error(f"{family!r} is not a family: {', '.join(FAMILIES)}")
        if not (HERE / f"{family}.py").exists():
            continue
        command = [sys.executable, "-m", f"benchmarks.{family}", "--repetitions", str(args.repetitions)]
        subprocess.run(command, check=True, cwd=root, env={**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    main()
