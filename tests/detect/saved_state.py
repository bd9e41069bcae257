"""A state as an earlier version has saved it: `state_v3.bin`, of an engine in the middle of everything.

`python -m detect.saved_state FILE` writes one; the file in the tree was written before each mode had a folder.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from detect.trace import Trace, healthy

from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.sessions import SessionFacts

FILE = Path(__file__).parent / "state_v3.bin"
PER_BATCH, SAVED_AFTER = 8, 9
"""Batches of eight steps; the state is that after nine of them, the loss jumps in the last step but one."""


def run() -> Trace:
    """Delayed scales, attention logits, a weight that was Inf for a step, a loss that jumps, and more to come."""
    trace = healthy(3, 128, 1, recipe="delayed", hybrid=True)
    at = np.arange(trace.num_steps)
    trace.logs["max_attention_logit"] = 10.0 * np.exp2(np.where(at > 90, (at - 90) * 0.2, 0.0))
    trace.columns["num_inf"][20, trace.one("mlp.down_proj", "weight")] = 3
    trace.steps["loss"][70:73] += 3.0
    trace.steps["grad_norm"][70:73] *= 20
    for name in ("scale_ratio_max", "scale_ratio_min"):
        trace.columns[name][100:108, trace.one("mlp.down_proj", "input")] = 7.0
    return trace


def engine_of(trace: Trace) -> DetectionEngine:
    """What has seen the part of the run before the state was saved, and heard of another eps right after it."""
    engine = DetectionEngine(trace.facts)
    engine.add_sessions([SessionFacts(session=trace.session, rank=0, mesh={"dp": 0})])
    for batch in list(trace.batches(PER_BATCH))[:SAVED_AFTER]:
        engine.observe(batch)
    first, facts = next(iter(trace.facts.items()))
    engine.add_sites({first: replace(facts, eps=1e-10)})
    return engine


def names_in(raw: bytes) -> set[str]:
    """Classes that a state was saved with."""

    def walk(value: object) -> set[str]:
        if isinstance(value, dict):
            own = {str(value["c"])} if value.get("!") == "object" else set()
            return own.union(*(walk(v) for v in value.values()))
        return set().union(*(walk(v) for v in value)) if isinstance(value, list) else set()

    return walk(msgspec.msgpack.decode(zstandard.decompress(raw)))


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(engine_of(run()).dump())
