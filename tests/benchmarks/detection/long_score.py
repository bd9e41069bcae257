"""Replays the long healthy trainings of `long_runs.py`, and keeps what was said of them beside the code. No torch.

    PYTHONPATH=tests python -m benchmarks.detection.long_score FOLDER

`long_runs.json` is what docs/detection.md shows, and its part is written again; the runs themselves are too large for the tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.detection.public_rules import RULES, episodes
from benchmarks.operating_point import refuse_other_settings
from detect.folded import fold

from fp8watch_agent.record import Site
from fp8watch_agent.wire import Batch, decode_batch
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import facts_of

RESULTS = Path(__file__).with_name("long_runs.json")
HELD_OUT = 100
"""First seed that no threshold was chosen on."""


def read(path: Path) -> tuple[list[Site], Iterator[Batch]]:
    """Sites and batches of one run."""
    data, at, frames = path.read_bytes(), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return msgspec.msgpack.decode(frames[0], type=list[Site]), (decode_batch(body) for body in frames[1:])


def score(path: Path) -> dict[str, Any]:
    """What the engine and the public rules say of one run."""
    sites, batches = read(path)
    facts = facts_of(sites)
    engine, findings, losses, norms, amax = DetectionEngine(facts), [], [], [], []
    column = {s.id: k for k, s in enumerate(sites)}
    for batch in batches:
        findings += engine.observe(batch)
        losses.append(batch.steps["loss"])
        norms.append(batch.steps["grad_norm"])
        grid = np.full((len(batch.steps), len(sites)), np.nan)
        places = np.array([column[int(i)] for i in batch.site])
        grid[np.searchsorted(batch.steps["step"], batch.step), places] = batch.column("amax_max")
        amax.append(grid)
    loss, norm = np.concatenate(losses), np.concatenate(norms)
    kind, _, seed = path.stem.rpartition("-")
    said = [
        {"severity": i.severity, "mode": i.mode, "step": i.first.step, "last_step": i.last_step}
        for i in fold(findings, facts)
    ]
    rules = {name: len(episodes(rule(loss, norm, np.concatenate(amax)))) for name, rule in RULES.items()}
    return {"kind": kind, "seed": int(seed), "num_steps": len(loss), "said": said, "rules": rules}


def main() -> None:
    refuse_other_settings()
    runs = [score(path) for path in sorted(Path(sys.argv[1]).glob("*.run"))]
    runs.sort(key=lambda r: (r["seed"], r["kind"]))
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(r) for r in runs) + "\n]\n")
    from benchmarks.detection.page import write

    write()
    for r in runs:
        sys.stdout.write(f"{r['kind']}-{r['seed']}: {r['num_steps']} steps, {r['said'] or 'nothing'}\n")


if __name__ == "__main__":
    main()
