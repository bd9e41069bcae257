"""One case in this process: `te_case.py NAME OUT [--stand-in]` writes its line of JSON to OUT."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

RUNS = {
    "train": "te_trained.training", "blackwell": "te_trained.blackwell", "stats": "te_statistics.stats",
    "bytes": "te_bytes.quantisers", "checks": "te_checks.checks", "time": "te_timing.timing",
}  # fmt: skip


def run(name: str, stand_in: bool) -> dict[str, Any]:
    """Import Transformer Engine, then the file that has the case, and call it."""
    from te_place import Place

    began = time.monotonic()
    at = Place(stand_in)
    found = {"te": at.te.version, "import_s": round(time.monotonic() - began, 1)}
    kind, *arguments = name.split("/")
    module, _, function = RUNS[kind].partition(".")
    return found | getattr(importlib.import_module(module), function)(at, *arguments)


def main(name: str, out: Path, stand_in: bool) -> None:
    """Run a case and write its line, whatever it raises."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as spool:
        os.environ["FP8WATCH_SPOOL_DIR"] = spool
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        try:
            line = {"case": name} | run(name, stand_in)
        except BaseException as error:  # it is what is reported
            told = f"{type(error).__name__}: {str(error)[:300]}"
            line = {"case": name, "verdict": "RAISED", "told": told, "error": traceback.format_exc()}
    line["seconds"] = round(time.monotonic() - began, 1)
    out.write_text(json.dumps(line, default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--stand-in" in sys.argv[3:])
