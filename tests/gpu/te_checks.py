"""The checks of tests/te/real over an installed Transformer Engine."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from te_place import Place, not_here

REAL = Path(__file__).resolve().parents[1] / "te" / "real"


def checks(at: Place, name: str) -> dict[str, Any]:
    """One file of tests/te/real over this installation: its loader gives what was imported here."""
    if at.cuda:
        torch.set_default_device("cuda")
    module = types.ModuleType("loading")
    module.load = lambda: at.te  # type: ignore[attr-defined]
    sys.modules["loading"] = module
    failed: dict[str, str] = {}
    counts = {"passed": 0, "failed": 0, "skipped": 0}

    class Kept:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] += 1
            if report.failed:
                failed[report.nodeid.split("::", 1)[-1]] = str(report.longrepr)[-2500:]

    # on Hopper: ids that name MXFP8, and the two of public_faults whose scales are padded as only MXFP8's are
    few = ["-k", "not mx and not padd"] if not_here(at, "mxfp8") else []
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(REAL / "pytest.ini"),
        "--confcutdir",
        str(REAL),
        "--tb=short",
    ]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main([*arguments, *few, str(REAL / f"check_{name}.py")], plugins=[Kept()])
    broken = "" if status in (0, 1, 5) else said.getvalue()[-3000:]
    first = {k: v.strip().splitlines()[-1][:160] if v.strip() else "" for k, v in failed.items()}
    return {
        "verdict": "BROKEN" if broken else "FAILED" if failed else "ok", **counts, "failed_tests": failed, "broken": broken,
        "told": f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped {first or ''}",
    }  # fmt: skip
