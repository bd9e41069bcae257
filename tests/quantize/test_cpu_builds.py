"""The C sources give the same bits however they are compiled: for old processors, wide vectors, and under sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from quantize.backends import USABLE

from fp8watch.kernels import cpu_compiler

KERNELS = "fp8watch/kernels"
pytestmark = [
    pytest.mark.skipif("cpu" not in USABLE, reason="no C compiler here: set CC"),
]
_PLAIN = ("-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w")
_SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_X86 = platform.machine() in ("x86_64", "AMD64")

_RUN = """
import sys
from fp8watch.kernels import cpu_library, cpu_compiler
cpu_library.library = cpu_library._open(__import__("pathlib").Path(sys.argv[1]))
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def run_tests(library: Path, *tests: str, **environ: str) -> None:
    """The tests of the numbers, in a process whose cpu backend is this library."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(library), *tests],
        cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("-march=x86-64",), marks=pytest.mark.skipif(not _X86, reason="x86 only")),
        pytest.param(("-march=x86-64-v2",), marks=pytest.mark.skipif(not _X86, reason="x86 only")),
        ("-DVB=16",),
        ("-DVB=64",),
        ("-DVB=32", "-march=native"),
        ("-DVB=64", "-march=native"),
    ],
    ids=" ".join,
)
@pytest.mark.timeout(900)
@pytest.mark.heavy(35, KERNELS)
def test_every_build_gives_the_same_bits(flags: tuple[str, ...], tmp_path: Path) -> None:
    compiler = cpu_compiler.find_compiler()
    library = cpu_compiler.compile_library(compiler, [*_PLAIN, *flags], tmp_path)
    run_tests(library, *(f"tests/quantize/test_{name}.py" for name in ("agreement", "golden", "measure")))


@pytest.mark.timeout(900)
@pytest.mark.heavy(60, KERNELS)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    compiler = cpu_compiler.find_compiler()
    where = [
        subprocess.run([*compiler, f"-print-file-name={n}"], capture_output=True, text=True).stdout.strip()
        for n in ("libasan.so", "libubsan.so")
    ]
    if not all(os.path.isabs(p) for p in where):
        pytest.skip("this compiler has no shared sanitizer libraries")
    library = cpu_compiler.compile_library(compiler, [*_PLAIN, *_SANITIZERS, "-march=native"], tmp_path)
    options = "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1"
    run_tests(
        library, "tests/quantize/test_agreement.py", "tests/quantize/test_golden.py",
        LD_PRELOAD=" ".join(where), ASAN_OPTIONS=options, UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
    )  # fmt: skip
