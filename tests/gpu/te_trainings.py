"""Transformer Engine itself, its kernels included, under fp8watch: trainings, statistics, bytes, checks and step times.

    python tests/gpu/te_trainings.py --out FOLDER [--jobs 8] [--only PATTERN] [--stand-in]

Each case has a process and a minute of its own. FOLDER/te.jsonl gets one line a case, FOLDER/te_failures.txt what was
raised. With --stand-in the Python packages run on a CPU over the stand-in of tests/te/real, as a rehearsal.

What `ok` means: a training has the same losses and weights, bit by bit, with a watch and without, nothing failed inside,
fp8watch never waited for the device, and each site left records. Statistics are those that a reference in float64 takes
from the operands and the codes of the GEMMs, and the codes are those that the products are made of. Bytes and scales of our
quantisers are those of Transformer Engine's. MXFP8 and NVFP4 need Blackwell: elsewhere their cases say why they are left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = [str(ROOT / part) for part in ("", "agent", "server", "tests", "tests/gpu", "tests/te/real")]
LIMIT_S = 60
RECIPES, BLACKWELL = ("block", "delayed", "current"), ("mxfp8", "nvfp4")
LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer")
VARIANTS = ("microbatches", "fp8_weights", "checkpoint", "graphed", "te_debug", "not_sampled")
CHECKS = (
    "observed", "recipes", "turns", "without_sites", "te_debug", "debug", "example", "nvfp4", "public_faults", "fix",
)  # fmt: skip
TIMED = (
    ("LayerNormMLP", "block"), ("TransformerLayer", "block"), ("TransformerLayer", "delayed"),
    ("TransformerLayer", "current"), ("GroupedLinear", "block"),
)  # fmt: skip


def cases() -> list[str]:
    """Names, in the order in which they begin; those that measure times come last, alone."""
    names = [f"train/{layer}/{recipe}" for layer in LAYERS for recipe in RECIPES]
    names += [f"train/LayerNormMLP/{recipe}/{variant}" for variant in VARIANTS for recipe in ("block", "delayed")]
    names += [f"stats/{layer}/{recipe}" for layer in LAYERS[:4] for recipe in RECIPES]
    names += ["bytes/block", "bytes/current", "bytes/delayed", "bytes/mxfp8", "bytes/nvfp4"]
    names += [f"blackwell/{recipe}" for recipe in BLACKWELL]
    names += [f"checks/{name}" for name in CHECKS]
    return names + [f"time/{layer}/{recipe}" for layer, recipe in TIMED]


def start(name: str, parts: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a process of its own and read its line."""
    out, log = parts / f"{name.replace('/', '_')}.json", parts / f"{name.replace('/', '_')}.log"
    command = [sys.executable, str(HERE / "te_case.py"), name, str(out), *(["--stand-in"] if args.stand_in else [])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*PATHS, os.environ.get("PYTHONPATH")]))}
    began = time.monotonic()
    with log.open("w") as said:
        try:
            done = subprocess.run(command, stdout=said, stderr=said, timeout=args.limit, check=False, env=environ)
            code: Any = done.returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {args.limit} s"
    if out.is_file():
        line: dict[str, Any] = json.loads(out.read_text())
    else:
        line = {"case": name, "verdict": "DIED", "told": f"exit {code}", "seconds": round(time.monotonic() - began, 1)}
    if line["verdict"] in ("RAISED", "DIED"):
        line["log"] = log.read_text(errors="replace")[-4000:]
    told = str(line.get("told", ""))[:230]
    print(f"{line['verdict']:<18} {line.get('seconds', 0):>5} s  {name:<38} {told}", flush=True)
    return line


def main() -> int:
    """All cases, several at once, and those that measure times alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--only", default="*", help="shell patterns of cases, with commas between them")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a case")
    parser.add_argument("--stand-in", action="store_true")
    args = parser.parse_args()
    chosen = [name for name in cases() if any(fnmatch.fnmatch(name, pattern) for pattern in args.only.split(","))]
    alone = [name for name in chosen if name.startswith("time/")]
    args.out.mkdir(parents=True, exist_ok=True)
    lines = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        together = [pool.submit(start, name, Path(folder), args) for name in chosen if name not in alone]
        with (args.out / "te.jsonl").open("w") as kept, (args.out / "te_failures.txt").open("w") as failures:

            def keep(line: dict[str, Any]) -> None:
                lines.append(line)
                kept.write(json.dumps(line) + "\n")
                kept.flush()
                told = [line.get(k, "") for k in ("error", "log", "broken")] + [*line.get("failed_tests", {}).values()]
                if text := "\n".join(t for t in told if t):
                    failures.write(f"==== {line['case']}: {line['verdict']}\n{text}\n")
                    failures.flush()

            for done in concurrent.futures.as_completed(together):
                keep(done.result())
            for name in alone:
                keep(start(name, Path(folder), args))
    bad = sorted(line["case"] for line in lines if line["verdict"] not in ("ok", "left out", "rounding"))
    print(f"== {len(lines) - len(bad)} of {len(lines)} cases are ok or left out; not: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
