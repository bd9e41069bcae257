"""`fp8watch check-gemm`: a table of the quantisers and FP8 GEMMs of this machine, to attach to a bug report."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

import torch

from fp8watch.diagnose.gemm_conformance import PATHS, SHAPES, Result, Shape, conformance, error_by_length, named_recipes
from fp8watch_agent.version import __version__

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="fp8watch check-gemm",
        description="Run every quantiser and every FP8 GEMM that this machine has on made-up operands, hold them against "
        "what they must give, and print PASS, FAIL or NOT AVAILABLE. Exit status: 0, or 1 where something fails.",
    )
    made.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="M,K,N",
        help="tokens, features in, features out of a Linear; may be given again (default: "
        + " and ".join(",".join(map(str, s)) for s in SHAPES)
        + ")",
    )
    made.add_argument(
        "--recipe", action="append", choices=sorted(named_recipes()), help="only this recipe; may be given again"
    )
    made.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of operands and results")
    made.add_argument("--device", default=None, help="default: cuda where there is one, else cpu")
    made.add_argument("--failures", action="store_true", help="print only what does not pass")
    return made


def _shape(text: str) -> Shape:
    try:
        m, k, n = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be three numbers, such as 4096,4096,1024") from None
    if min(m, k, n) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be 1 or more each")
    return Shape(m, k, n)


def machine(device: torch.device) -> str:
    """Versions and device in one line."""
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"fp8watch {__version__}, torch {torch.__version__}{cuda}, Python {platform.python_version()}, {device.type} ({on})"


def table(results: Sequence[Result]) -> str:
    """The results in columns."""
    rows = [("what", "where", "M×K×N", "", ""), *((r.what, r.where, r.shape, r.status, r.said) for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where something fails."""
    made = parser()
    args = made.parse_args(None if argv is None else list(argv))
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        made.error(f"--device {name}: {str(error).splitlines()[0]}")
    results = list(conformance(args.shape or SHAPES, device, DTYPES[args.dtype], args.recipe))
    shown = [r for r in results if r.status != "PASS"] if args.failures else results
    lines = [machine(device), "", table(shown), "", "error of fprop by contraction, float32 results:"]
    for path in PATHS:
        found = error_by_length(path, device)
        text = ", ".join(f"K={k}: {error:.1e}" for k, error in found.items())
        lines.append(f"  {path:<10}{text or 'NOT AVAILABLE'}")
    count = {status: sum(r.status == status for r in results) for status in ("PASS", "FAIL", "NOT AVAILABLE")}
    lines += ["", ", ".join(f"{num} {status}" for status, num in count.items())]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if count["FAIL"] else 0
