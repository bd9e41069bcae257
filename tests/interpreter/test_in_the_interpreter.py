"""The Triton kernels in Triton's interpreter, in a process of their own: it is chosen before Python starts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton.language") is None, reason="needs triton: pip install triton")
@pytest.mark.timeout(600)
def test_the_kernels_equal_the_reference(capfd: pytest.CaptureFixture[str]) -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/interpreter/inside",
        "-m",
        "not long",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed(.*)", done.stdout)
    assert counts is not None
    assert int(counts[1]) >= 140
    assert "skipped" not in counts[2]
    print(counts[0])
