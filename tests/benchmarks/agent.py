"""What the agent puts on the wire, and what encoding costs: real records of the demo's model."""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
import torch
from benchmarks import table
from benchmarks.linear import attached

from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch_agent import wire
from fp8watch_agent.record import ROW, STEP


def records(num_steps: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Ids and rows of a few real training steps, caught where they are handed to the agent; with the hand-over's time."""
    model, data = ByteModel(), batches(load_text(), 4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    watch = attached(model, observe=True, overhead_budget=None)
    recorder = watch._recorder
    assert recorder is not None
    hand_over = recorder.record_step

    def catch(header, site_ids, sites, logs, batch_id):  # type: ignore[no-untyped-def]
        ids.append(site_ids.copy())
        rows.append(sites.copy())
        hand_over(header, site_ids, sites, logs, batch_id)

    recorder.record_step = catch  # type: ignore[method-assign]
    for _ in range(num_steps):
        loss = model(*next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    recorder.record_step = hand_over  # type: ignore[method-assign]
    times = []
    header = np.zeros((), STEP)
    many_ids, many_rows = np.arange(600, dtype=np.uint64), np.resize(rows[-1], 600).astype(ROW)
    for step in range(400):
        header["step"] = num_steps + step
        start = time.perf_counter()
        hand_over(header, many_ids, many_rows, {}, None)
        times.append(time.perf_counter() - start)
    watch.detach()
    records.hand_over_us = np.percentile(times, (50, 99)) * 1e6  # type: ignore[attr-defined]
    return ids, rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = []
    with tempfile.TemporaryDirectory() as spool:
        os.environ["FP8WATCH_SPOOL_DIR"] = spool
        ids, rows = records(8)
    for num in (1, 8):
        steps = np.zeros(num, STEP)
        steps["step"] = np.arange(num)
        taken, sites = np.concatenate(rows[:num]), np.concatenate(ids[:num])
        header = wire.Header(run="r", session="s", rank=0, seq=0, step0=0, num_steps=num, num_records=len(taken))
        index = np.repeat(np.arange(num), [len(r) for r in rows[:num]])

        def encode(header=header, steps=steps, index=index, sites=sites, taken=taken) -> bytes:  # type: ignore[no-untyped-def]
            return wire.encode_batch(header, steps, index, sites, taken)

        t = table.interleaved({"": encode}, args.repetitions, time.process_time)[""]
        size = len(encode()) / len(taken)
        lines.append((f"{num} × {len(ids[0])} records", f"{t * 1e3 / len(taken) * 600:.2f}", f"{size:.0f}"))
    p50, p99 = records.hand_over_us  # type: ignore[attr-defined]
    text = f"""## The agent

{table.machine("numpy", "msgspec", "zstandard")} {args.repetitions} repetitions. Goals: encode ≤ 1 ms of CPU per 600
records, ≤ 40 bytes per record, hand-over on the training thread ≤ 50 µs p99.

{table.table(("batch, every field measured", "encode, CPU ms per 600 records", "bytes per record"), lines)}

Hand-over of 600 records to the agent, 400 times back to back: median {p50:.0f} µs, p99 {p99:.0f} µs.
"""
    table.write("agent", text)


if __name__ == "__main__":
    main()
