"""The GPU's rows: quantising against the device's own copy, statistics, both directions, the FP8 Linear, attach.

Run by `make bench-gpu`, on a machine with a GPU. Times are medians of CUDA events over interleaved repetitions; operands
take turns in more memory than the cache holds. `--device cpu` with TRITON_INTERPRET=1 runs through everything once, to
see that the script works: its figures mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.table import machine, table, write
from fp8watch.kernels import scaled_mm, triton
from fp8watch.kernels.scaled_mm import Codes
from fp8watch.numerics.formats import E4M3
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.sketch.slab import Slab

Case = Callable[[int], object]
"""What is timed; it is given the number of the call, to take the operands in turn."""

COPIES = 8
"""Operands that take turns: at 4096² bfloat16 they are 256 MiB, past every cache."""


class Clock:
    """Milliseconds of a case, by CUDA events."""

    def __init__(self, device: str, repetitions: int, calls: int) -> None:
        self.device, self.repetitions, self.calls = device, repetitions, calls

    def once(self, run: Case) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            run(0)
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(self.calls):
            run(i)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / self.calls

    def interleaved(self, cases: dict[str, Case]) -> dict[str, float]:
        """Median of each case; the cases take turns, so that a drifting clock rate hits all of them."""
        times: dict[str, list[float]] = {name: [] for name in cases}
        for run in cases.values():
            self.once(run)  # compiles
            self.once(run)
        for _ in range(self.repetitions):
            for name, run in cases.items():
                times[name].append(self.once(run))
        return {name: statistics.median(t) for name, t in times.items()}


def quantise(clock: Clock, size: int) -> str:
    """One operand, bfloat16: share of the bandwidth of a copy with the same traffic."""
    device = clock.device
    xs = [torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(COPIES)]
    halves = [torch.empty(size * size * 3 // 2, device=device, dtype=torch.uint8) for _ in range(COPIES)]
    slab = Slab(1, device)

    def roof(
        i: int,
    ) -> None:  # reads and writes 1.5 bytes an element each: 3 in all, as quantising reads 2 and writes 1
        halves[i % COPIES].copy_(halves[(i + 1) % COPIES])

    def run(tile: tuple[int, int], *, hardware: bool = False, merge: bool = False, **how: bool) -> Case:
        def case(i: int) -> None:
            triton.HARDWARE_CAST = hardware
            stats = triton.quantize(xs[i % COPIES], QuantizeJob(tile, E4M3, True, 0.0, **how))[2]
            if merge and stats is not None:
                slab.accumulate(0, stats, 0)

        return case

    def both(stats: bool) -> Case:
        return lambda i: triton.quantize_both(
            xs[i % COPIES], QuantizeJob((1, 128), E4M3, True, 0.0, stats=stats, heavy=False), transposed=True
        )

    def two(i: int) -> None:
        triton.HARDWARE_CAST = False
        for tile in ((1, 128), (128, 1)):
            triton.quantize(xs[i % COPIES], QuantizeJob(tile, E4M3, True, 0.0, stats=False))

    none, light, heavy = {"stats": False}, {"heavy": False}, {"heavy": True}
    got = clock.interleaved(
        {
            "device copy with the traffic of quantising, 3 B an element (roof)": roof,
            "quantise 1×128": run((1, 128), **none),
            "quantise 1×128, cast instruction": run((1, 128), hardware=True, **none),
            "quantise 1×128 + counts": run((1, 128), **light),
            "quantise 1×128 + counts, cast instruction": run((1, 128), hardware=True, **light),
            "quantise 1×128 + counts, merged into the slab": run((1, 128), merge=True, **light),
            "quantise 1×128 + all statistics": run((1, 128), **heavy),
            "quantise 128×1": run((128, 1), **none),
            "quantise 128×128": run((128, 128), **none),
            "quantise 128×128 + counts": run((128, 128), **light),
            "both directions, two kernels": two,
            "both directions from one read": both(False),
            "both directions from one read + counts": both(True),
        }
    )
    base = got[next(iter(got))]
    traffic = size * size * 3 / 1e9
    rows = [(name, f"{t * 1e3:.1f}", f"{traffic / t * 1e3:.0f}", f"{base / t:.2f}") for name, t in got.items()]
    statistics_cost = got["quantise 1×128 + counts"] / got["quantise 1×128"] - 1
    ratio = got["both directions from one read"] / got["both directions, two kernels"]
    return (
        f"## GPU: quantise one operand, {size}×{size} bfloat16, E4M3\n\n"
        + table(("", "µs", "GB/s at 3 B an element", "share of the roof"), rows)
        + f"\n\nCounts cost {statistics_cost:.1%} over quantising alone; both directions take {ratio:.2f} of two kernels.\n"
    )


def linear(clock: Clock, size: int) -> str:
    """The three GEMMs of a Linear, quantising included, against bfloat16."""
    reason = scaled_mm.probe(torch.device(clock.device))
    if reason is not None:
        return f"## GPU: FP8 Linear\n\nNot measured: {reason}.\n"
    x, w, g = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wq = Codes(*triton.quantize(w, QuantizeJob((128, 128), E4M3, True, 0.0, stats=False))[:2])
    xr = Codes(*triton.quantize(x, QuantizeJob((1, 128), E4M3, True, 0.0, stats=False))[:2])
    bf16 = torch.bfloat16

    def step(stats: bool) -> Case:
        job = QuantizeJob((1, 128), E4M3, stats=stats, heavy=False)

        def case(i: int) -> None:
            (a, sa, _), (ac, sac, _) = triton.quantize_both(x, job, transposed=True)
            q = Codes(*triton.quantize(w, QuantizeJob((128, 128), E4M3, True, 0.0, stats=stats, heavy=False))[:2])
            scaled_mm.fprop(Codes(a, sa), q, None, bf16)
            (b, sb, _), (bc, sbc, _) = triton.quantize_both(g, job, transposed=True)
            scaled_mm.dgrad(Codes(b, sb), q, bf16)
            scaled_mm.wgrad(Codes(bc, sbc), Codes(ac, sac), bf16)

        return case

    def plain(i: int) -> None:
        torch.mm(x, w.t())
        torch.mm(g, w)
        torch.mm(g.t(), x)

    got = clock.interleaved(
        {
            "bfloat16: three GEMMs": plain,
            "FP8: three GEMMs and all quantising": step(False),
            "FP8 + counts": step(True),
            "bfloat16: one GEMM": lambda i: torch.mm(x, w.t()),
            "FP8: fprop of operands that are quantised already": lambda i: scaled_mm.fprop(xr, wq, None, bf16),
        }
    )
    flop = 2 * size**3
    names = list(got)
    rows = [
        (
            name,
            f"{t * 1e3:.0f}",
            f"{flop * (3 if i < 3 else 1) / t / 1e9:.0f}",
            f"{got[names[0 if i < 3 else 3]] / t:.2f}",
        )
        for i, (name, t) in enumerate(got.items())
    ]
    return f"## GPU: FP8 Linear, {size}³\n\n" + table(("", "µs", "TFLOP/s", "speed against bfloat16"), rows) + "\n"


def attach(clock: Clock, width: int, depth: int) -> str:
    """A training step of a stack of Linears, without and with the observer."""
    import fp8watch

    device = clock.device
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.GELU())]
    base = nn.Sequential(*layers).to(device).to(torch.bfloat16)
    x = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    gemm = "emulated" if scaled_mm.probe(torch.device(device)) else "scaled_mm"
    watches = []

    def step(how: str) -> Case:
        net = copy.deepcopy(base)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        if how != "bfloat16":
            every = 1 if how == "all statistics" else 1 << 20
            watch = fp8watch.attach(net, run="bench", gemm=gemm, every=every, overhead_budget=None, backend="triton")
            watches.append(watch)
            if how == "no observer":
                watch.pause()

        def case(i: int) -> None:
            net(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return case

    names = ("bfloat16", "no observer", "counts", "all statistics")
    got = clock.interleaved({name: step(name) for name in names})
    for watch in watches:
        watch.detach()
    rows = [(n, f"{t:.2f}", f"{t / got['bfloat16']:.2f}", f"{t / got['no observer']:.3f}") for n, t in got.items()]
    head = f"## GPU: a training step, {depth} Linears of {width}², {width} tokens (FP8 GEMMs: {gemm})\n\n"
    return head + table(("", "ms", "against bfloat16", "against no observer"), rows) + "\n"


def main() -> None:
    """Measure, and write the part of docs/benchmarks.md that is the GPU's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--print", action="store_true", help="do not write docs/benchmarks.md")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench-gpu: torch sees no CUDA device")
    clock = Clock(args.device, args.repetitions, args.calls)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "Triton's interpreter: figures mean nothing"
    with tempfile.TemporaryDirectory() as spool, _environ(FP8WATCH_SPOOL_DIR=spool):
        parts = [quantise(clock, args.size)]
        if args.device == "cuda":
            parts.append(quantise(clock, args.size * 4))
        parts += [linear(clock, args.size), attach(clock, args.size, 8 if args.device == "cuda" else 2)]
    text = (
        "\n".join(parts)
        + f"\n{name}; {machine('torch', 'triton')} {args.repetitions} repetitions of {args.calls} calls.\n"
    )
    if args.print or args.device == "cpu":
        print(text)
    else:
        write("gpu", text)


class _environ:
    """Environment variables for a while."""

    def __init__(self, **values: str) -> None:
        import os

        self.environ, self.values = os.environ, values

    def __enter__(self) -> None:
        self.environ.update(self.values)

    def __exit__(self, *args: object) -> None:
        for name in self.values:
            self.environ.pop(name, None)


if __name__ == "__main__":
    main()
