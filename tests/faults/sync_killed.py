"""Runs in a process of its own, because it forks: `fp8watch sync` killed at each point, and run again.

Arguments: folder with what was left, folder for copies, URL, points. Tells of each point whether it was reached, and goes on
to the next one when it reads a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from faults.crash import in_a_child

from fp8watch_agent import sync


def main() -> None:
    left, copies, url = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    for i, point in enumerate(sys.argv[4:]):
        folder = copies / str(i)
        shutil.copytree(left, folder)

        def once(folder: Path = folder) -> int:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                return sync.main(["--spool-dir", str(folder), "--collector", url, "--timeout", "5"])

        killed = in_a_child(once, point)
        again = [in_a_child(once), in_a_child(once)]
        rest = sorted(p.name for p in folder.iterdir() if p.suffix in (".ring", ".spool", ".tmp", ".new"))
        print(
            json.dumps({"point": point, "killed": killed == signal.SIGKILL, "again": again, "rest": rest}), flush=True
        )
        sys.stdin.readline()


if __name__ == "__main__":
    main()
