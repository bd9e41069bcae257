"""Where the host's time goes in a watched step on a GPU: a profile of Python, and one of the device's kernels.

    PYTHONPATH=.:agent python tests/gpu/host_time.py --out FOLDER [--width 1024] [--layers 8] [--tokens 4096]

A decoder is trained without a watch, with recipe="observe", and at attach's defaults; each prints the milliseconds of a step and
of the host's part of it, the seconds of its first step, and how many kernels were compiled. FOLDER gets MODE.host.txt (by own time, then
by all of it) and MODE.device.txt (microseconds and launches of each kernel in a step).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_models import VOCAB, Lm

LENGTH, STEPS = 1024, 32


def rate(step: Callable[[], None]) -> str:
    """Milliseconds of a step, and of what the host does of it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return f"{(time.perf_counter() - began) / STEPS * 1e3:.2f} ms ({host / STEPS * 1e3:.2f} of the host)"


def num_kernels() -> int:
    """In Triton's cache."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for _ in folder.glob("*/*.cubin"))


def profiles(step: Callable[[], None], out: Path, name: str) -> None:
    """Of the host, then of the device."""
    profile, text = cProfile.Profile(), io.StringIO()
    profile.enable()
    for _ in range(STEPS):
        step()
    profile.disable()
    torch.cuda.synchronize()
    for key in ("tottime", "cumtime"):
        pstats.Stats(profile, stream=text).sort_stats(key).print_stats(50)
    (out / f"{name}.host.txt").write_text(text.getvalue())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events: list[Any] = sorted(traced.key_averages(), key=lambda e: -e.device_time_total)
    rows = [f"{e.device_time_total / STEPS:10.1f} µs {e.count / STEPS:8.1f} × {e.key[:110]}" for e in events[:80]]
    (out / f"{name}.device.txt").write_text("\n".join(rows) + "\n")


def main() -> None:
    """Measure, and print."""
    import fp8watch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("width", 1024), ("layers", 8), ("tokens", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("FP8WATCH_SPOOL_DIR", str((args.out / "spool").resolve()))
    torch.manual_seed(0)
    model = Lm(args.width, args.layers).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, VOCAB, (-(-args.tokens // LENGTH), LENGTH), device="cuda")

    def step() -> None:
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):
        step()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; without a watch: {rate(step)}, again {rate(step)}",
        flush=True,
    )
    for name, how in (("observe", {"recipe": "observe"}), ("defaults", {})):
        known, began = num_kernels(), time.perf_counter()
        watch = fp8watch.attach(model, run=name, **how)
        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        for _ in range(100):  # all that is measured of it early is behind these
            step()
        print(
            f"{name}: first step {first:.1f} s, {num_kernels() - known} kernels; then {rate(step)}, again {rate(step)}",
            flush=True,
        )
        profiles(step, args.out, name)
        summary = watch.summary()
        watch.detach()
        print(
            f"{name}: {summary['num_steps']} steps, errors {summary['internal_errors']}, says {summary['overhead_ratio']}; detached {rate(step)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
