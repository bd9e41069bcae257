"""The C compiler of the cpu backend: found, asked for its version, run with a limit on time.

Shapes:     C sources -> one shared library     Thread: any
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fp8watch.numerics.per_tile import HEAVY, LIGHT
from fp8watch_agent.batch_names import BUCKETS, SHIFTS
from fp8watch_agent.record import AMAX_BUCKET_OFFSET, EVERY_CALL, LAYOUT, ROW, WITH_ENERGIES, Measured

SOURCES = Path(__file__).with_name("cpu_source")
COMPILE_TIMEOUT_S = 90.0
VERSION_TIMEOUT_S = 15.0
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w")

FILLS = int(LIGHT)
"""Groups that the sources fill in every call; a later field's group is added here once fold.h counts it."""
FILLS_SAMPLED = FILLS | int(HEAVY) | int(Measured.GAIN)
"""The same with energies, moments, depth and gain."""

_MERGES = {  # of b into a
    "sum": "{a} += {b};",
    "max": "if ({b} > {a}) {a} = {b};",
    "min": "if ({b} < {a}) {a} = {b};",
    "or": "{a} = merged_bits({a}, {b});",
}
_MERGES_F4 = {**_MERGES, "max": "{a} = max_or_nan({a}, {b});", "min": "{a} = min_or_nan({a}, {b});"}  # a NaN stays


class Unavailable(Exception):
    """Why there is no library, in words for the user."""


class CompilerHangs(Unavailable):
    """Not worth a second attempt."""


def row_header() -> str:
    """The record as a C struct, and how its sums and extremes are merged, from the one table of its fields."""
    ctype = {"<f8": "double", "<i8": "int64_t", "<i4": "int32_t", "<f4": "float"}
    members, checks, defaults, merges = [], [], [], []
    assert ROW.fields is not None
    for f in LAYOUT:
        members.append(f"    {ctype[f.dtype]} {f.name}{f'[{f.size}]' if f.size > 1 else ''};")
        checks.append(f'_Static_assert(offsetof(struct row, {f.name}) == {ROW.fields[f.name][1]}, "{f.name}");')
        if f.default:
            value = "INFINITY" if f.default == float("inf") else str(int(f.default))
            defaults.append(f".{f.name} = " + (f"{{{', '.join([value] * f.size)}}}" if f.size > 1 else value))
        if f.merge in _MERGES:
            at = f"{f.name}[i]" if f.size > 1 else f.name
            loop = f"for (int i = 0; i < {f.size}; i++) " if f.size > 1 else ""
            how = (_MERGES_F4 if f.dtype == "<f4" else _MERGES)[f.merge]
            merges.append(loop + how.format(a=f"(a)->{at}", b=f"(b)->{at}"))
    return "\n".join(
        [
            "/* made from the table of fields: fp8watch_agent.record.FIELDS */",
            "#include <math.h>\n#include <stddef.h>\n#include <stdint.h>",
            "struct row {",
            *members,
            "};",
            *checks,
            f'_Static_assert(sizeof(struct row) == {ROW.itemsize}, "size of a row");',
            f"static const struct row EMPTY_ROW = {{{', '.join(defaults)}}};",
            "#define MERGE_FIELDS(a, b) \\\n    " + " \\\n    ".join(merges),
            f"#define MEASURED_CALLS {int(Measured.COUNTS)}",
            f"#define MEASURED_BY_EVERY_CALL {int(EVERY_CALL & ~WITH_ENERGIES)}",
            f"#define MEASURED_WITH_ENERGIES {int(WITH_ENERGIES)}",
            f"#define MEASURED_LIGHT {FILLS}",
            f"#define MEASURED_ALL {FILLS_SAMPLED}",
            f"#define MEASURED_PROBE {int(Measured.COUNTS | Measured.AMAX)}",
            f"#define MEASURED_ENERGIES {int(Measured.ENERGIES)}",
            f"#define MEASURED_COUNTS {int(Measured.COUNTS)}",
            f"#define MEASURED_AMAX {int(Measured.AMAX)}",
            f"#define MEASURED_CAST {int(Measured.COUNTS | Measured.CODES)}",
            f"#define BATCH_BUCKETS {BUCKETS}",
            f"#define BATCH_FIRST_SHIFT ({min(SHIFTS)})",
            f"#define BATCH_SHIFTS {len(SHIFTS)}",
            f"#define AMAX_BUCKET_SHIFT {128 - AMAX_BUCKET_OFFSET}",
            "",
        ]
    )


def processor() -> str:
    """What this processor can, as the system reports it: part of the key, so that no machine runs another's code."""
    facts = [platform.machine()]
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part"):
                facts.append(f"{name.strip()}={value.strip()}")
            if not line.strip():
                break  # the first processor speaks for all
    return "\n".join(facts)


def find_compiler() -> list[str]:
    """The compiler as a command: CC if it is set, else the first of cc, gcc, clang on PATH.

    Raises:
        Unavailable: there is none.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unavailable(
            f"CC={os.environ['CC']!r} cannot be read as a command: {error}; correct or unset CC"
        ) from None
    if named:
        path = shutil.which(named[0])
        if path is None:
            raise Unavailable(f"CC={os.environ['CC']!r} is not a program on PATH; correct or unset CC")
        return [path, *named[1:]]
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return [path]
    raise Unavailable("no C compiler (cc, gcc or clang) on PATH; install one, or set CC")


def run_compiler(command: Sequence[str], timeout_s: float, folder: Path | None = None) -> str:
    """Run the compiler; returns what it printed.

    Raises:
        Unavailable: it cannot be started, takes too long, or fails.
    """
    try:
        # a session of its own: a compiler that hangs is ended together with what it has started
        with subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, 9)
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise CompilerHangs(f"the compiler {command[0]} did not finish within {timeout_s:.0f} s") from None
                raise
    except OSError as error:
        raise Unavailable(f"the compiler {command[0]} cannot be started: {error.strerror or error}") from None
    if process.returncode:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        raise Unavailable(f"the compiler {command[0]} failed with status {process.returncode}: {last[0][:200]}")
    return output


def flag_choices() -> list[tuple[str, ...]]:
    """Flags to try, the best first. `native` on x86 is what the processor reports; elsewhere its name is another."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64", "ppc64le") else "-march=native"
    return [(*_FLAGS, native), _FLAGS]


def compiler_version(compiler: Sequence[str]) -> str:
    """What the compiler says of itself."""
    return run_compiler([*compiler, "--version"], VERSION_TIMEOUT_S)


def compile_library(compiler: Sequence[str], flags: Sequence[str], folder: Path, source: str = "quantize.c") -> Path:
    """Compile one of the sources in an empty folder; returns the library there."""
    (folder / "row.h").write_text(row_header())
    made = folder / "library.so"
    sources = [f"-I{folder}", f"-I{SOURCES}", "-o", str(made), str(SOURCES / source), "-lm"]
    run_compiler([*compiler, *flags, *sources], COMPILE_TIMEOUT_S)
    if not made.exists():
        raise Unavailable(f"the compiler {compiler[0]} reported success and wrote no library")
    return made


def preprocess(compiler: Sequence[str], flags: Sequence[str], text: str, folder: Path) -> str:
    """What the preprocessor makes of text that stands behind vector.h, with the headers' own text before it."""
    source, made = folder / "text.c", folder / "text.i"
    source.write_text(f'#include "vector.h"\n{text}\n')
    run_compiler([*compiler, *flags, "-E", "-P", f"-I{SOURCES}", "-o", str(made), str(source)], COMPILE_TIMEOUT_S)
    return made.read_text(errors="replace")
