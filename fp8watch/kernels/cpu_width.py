"""Which width of vectors the C library is compiled for: every width that the processor has is timed, the fastest wins.

Wider is not always faster: processors differ in how they run wide vectors, compilers in how they translate them. It is
measured where the library is compiled, once a machine, and kept as the library itself. Results do not depend on the
width. `CC="gcc -DVB=32"` sets it without a measurement.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fp8watch.kernels import cpu_compiler
from fp8watch.kernels.cpu_compiler import CompilerHangs, Unavailable

WIDTHS = (64, 32, 16)
"""Bytes of a vector."""
TRIAL_TIMEOUT_S = 10.0
ROUNDS, ROUND_MS = 5, 15
_LOG = logging.getLogger("fp8watch.kernels")
# widths take turns, so that what else the machine does hits all of them
_TIME_THEM = f"""
import ctypes, sys
trials = [ctypes.CDLL(path).fp8watch_trial for path in sys.argv[1:]]
rounds = [[trial({ROUND_MS}_000_000) for trial in trials] for _ in range({ROUNDS})]
print(*(min(times) for times in zip(*rounds)))
"""


def fastest_width(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Flags that set the fastest width; none where there is one width only, or where it cannot be measured: then the
    sources take the widest that the processor has.

    Args:
        compiler: as a command.
        flags: those that the library will be compiled with.
        folder: an empty one to work in.

    Raises:
        CompilerHangs: it will not compile the library either.
    """
    if any(argument.startswith("-DVB=") for argument in (*compiler, *flags)):
        return ()
    try:
        widths = machine_widths(compiler, flags, folder)
        times = measure(compile_trials(compiler, flags, folder, widths)) if len(widths) > 1 else {}
    except CompilerHangs:
        raise
    except (Unavailable, OSError) as reason:
        _LOG.info("the fastest width of vectors was not measured: %s", reason)
        return ()
    if not times:
        return ()
    width = min(times, key=times.__getitem__)
    taken = ", ".join(f"{w} bytes {ns / 1e3:.1f} µs" for w, ns in times.items())
    _LOG.info("the C library is compiled for vectors of %d bytes: %s", width, taken)
    return (f"-DVB={width}",)


def machine_widths(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> list[int]:
    """The widths that these flags give the processor's own instructions for, the widest first."""
    found = re.search(r"\bwidest_vector (\d+)", cpu_compiler.preprocess(compiler, flags, "widest_vector VB", folder))
    return [width for width in WIDTHS if found and width <= int(found[1])]


def compile_trials(
    compiler: Sequence[str], flags: Sequence[str], folder: Path, widths: Sequence[int]
) -> dict[int, Path]:
    """Compile what is timed, for all widths at once; a width that does not compile is left out."""

    def one(width: int) -> Path | None:
        own = folder / f"width-{width}"
        own.mkdir()
        try:
            return cpu_compiler.compile_library(compiler, [*flags, f"-DVB={width}"], own, "trial.c")
        except CompilerHangs:
            raise
        except Unavailable:
            return None

    with ThreadPoolExecutor(len(widths)) as pool:
        made = dict(zip(widths, pool.map(one, widths), strict=True))
    return {width: path for width, path in made.items() if path is not None}


def measure(trials: dict[int, Path]) -> dict[int, int]:
    """Nanoseconds of one turn for each width, the least of many; none where they cannot be run.

    In a process of its own: an instruction that the processor lacks would end this one.
    """
    if not trials or not sys.executable:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TIME_THEM, *map(str, trials.values())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TRIAL_TIMEOUT_S,
        )  # fmt: skip
        times = [int(word) for word in done.stdout.split()]
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise Unavailable(f"the trials of the widths failed: {error}") from None
    if done.returncode or len(times) != len(trials):
        raise Unavailable(f"the trials of the widths ended with status {done.returncode}")
    return dict(zip(trials, times, strict=True))
