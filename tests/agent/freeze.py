"""Writes the request bytes of this release beside the tests: `python -m agent.freeze` in tests/, once a wire version.

What is written is never written again: these bytes are what agents out there send.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.agents import make_ids, make_maps, make_rows, make_step

from fp8watch_agent import wire
from fp8watch_agent.record import FIELDS, HISTOGRAMS, Measured
from fp8watch_agent.wire_maps import MAPS_VERSION

FROZEN = Path(__file__).parent / "frozen"


def sample() -> tuple[wire.Header, tuple[np.ndarray, ...]]:
    """Three steps of four sites: all values there are, then what was not measured, then nothing but defaults."""
    rows = np.concatenate([make_rows(4, s) for s in range(3)])
    rows["measured"] = int(Measured.COUNTS | Measured.AMAX)
    for f in FIELDS:
        if not f.group & (Measured.COUNTS | Measured.AMAX):
            rows[f.name][4:8] = f.default
        if f.name != "measured":
            rows[f.name][8:] = f.default
    steps = np.array([make_step(s, loss=float("nan"), lr=0.5) for s in (7, 8, 11)])
    header = wire.Header(
        run="run-1",
        session="abc",
        rank=3,
        seq=5,
        step0=7,
        num_steps=3,
        num_records=12,
        clock=1e9,
        health={"produced": 12.0},
        logs={"aux": [None, 1.0, float("inf")]},
        batch_ids=["a", None, "c"],
    )
    return header, (steps, np.repeat(steps["step"], 4), np.tile(make_ids(4), 3), rows)


def described(body: bytes) -> dict[str, object]:
    """What a batch says, in words that outlive the layout of a row."""
    batch = wire.decode_batch(body)
    columns = {}
    for f in FIELDS:
        values = batch.column(f.name)
        whole = np.rint(values).astype(np.int64) if f.name in HISTOGRAMS else values
        columns[f.name] = whole.tobytes().hex()
    keys = {"step": batch.step.tolist(), "site": batch.site.tolist(), "steps": batch.steps["step"].tolist()}
    return {"keys": keys, "columns": columns, "seq": batch.header.seq, "logs": repr(batch.header.logs)}


def main() -> None:
    """Writes the versions of today. What is there already must be what it would write."""
    header, arrays = sample()
    body = wire.encode_batch(header, *arrays)
    maps = wire.encode_tile_maps("run-1", "abc", 3, 6, make_maps(2))
    written = {
        f"batch-{wire.WIRE_VERSION}": body,
        f"batch-{wire.WIRE_VERSION}.json": json.dumps(described(body), indent=0).encode(),
        f"maps-{MAPS_VERSION}": maps,
    }
    for name, raw in written.items():
        path = FROZEN / name
        if path.exists() and path.read_bytes() != raw:
            raise SystemExit(f"{path} is frozen and differs: give what is new a version of its own")
        path.write_bytes(raw)


if __name__ == "__main__":
    main()
