"""Quantise one operand on the CPU, on one thread, beside the copy of the same bytes and what else there is."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import table
from fp8watch.kernels import cpu_call, cpu_compiler, cpu_library, cpu_width
from fp8watch.kernels.registry import available, resolve
from fp8watch.numerics.formats import E4M3
from fp8watch.numerics.quantize_job import QuantizeJob

LEVELS = {"bare": (False, False), "counted": (True, False), "full": (True, True)}
"""Statistics and all of them: `stats` and `heavy` of a job."""
TILES = {"1×128": (1, 128), "128×1": (128, 1), "128×128": (128, 128)}
ROW, BLOCK = (1, 128), (128, 128)


def roof(read: int, written: int) -> Callable[[], object]:
    """memcpy of the same traffic: half of the bytes read, half of them written."""
    source = torch.ones((read + written) // 2, dtype=torch.uint8)  # written: never-read pages are one cached page
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def eager(x: torch.Tensor) -> torch.Tensor:
    """1×128 by hand, codes only: what a training script would write."""
    tiles = x.view(x.shape[0], -1, 128)
    amax = tiles.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, torch.exp2(torch.floor(torch.log2(448.0 / amax))))
    return (tiles * scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def eager_with_statistics(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same, with amax, underflow, saturation and non-finite counts."""
    codes = eager(x)
    finite = x.isfinite()
    zero = (codes.view(torch.uint8) & 0x7F) == 0
    return codes, x.abs().amax(), (zero & (x.view_as(codes) != 0)).sum(), (~finite).sum(), (x != 0).sum()


