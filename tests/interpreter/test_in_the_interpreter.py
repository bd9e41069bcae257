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
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton.language") is None, reason="needs triton: pip install triton"),
    pytest.mark.timeout(600),
]


def run_inside(which: str) -> subprocess.CompletedProcess[str]:
    """The tests in `inside` that a marker expression selects."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreter/inside", "-m", which]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=580, check=False)


def check(done: subprocess.CompletedProcess[str], num_tests: int) -> None:
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed(.*)", done.stdout)
    assert counts is not None
    assert int(counts[1]) >= num_tests
    assert "skipped" not in counts[2]
    print(counts[0])


@pytest.mark.heavy(30, "fp8watch/kernels", "fp8watch/numerics", "tests/interpreter", first=True)
def test_the_kernels_equal_the_reference() -> None:
    check(run_inside("not long"), 80)


@pytest.mark.heavy(30, "fp8watch/kernels", "tests/interpreter")
def test_the_kernels_equal_the_reference_in_every_combination() -> None:
    check(run_inside("long"), 110)
