"""Long healthy trainings, real ones, with everything that a healthy run may do: `python -m benchmarks.detection.long_runs FOLDER`. Needs torch.

Each run is 2,000 steps (those named after their length 5,000) of a small causal language model in FP8 on the CPU: LR
warm-up, after 35 % a re-warm-up from a tenth, after 55 % twice the batch, half as long, after 75 % another domain, and a
decay to the end. What the agent was handed goes into one file a run (some MiB: not part of the tree); `long_score.py
FOLDER` replays them. Seeds below 100 are for choosing thresholds, seeds from 100 on are only for the score.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from benchmarks.detection.long_score import HELD_OUT
from benchmarks.operating_point import refuse_other_settings
from torch import Tensor

import fp8watch
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch_agent.record import ROW, Site
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.wire import Header, encode_batch

STEPS, PER_BATCH = 2000, 8
REWARM, RESIZED, SWITCHED = 0.35, 0.55, 0.75
"""Shares of the run."""

KINDS: dict[str, dict[str, Any]] = {
    "blockwise": {},
    "fp32-scales": {"environ": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}},
    "two-layers": {"num_layers": 2},
    "current": {"recipe": "current"},
    "delayed": {"recipe": "delayed"},
    "mxfp8": {"recipe": "mxfp8"},
    "accumulate": {"accumulate": 2},
    "high-lr": {"lr": 4e-3},
    "blockwise-5000": {"steps": 5000},
    "delayed-5000": {"recipe": "delayed", "steps": 5000},
}


def learning_rate(step: int, peak: float, steps: int = STEPS) -> float:
    """Warm-up of 40 steps, re-warm-up of 80, cosine to a tenth."""
    again = round(REWARM * steps)
    warm = min(1.0, (step + 1) / 40) if step < again else min(1.0, 0.1 + (step - again) / 80)
    return peak * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def data(text: Tensor, seed: int, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 4 × 64, then 8 × 32, then 2 × 64 of another domain: other files, in upper case."""
    half = len(text) // 2
    first, short = batches(text[:half], 4, 64, seed), batches(text[:half], 8, 32, seed)
    other = text[half:].clone()
    lower = (other >= 97) & (other <= 122)
    other[lower] -= 32
    last = batches(other, 2, 64, seed)
    for step in range(10**9):
        yield next(first if step < RESIZED * steps else short if step < SWITCHED * steps else last)


def train(kind: str, seed: int, out: BinaryIO) -> float:
    """One run into `out`: length-prefixed msgpack, the sites first, then wire bodies. Returns seconds."""
    given = dict(KINDS[kind])
    environ = given.pop("environ", {})
    accumulate, peak = given.pop("accumulate", 1), given.pop("lr", 2e-3)
    recipe, num_layers, steps = given.pop("recipe", "blockwise"), given.pop("num_layers", 1), given.pop("steps", STEPS)
    held: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    sites: dict[int, Site] = {}

    def record_step(
        _self: Any, step: Any, site_ids: Any, got: Any, logs: Any = None, batch_id: Any = None, **_: Any
    ) -> None:
        held.append((np.array(step).reshape(1).copy(), np.array(site_ids), got.copy()))

    kept = Recorder.record_step, Recorder.register_sites
    Recorder.record_step = record_step  # type: ignore[method-assign]
    Recorder.register_sites = lambda _self, fresh: sites.update({s.id: s for s in fresh})  # type: ignore[method-assign]
    os.environ.update(environ)
    packer, seq = msgspec.msgpack.Encoder(), 0
    try:
        torch.manual_seed(seed)
        model = ByteModel(dim=128, num_layers=num_layers, num_heads=2, hidden=320)
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
        stream = data(load_text(), seed, steps)
        watch = fp8watch.attach(model, recipe=recipe, overhead_budget=None, optimizer=optimizer)
        began, written = time.time(), 0
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, peak, steps)
            optimizer.zero_grad()
            for _ in range(accumulate):
                (model(*next(stream)) / accumulate).backward()
            watch.log(grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            if len(held) >= PER_BATCH + 1:  # the step that is open may still change
                if len(sites) != written:
                    _frame(out, packer.encode(list(sites.values())))
                    written = len(sites)
                _frame(out, _body(held[:PER_BATCH], f"{kind}{seed}".replace("-", ""), seq))
                del held[:PER_BATCH]
                seq += 1
        watch.detach()
        return time.time() - began
    finally:
        Recorder.record_step, Recorder.register_sites = kept  # type: ignore[method-assign]
        for name in environ:
            del os.environ[name]


def _frame(out: BinaryIO, body: bytes) -> None:
    out.write(len(body).to_bytes(4, "little") + body)


def _body(steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]], session: str, seq: int) -> bytes:
    head = np.concatenate([s for s, _, _ in steps])
    ids = np.concatenate([i for _, i, _ in steps])
    number = np.concatenate([np.full(len(i), int(s["step"][0])) for s, i, _ in steps])
    rows = np.concatenate([r for _, _, r in steps]).astype(ROW, copy=False)
    header = Header(
        run="run",
        session=session,
        rank=0,
        seq=seq,
        step0=int(head["step"][0]),
        num_steps=len(head),
        num_records=len(ids),
    )
    return encode_batch(header, head, number, ids, rows, level=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, HELD_OUT, HELD_OUT + 1])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    refuse_other_settings()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as spool:
        os.environ["FP8WATCH_SPOOL_DIR"] = spool
        for seed in args.seeds:
            for kind in args.kinds:
                path = args.folder / f"{kind}-{seed}.run"
                part = path.with_suffix(".part")
                with part.open("wb") as out:
                    seconds = train(kind, seed, out)
                part.rename(path)
                sys.stderr.write(f"{path.name}: {seconds:.0f} s, {path.stat().st_size / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