def numba_case(x: torch.Tensor) -> Callable[[], object] | None:
    """1×128 with statistics in numba, when it is installed."""
    try:
        import numba
        import numpy as np
    except ImportError:
        return None

    @numba.njit(cache=False, fastmath=False)
    def quantise(x, codes, scales):  # type: ignore[no-untyped-def]
        zeros = 0
        for i in range(x.shape[0]):
            for t in range(x.shape[1] // 128):
                amax = np.float32(0)
                for j in range(t * 128, t * 128 + 128):
                    a = abs(x[i, j])
                    amax = max(amax, a)
                scale = np.float32(2.0) ** np.floor(np.log2(np.float32(448) / amax)) if amax > 0 else np.float32(1)
                scales[i, t] = scale
                for j in range(t * 128, t * 128 + 128):
                    y = min(max(x[i, j] * scale, np.float32(-448)), np.float32(448))
                    a = abs(y)
                    if a < np.float32(0.015625):
                        q = np.int32(np.rint(a * np.float32(512)))
                    else:
                        m, e = math.frexp(a)
                        mantissa = np.int32(np.rint(m * np.float32(16)))
                        q = mantissa + (e + 6) * 8 - 8
                    zeros += q == 0
                    codes[i, j] = q | (128 if y < 0 else 0)
        return zeros

    codes, scales = np.empty(x.shape, np.uint8), np.empty((x.shape[0], x.shape[1] // 128), np.float32)
    array = x.numpy()
    return lambda: quantise(array, codes, scales)


def quantise(size: int, repetitions: int) -> str:
    """The rows of one operand, float32 in, codes out."""
    x = torch.randn(size, size)
    n = x.numel()
    cases: dict[str, Callable[[], object]] = {
        "memcpy of the same traffic, 4 B read and 1 B written an element (roof)": roof(4 * n, n),
        "x.to(float8_e4m3fn), no scales": lambda: x.to(torch.float8_e4m3fn),
        "torch, eager, codes only": lambda: eager(x),
        "torch, eager, with counts": lambda: eager_with_statistics(x),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(eager_with_statistics)
        compiled(x)
    cases["torch.compile of it"] = lambda: compiled(x)
    by_numba = numba_case(x)
    if by_numba is not None:
        cases["numba, zeros counted"] = by_numba
    for name, reason in available("cpu").items():
        if reason is not None or name == "triton":
            continue
        backend = resolve(name, "cpu")
        for what, how in (
            ("quantise", {"stats": False}),
            ("quantise + counts, extremes, histogram", {"heavy": False}),
            ("quantise + all statistics", {"heavy": True}),
        ):
            cases[f"**{name}**: {what}"] = lambda b=backend, job=QuantizeJob(ROW, E4M3, **how): b.quantize(x, job)  # type: ignore[misc]
    got = table.interleaved(cases, repetitions, time.thread_time)
    base = got[next(iter(cases))]
    rows = [(name, f"{t * 1e3:.1f}", f"{base / t:.3f}") for name, t in got.items()]
    if by_numba is None:
        rows.append(("numba", "not installed", ""))
    return table.table(("", "ms", "share of the roof"), rows)


_alive: list[torch.Tensor] = []


def arguments(x: torch.Tensor, job: QuantizeJob) -> tuple[object, ...]:
    """What the library is given for codes of one operand; the tensors live as long as the benchmark."""
    known = cpu_call.prepare(x, job, (cpu_call.CODES,))
    out, piece = torch.empty(x.shape, dtype=torch.uint8), torch.empty(known.num_bytes, dtype=torch.uint8)
    scale_inv = torch.empty(known.directions[0].num_tiles)
    _alive.extend((x, out, piece, scale_inv))
    here = x.data_ptr(), x.stride(0), None, None, out.data_ptr(), 0, scale_inv.data_ptr(), 0, 0, 0, piece.data_ptr()
    return known.jobs, 1, *here, 1, 0, 0, -1


def widths(size: int, repetitions: int) -> str:
    """The native kernel compiled for each width of vectors that this machine has, by the minimum of all turns."""
    if available("cpu")["cpu"] is not None:
        return "Not measured."
    x = torch.randn(size, size)
    calls = {
        what: arguments(x, QuantizeJob(ROW, E4M3, stats=stats, heavy=heavy)) for what, (stats, heavy) in LEVELS.items()
    }
    cases: dict[tuple[int, str], Callable[[], object]] = {(0, "roof"): roof(4 * x.numel(), x.numel())}
    with tempfile.TemporaryDirectory() as folder:
        compiler, flags = cpu_compiler.find_compiler(), cpu_compiler.flag_choices()[0]
        found = cpu_width.machine_widths(compiler, flags, Path(folder))
        for width in found:
            (own := Path(folder, str(width))).mkdir()
            library = cpu_library._open(cpu_compiler.compile_library(compiler, [*flags, f"-DVB={width}"], own))
            for what, call in calls.items():
                cases[width, what] = lambda library=library, call=call: library.fp8watch_operand(*call)  # type: ignore[misc]
        got = {case: min(times) for case, times in table.taking_turns(cases, repetitions, time.thread_time).items()}
    base, chosen = got[0, "roof"], cpu_library.load().fp8watch_abi(2)
    rows = [("memcpy of the same traffic (roof)", f"{base * 1e3:.1f}", "1.00", "", "", "", "")]
    for width in found:
        name = f"**{width}**, chosen here" if width == chosen else str(width)
        cells = [(f"{got[width, what] * 1e3:.1f}", f"{base / got[width, what]:.2f}") for what in LEVELS]
        rows.append((name, *cells[0], *cells[1], *cells[2]))
    columns = ("bytes of a vector", "quantise, ms", "of the roof", "with counts, ms", "of the roof", "all statistics, ms", "of the roof")  # fmt: skip
    return table.table(columns, rows)


def kinds(size: int, repetitions: int) -> str:
    """The native kernel by dtype, tile and what it writes, each beside its own roof."""
    rows = []
    reason = available("cpu")["cpu"]
    if reason is not None:
        return f"Not measured: {reason}."
    native = resolve("cpu", "cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(size, size).to(dtype)
        n, read = x.numel(), x.element_size()
        # past 32 MiB the C library maps every result anew: a quarter of the operand keeps the kernel in sight
        small = x[: size // 2, : size // 2].contiguous()
        m = small.numel()
        cases: dict[str, Callable[[], object]] = {"codes": roof(read * n, n), "float32": roof(read * m, 4 * m)}
        for name, tile in TILES.items():
            for level, (stats, heavy) in LEVELS.items():
                job = QuantizeJob(tile, E4M3, stats=stats, heavy=heavy)
                cases[f"codes {name} {level}"] = lambda job=job, x=x: native.quantize(x, job)  # type: ignore[misc]
                cases[f"float32 {name} {level}"] = lambda job=job, x=small: native.quantize_dequantize(x, job)  # type: ignore[misc]
        got = table.interleaved(cases, repetitions, time.thread_time)
        for name in TILES:
            for out in ("codes", "float32"):
                bare, counted, full = (got[f"{out} {name} {level}"] for level in LEVELS)
                rows.append(
                    (str(dtype).removeprefix("torch."), name, out, f"{bare * 1e3:.1f}", f"{got[out] / bare:.2f}",
                     f"{got[out] / counted:.2f}", f"{got[out] / full:.2f}", f"{counted / bare - 1:+.1%}")
                )  # fmt: skip
    columns = ("input", "tile", "output", "ms", "share of its roof", "with counts", "all statistics", "counts cost")
    return table.table(columns, rows)


def parts(size: int, repetitions: int) -> str:
    """What the arithmetic takes by itself (operands that stay in the cache), and what the bytes take by themselves.

    The library is called with a job made before: a call of `quantize` from Python adds 10–30 µs whatever the operand.
    """
    if available("cpu")["cpu"] is not None:
        return "Not measured."
    library = cpu_library.load()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        took: dict[int, list[float]] = {}
        for side in (size // 4, size):
            x, times = torch.randn(side, side).to(dtype), max(1, (size // side) ** 2)
            jobs = [arguments(x, QuantizeJob(ROW, E4M3, stats=stats, heavy=False)) for stats in (False, True)]

            def many(f: Callable[[], object], times: int = times) -> Callable[[], None]:
                return lambda: [f() for _ in range(times)] and None

            cases = {"copy": many(roof(x.element_size() * x.numel(), x.numel()))}
            for name, call in zip(("bare", "counted"), jobs, strict=True):
                cases[name] = many(lambda call=call: library.fp8watch_operand(*call))  # type: ignore[misc]
            got = table.interleaved(cases, repetitions, time.thread_time)
            took[side] = [t / times / x.numel() * 1e9 for t in got.values()]
        (_, *inside), (copy, *outside) = took.values()
        for name, arithmetic, both in zip(("quantise", "with counts"), inside, outside, strict=True):
            hidden = (arithmetic + copy - both) / min(arithmetic, copy)
            rows.append(
                (str(dtype).removeprefix("torch."), name, f"{copy:.2f}", f"{arithmetic:.2f}", f"{both:.2f}",
                 f"{copy / arithmetic:.2f}", f"{copy / both:.2f}", f"{hidden:.0%}")
            )  # fmt: skip
    columns = ("1×128, codes; ns an element", "", "copy in memory", "kernel in cache", "kernel in memory",
               "share if all overlapped (1 at most)", "share reached", "of the shorter hidden behind the longer")  # fmt: skip
    return table.table(columns, rows)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--size", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = f"""## Quantise one operand, {args.size}×{args.size}, one thread

{table.machine("torch", "numpy", "numba")} {args.repetitions} repetitions. Processor
time of the one thread: others may use the machine, though not its memory without being noticed. Goals: quantise ≥ 0.90 of the roof, with
counts ≥ 0.85, counts ≤ 8 % over quantise alone, all statistics ≥ 0.50, bfloat16 ≥ 0.60.

float32, tiles 1×128, codes out:

{quantise(args.size, args.repetitions)}

The width of vectors is chosen by measurement when the library is compiled. Each width that this machine has, float32,
tiles 1×128, codes out, one call of the library, the minimum of {5 * args.repetitions} turns:

{widths(args.size, 5 * args.repetitions)}

The native kernel alone, with counts, extremes and histogram, and with energies, moments and depth as well; codes of
{args.size}×{args.size}, float32 (quantise–dequantise in one pass) of {args.size // 2}×{args.size // 2}:

{kinds(args.size, args.repetitions)}

Where the rest goes. By itself, on operands that stay in the cache ({args.size // 4}×{args.size // 4}), the kernel's arithmetic takes about as
long as the copy takes in memory; the roof is reached only where the two overlap to the last cycle, and the smaller the
element the less there is to hide behind. Columnwise tiles are read twice, the second time from the second cache.

{parts(args.size, args.repetitions)}
"""
    table.write("kernels", text)


if __name__ == "__main__":
    main()
