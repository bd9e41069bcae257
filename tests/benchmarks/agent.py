"""What the agent puts on the wire, and what encoding costs: real records of the demo's model."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks import table
from benchmarks.linear import attached
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch_agent import wire
from fp8watch_agent.record import FIELDS, ROW, STEP, Measured

RING_BYTES = 32 << 20
SAMPLED = int(Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH | Measured.HASH | Measured.GEMM | Measured.GAIN)
ROTATION = 16


@dataclass(frozen=True)
class Steps:
    """Ids and rows of real training steps; µs of handing over 600 records, and of copying their bytes as far apart."""

    ids: list[np.ndarray]
    rows: list[np.ndarray]
    hand_over_us: np.ndarray
    copy_us: np.ndarray


def copies(rows: np.ndarray, times: int) -> list[float]:
    """The same bytes, copied to the places of a ring that has been walked before: the roof of a hand-over."""
    raw = rows.view(np.uint8).reshape(-1)
    ring = np.ones(RING_BYTES, np.uint8)
    took, at = [], 0
    for _ in range(times):
        at = 0 if at + len(raw) > len(ring) else at
        start = time.perf_counter()
        ring[at : at + len(raw)] = raw
        took.append(time.perf_counter() - start)
        at += len(raw)
    return took


def records(num_layers: int, num_steps: int) -> Steps:
    """Train a few steps, and catch what is handed to the agent."""
    model, data = ByteModel(num_layers=num_layers), batches(load_text(), 4, 64)
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
    for step in range(400):  # the ring is walked several times: the pages of its first round are new
        header["step"] = num_steps + step
        start = time.perf_counter()
        hand_over(header, many_ids, many_rows, {}, None)
        times.append(time.perf_counter() - start)
    watch.detach()
    ends = (50, 99)
    return Steps(ids, rows, np.percentile(times, ends) * 1e6, np.percentile(copies(many_rows, 400), ends) * 1e6)


def lightened(rows: np.ndarray, light: np.ndarray) -> np.ndarray:
    """The same records, those of `light` [N] bool without what only sampled ones have."""
    rows = rows.copy()
    for f in FIELDS:
        if f.group & SAMPLED:
            rows[f.name][light] = f.default
    rows["measured"][light] &= ~SAMPLED
    return rows


VOLUME_STEPS, VOLUME_FROM = 256, 128


DEFAULTS: dict[str, object] = {}
FIXED: dict[str, object] = {"overhead_budget": None, "every": ROTATION}


@dataclass(frozen=True)
class Volume:
    """What one rank sends of a site and step."""

    num_sites: int
    every: int  # full statistics of a site once in so many steps
    num_records: float
    num_bytes: float
    full_alone: float
    """Bytes if full records were all, those of all sites in the same step, each such step in a body of its own (it waits for
    no more than eight steps, as all else does)."""
    full_joined: float
    """The same with eight such steps a body (it waits for eight times as many)."""


def volume(how: dict[str, object], merge_steps: int | None = None) -> Volume:
    """Of a training past its first steps."""
    if merge_steps is not None:
        os.environ["FP8WATCH_MERGE_STEPS"] = str(merge_steps)
    torch.manual_seed(0)
    model, data = ByteModel(num_layers=16, dim=64, num_heads=4, hidden=128), batches(load_text(), 4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch = attached(model, observe=True, **how)
    recorder = watch._recorder
    assert recorder is not None
    places = {site.site_id: place for place, site in enumerate(watch._table)}
    steps: list[tuple[np.ndarray, np.ndarray]] = []

    def catch(header, site_ids, sites, logs, batch_id):  # type: ignore[no-untyped-def]
        steps.append((site_ids.copy(), sites.copy()))

    def catch_more(site_ids, sites):  # type: ignore[no-untyped-def]
        ids, rows = (np.concatenate(both) for both in zip(steps[-1], (site_ids, sites), strict=True))
        order = np.argsort([places[int(i)] for i in ids])
        steps[-1] = ids[order], rows[order]

    recorder.record_step, recorder.record_more = catch, catch_more  # type: ignore[method-assign]
    for _ in range(VOLUME_STEPS):
        loss = model(*next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    num_sites, every = len(watch._table), int(watch.summary()["every"])
    watch.detach()
    os.environ.pop("FP8WATCH_MERGE_STEPS", None)
    kept = steps[VOLUME_FROM:VOLUME_STEPS]
    turns = [(ids[at], rows[at]) for ids, rows in kept for at in [(rows["measured"] & int(Measured.ENERGIES)) != 0]]
    full = []  # those of `every` steps, as if they had been of one
    for first in range(0, len(turns), every):
        ids, rows = (np.concatenate(parts) for parts in zip(*turns[first : first + every], strict=True))
        once = np.unique(ids, return_index=True)[1]
        full.append((ids[once], rows[once]))
    each = VOLUME_STEPS - VOLUME_FROM
    num_records = sum(len(ids) for ids, _ in kept)
    sizes = (_bytes(kept), sum(_bytes([step]) for step in full), _bytes(full))
    return Volume(num_sites, every, num_records / each / num_sites, *(size / each / num_sites for size in sizes))


def _bytes(steps: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Of these steps in bodies of eight."""
    total = 0
    for first in range(0, len(steps), 8):
        part = steps[first : first + 8]
        header_steps = np.zeros(len(part), STEP)
        header_steps["step"] = np.arange(len(part))
        rows, sites = np.concatenate([r for _, r in part]), np.concatenate([i for i, _ in part])
        index = np.repeat(np.arange(len(part)), [len(i) for i, _ in part])
        header = wire.Header(run="r", session="s", rank=0, seq=0, step0=0, num_steps=len(part), num_records=len(rows))
        total += len(wire.encode_batch(header, header_steps, index, sites, rows))
    return total


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
        small, large = records(2, 32), records(16, 8)
        default, each, of_many = volume(DEFAULTS), volume(FIXED, 1), volume(FIXED, 16)
    for caught, num in ((small, 1), (small, 8), (small, 32), (large, 1), (large, 8)):
        steps = np.zeros(num, STEP)
        steps["step"] = np.arange(num)
        taken, sites = np.concatenate(caught.rows[:num]), np.concatenate(caught.ids[:num])
        header = wire.Header(run="r", session="s", rank=0, seq=0, step0=0, num_steps=num, num_records=len(taken))
        index = np.repeat(np.arange(num), [len(r) for r in caught.rows[:num]])
        place = np.arange(len(taken))
        kinds = {
            "full": taken,
            "light": lightened(taken, place >= 0),
            "sampled": lightened(taken, (place + index) % ROTATION != 0),
        }

        def encode(rows, header=header, steps=steps, index=index, sites=sites) -> bytes:  # type: ignore[no-untyped-def]
            return wire.encode_batch(header, steps, index, sites, rows)

        cases = {kind: partial(encode, rows) for kind, rows in kinds.items()}
        spent = table.interleaved(cases, args.repetitions, time.process_time)
        cells = [f"{spent[kind] * 1e3 / len(taken) * 600:.2f}, {len(cases[kind]()) / len(taken):.1f}" for kind in kinds]
        lines.append((f"{num} × {len(caught.ids[0])} records", *cells))
    (p50, p99), (c50, c99) = small.hand_over_us, small.copy_us
    text = f"""## The agent

{table.machine("numpy", "msgspec", "zstandard")} {args.repetitions} repetitions. Goals: encode ≤ 1 ms of CPU per 600
records, in batches of 8 steps ≤ 16 bytes per light record and ≤ 40 per full one, hand-over on the training thread ≤ 50 µs p99.

CPU milliseconds for 600 records, and bytes a record with its share of header and steps. Light records have counts, amax
and its histogram, scales and ratios; of the sampled ones one in {
        ROTATION
    } is full, another site in each step. The model
computes in float32, so amax and ratios have all their bits.

{
        table.table(
            ("batch", "light", f"1 of {ROTATION} full", "all full"),
            [(n, light, some, full) for n, full, light, some in lines],
        )
    }

What one rank sends of a site and step once training is past its first steps, in bodies of eight steps; {
        each.num_sites
    } sites. As attached
by default the budget chooses how often a site is sampled in full; the rows below hold it at once in {
        ROTATION
    } steps. From 256
ranks on rows that say nothing new share a record over 16 steps:

{
        table.table(
            ("", "records", "bytes", "against full records alone"),
            [
                (
                    f"as attached by default: full records each {default.every}th step, light ones between",
                    f"{default.num_records:.3f}",
                    f"{default.num_bytes:.2f}",
                    "",
                ),
                (
                    "full records each 16th step, nothing between",
                    f"{1 / ROTATION:.3f}",
                    f"{each.full_alone:.2f}",
                    "1",
                ),
                (
                    "the same, eight such steps a body: they wait for 128 steps",
                    f"{1 / ROTATION:.3f}",
                    f"{each.full_joined:.2f}",
                    f"{each.full_joined / each.full_alone:.2f}",
                ),
                (
                    "full records each 16th step and a light one in each other step",
                    f"{each.num_records:.3f}",
                    f"{each.num_bytes:.2f}",
                    f"{each.num_bytes / each.full_alone:.2f}",
                ),
                (
                    "that from 256 ranks on",
                    f"{of_many.num_records:.3f}",
                    f"{of_many.num_bytes:.2f}",
                    f"{of_many.num_bytes / each.full_alone:.2f}",
                ),
            ],
        )
    }

Hand-over of 600 records ({
        600 * ROW.itemsize >> 10
    } KiB) to the agent, 400 times back to back while its sender works: median {p50:.0f} µs,
p99 {p99:.0f} µs. Copying the same bytes and nothing else to places of a ring of 32 MiB: median {c50:.0f} µs, p99 {
        c99:.0f} µs. Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.
"""
    table.write("agent", text)


if __name__ == "__main__":
    main()
