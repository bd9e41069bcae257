"""`fp8watch check-checkpoint PATH`: whether a checkpoint can be trusted, tensor by tensor.

Shapes:     a path -> CheckpointReport
Thread:     the caller's
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fp8watch.diagnose import checkpoint_checks as checks
from fp8watch.diagnose.checkpoint_checks import FAIL, FP8, SCALE_SUFFIXES, WARN, CheckpointFinding, Values
from fp8watch.diagnose.checkpoint_files import Checkpoint, Unreadable, first_line, open_checkpoint
from fp8watch.session.fingerprint import hash_text
from fp8watch_agent.terminal.text import plain

FIRST_MOMENT, SECOND_MOMENT = "exp_avg", "exp_avg_sq"
MOMENTS = frozenset({FIRST_MOMENT, SECOND_MOMENT, "max_exp_avg_sq", "momentum_buffer"})
FAR_FROM_PEERS = 6.0
"""Octaves of RMS from the median of the same weight in other layers."""
MIN_PEERS = 4
FAR_FROM_BEFORE = 2.0
"""Octaves of RMS from the same weight of another checkpoint of the run."""


@dataclass(frozen=True)
class CheckpointReport:
    """What was found. `print(report)` says it as a table."""

    path: str
    formats: list[str]
    num_tensors: int
    num_fp8: int
    num_moments: int
    num_verified: int
    """Weights whose bits are those of the fingerprint that a watch saved with them."""
    findings: list[CheckpointFinding]

    @property
    def clean(self) -> bool:
        """Nothing failed."""
        return not any(f.status == FAIL for f in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "clean": self.clean}

    def __str__(self) -> str:
        looked = [f"{self.num_tensors} tensors", f"{self.num_fp8} in FP8", f"{self.num_moments} pairs of moments"]
        if self.num_verified:
            looked.append(f"{self.num_verified} weights hold the bits that were saved")
        lines = [f"{self.path} ({', '.join(self.formats)}): {', '.join(looked)}"]
        if self.findings:
            rows = [("", "tensor", "check"), *((f.status, plain(f.tensor), f.check) for f in self.findings)]
            said = ["", *(plain(f.said) for f in self.findings)]
            widths = [max(len(row[i]) for row in rows) for i in range(3)]
            lines.append("")
            for row, text in zip(rows, said, strict=True):
                cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                lines.append("  ".join([*cells, text]).rstrip())
            lines.append("")
        num = Counter(f.status for f in self.findings)
        counts = f"{num[FAIL]} FAIL, {num[WARN]} WARN"
        lines.append(f"{'nothing fails' if self.clean else 'do not resume from it'}: {counts}")
        return "\n".join(lines)


def check_checkpoint(path: str | Path, *, against: str | Path | None = None) -> CheckpointReport:
    """Look at every tensor of a checkpoint.

    Checked are non-finite values; scales of FP8 codes (there, positive, in shape, those of these codes); weights whose
    one element holds most of their energy, or whose RMS is far from the same weight of other layers or of `against`;
    Adam's moments (v = 0 where m ≠ 0, v < 0, dtypes); and the bits of weights, where a watch saved its fingerprint.

    Args:
        path: a file of safetensors or torch.save, a folder of them, or a folder of torch.distributed.checkpoint.
        against: an earlier checkpoint of the same run.

    Raises:
        fp8watch.diagnose.checkpoint_files.Unreadable: no checkpoint, or one that cannot be read.
    """
    found = open_checkpoint(path)
    before = _rms_of(open_checkpoint(against)) if against is not None else {}
    findings = [CheckpointFinding(FAIL, name, "there", "the index lists it, no file has it") for name in found.missing]
    num = Counter[str]()
    rms: dict[str, float] = {}
    findings += _check(found, num, rms)
    findings += _peers(rms)
    findings += _moved(rms, before)
    findings.sort(key=lambda f: f.status != FAIL)
    return CheckpointReport(
        str(path), found.kinds, num["tensors"], num["fp8"], num["moments"], num["verified"], findings
    )


def _check(source: Checkpoint, num: Counter[str], rms: dict[str, float]) -> Iterator[CheckpointFinding]:
    names = source.forms
    first = {_pair(name, FIRST_MOMENT) for name in names if _part(name, FIRST_MOMENT)}
    second = {_pair(name, SECOND_MOMENT): name for name in names if _part(name, SECOND_MOMENT)}
    paired = {name for pair, name in second.items() if pair in first}
    alone = set(second.values()) - paired
    scales = {at: name for name, (dtype, _) in names.items() if dtype in FP8 and (at := checks.scale_name(name, names))}
    for name, (dtype, shape) in names.items():
        num["tensors"] += 1
        if not dtype.is_floating_point or math.prod(shape) == 0:
            continue
        if name in scales or name in paired:
            continue  # read with its partner
        pair = _pair(name, FIRST_MOMENT) if _part(name, FIRST_MOMENT) else None
        partner = second.get(pair) if pair is not None else checks.scale_name(name, names) if dtype in FP8 else None
        try:
            read = source.read([name] if partner is None else [name, partner])
        except Exception as e:  # noqa: BLE001  one damaged tensor is a finding, the others are still looked at
            yield CheckpointFinding(FAIL, name, "readable", first_line(e))
            continue
        x = read[name]
        for at, tensor in read.items():
            seen = checks.values_of(tensor)
            yield from checks.nonfinite(at, seen, tensor.shape)
            if at == name and not _is_moment(name):
                yield from _of_weight(source, name, x, seen, num, rms)
        if dtype in FP8:
            num["fp8"] += 1
            if partner is None:
                yield CheckpointFinding(FAIL, name, "scale present", f"FP8 codes without {name}{SCALE_SUFFIXES[0]}")
            else:
                yield from checks.scales(name, x, read[partner], partner)
        elif partner is not None:
            num["moments"] += 1
            yield from checks.moments(name, x, read[partner])
        elif name in alone:
            yield from checks.second_moment(name, x)
            if first:
                yield CheckpointFinding(
                    WARN, name, "moments", "no exp_avg beside it, which others have: lost, or of another optimizer"
                )
    yield from _dtypes(names)


def _of_weight(
    source: Checkpoint, name: str, x: Tensor, seen: Values, num: Counter[str], rms: dict[str, float]
) -> Iterator[CheckpointFinding]:
    if x.dtype in FP8:
        return  # what its codes stand for is the scales' to say
    yield from checks.distribution(name, seen, x.shape)
    if x.dim() >= 2 and seen.rms > 0 and not (seen.num_nan or seen.num_inf):
        rms[name] = seen.rms
    for contents in source.contents:
        weights = contents.get("weights")
        key = _saved_as(name, weights) if isinstance(weights, Mapping) else None
        if key is None or not isinstance(weights, Mapping):
            continue
        now, was = hash_text(x), str(weights[key])
        if now.split(" ")[1:] != was.split(" ")[1:]:
            continue  # saved in another dtype, or a part of it
        num["verified"] += now == was
        if now != was:
            yield CheckpointFinding(FAIL, name, "bits", "not those that the watch saw when the checkpoint was made")


def _saved_as(name: str, weights: Mapping[str, Any]) -> str | None:
    parts = name.split(".")
    return next((key for i in range(len(parts)) if (key := ".".join(parts[i:])) in weights), None)


def _part(name: str, moment: str) -> bool:
    return moment in name.split(".")


def _pair(name: str, moment: str) -> str:
    return ".".join("" if part == moment else part for part in name.split("."))


def _is_moment(name: str) -> bool:
    return not MOMENTS.isdisjoint(name.split("."))


def _dtypes(names: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[CheckpointFinding]:
    """Moments of one kind in several dtypes."""
    for moment in (FIRST_MOMENT, SECOND_MOMENT):
        kinds = {name: dtype for name, (dtype, _) in names.items() if _part(name, moment)}
        usual = Counter(kinds.values()).most_common(1)
        odd = [name for name, dtype in kinds.items() if dtype != usual[0][0]]
        if odd:
            plain = {str(kinds[name]).removeprefix("torch.") for name in odd}
            most = str(usual[0][0]).removeprefix("torch.")
            yield CheckpointFinding(
                WARN, odd[0], "moment dtype", f"{', '.join(sorted(plain))} in {len(odd)}, {most} in the others"
            )


def _peers(rms: Mapping[str, float]) -> Iterator[CheckpointFinding]:
    """Weights whose RMS is far from that of the same weight in other layers."""
    groups: dict[str, list[str]] = {}
    for name in rms:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    for names in groups.values():
        if len(names) <= MIN_PEERS:
            continue
        middle = median(math.log2(rms[name]) for name in names)
        for name in names:
            off = math.log2(rms[name]) - middle
            if abs(off) > FAR_FROM_PEERS:
                yield CheckpointFinding(
                    FAIL, name, "distribution", f"RMS {rms[name]:.3g}, {off:+.1f} octaves from the other layers"
                )


def _moved(rms: Mapping[str, float], before: Mapping[str, float]) -> Iterator[CheckpointFinding]:
    for name in rms:
        if name in before and abs(off := math.log2(rms[name] / before[name])) > FAR_FROM_BEFORE:
            said = f"RMS {before[name]:.3g} → {rms[name]:.3g}, {off:.1f} octaves from the checkpoint before"
            yield CheckpointFinding(FAIL, name, "distribution", said)


def _rms_of(found: Checkpoint) -> dict[str, float]:
    rms: dict[str, float] = {}
    for name, (dtype, shape) in found.forms.items():
        if dtype.is_floating_point and dtype not in FP8 and len(shape) >= 2 and not _is_moment(name):
            seen = checks.values_of(found.read([name])[name])
            if seen.rms > 0:
                rms[name] = seen.rms
    return rms


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="fp8watch check-checkpoint",
        description="Look at every tensor of a checkpoint before training resumes from it. "
        "Exit status: 0, 1 where something fails, 2 where it cannot be read.",
    )
    made.add_argument("path", metavar="PATH", help="a file or folder: safetensors, torch.save, or DCP")
    made.add_argument(
        "--against", metavar="PATH", help="an earlier checkpoint of the run, to compare distributions with"
    )
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where something fails, 2 where it cannot be read."""
    args = parser().parse_args(None if argv is None else list(argv))
    try:
        report = check_checkpoint(args.path, against=args.against)
    except Unreadable as e:
        sys.stderr.write(f"fp8watch check-checkpoint: {plain(e)}\n")
        return 2
    sys.stdout.write((json.dumps(report.as_json(), indent=2) if args.json else str(report)) + "\n")
    return 0 if report.clean else 1
