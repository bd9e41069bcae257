"""What trainings gave, as a table, and their spools in one archive."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

TABLE_CHARS = 9_800
TAR_BYTES = 9_500_000


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.2g}"
        if isinstance(value, float) and abs(value) < 1
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    if "spool" not in line:
        return f"{line['name']}@{line['mode']}: {line['verdict']}"
    equal = {True: "=", False: "≠", None: "-"}
    same = "".join(equal[line.get(k)] for k in ("losses_equal", "weights_equal", "base_deterministic"))
    base = next((m for m in line.get("base_ms", []) if m is not None), None)
    share = line["facts"].get("gemm_flops_observed")
    return (
        f"{line['name']}@{line['mode']} {line['verdict']} {same} d{_number(line.get('furthest_loss'))} "
        f"s{line['num_steps']} f{_number(share)} w{line['waits_ours']}/{line['waits']}/{line.get('base_waits', '-')} "
        f"t{_number(line['ms'])}/{_number(base)} m{line['peak_mib']}/{line.get('base_peak_mib', '-')} r{line['spool'].get('records', 0)}"
    )


HEAD = (
    "name@mode verdict [losses = weights = base deterministic] d: largest relative difference of a loss, s: steps seen, f: share of "
    "FLOPs observed,\n  w: waits ours/watched/base, t: ms watched/base, m: peak MiB watched/base, r: records"
)


def table(lines: list[dict[str, Any]]) -> str:
    """What does not stand as it should comes first, with its reason; then the rest, as far as there is room."""
    bad = [line for line in lines if line["verdict"] not in ("ok", "needs a GPU", "not installed", "NOT RUN")]
    waiting = [f"{line['name']}@{line['mode']}" for line in lines if line["verdict"] == "NOT RUN"]
    good = [line for line in lines if line["verdict"] == "ok"]
    parts = [f"{len(good)} ok, {len(bad)} not, {len(lines)} in all", HEAD]
    if waiting:
        parts.append(f"no time was left for {len(waiting)}: {' '.join(waiting)}"[:900])
    room = TABLE_CHARS - 2500 if len(good) > 20 else TABLE_CHARS
    for line in sorted(bad, key=lambda line: line["verdict"]):
        parts.append("! " + row(line))
        last = (line.get("error") or "").strip().splitlines()[-1:]
        why = [*last, *(f"{n}× {p}" for p, n in list(line.get("waits_places", {}).items())[:2])]
        why += [f"errors {line['internal_errors']}"] if line.get("internal_errors") else []
        parts += [f"    {text[:160]}" for text in why]
    out = "\n".join(parts)[:room]
    for line in lines:
        if times := line.get("notes", {}).get("times"):
            out += f"\n{line['name']}: {json.dumps({k: v for k, v in times.items() if '/' in k})}"
    for line in good:
        if len(out) + len(row(line)) + 1 > TABLE_CHARS:
            return out + "\n… (the rest is in results.jsonl)"
        out += "\n" + row(line)
    return out


def pack(out: Path) -> int:
    """All spools in one archive, those of faults first, as far as they fit; returns how many were left out."""
    folders = sorted(
        (p for p in (out / "spools").iterdir() if p.is_dir()), key=lambda p: (not p.name.startswith("faults@"), p.name)
    )
    room, left_out = TAR_BYTES, 0
    with tarfile.open(out / "spools.tar.gz", "w:gz", compresslevel=1) as tar:  # what is in them is compressed
        for folder in folders:
            size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            if size > room:
                left_out += 1
                continue
            room -= size
            tar.add(folder, arcname=folder.name)
    shutil.rmtree(out / "spools")
    shutil.rmtree(out / "parts")
    return left_out
