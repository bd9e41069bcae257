"""What a light record takes on the wire and in the store: records of a real training, in float32 and in bfloat16.

python -m benchmarks.light_rows            # two trainings of 256 steps, written to docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks import table
from benchmarks.agent import lightened
from benchmarks.linear import attached
from benchmarks.store import Database
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch_agent import wire
from fp8watch_agent.record import STEP, Site
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import blocks, commit, compact, registrations, sheet_codec
from fp8watch_server.store.compactor import Compactor

RUN, STEPS, STEPS_A_BODY = "light", 256, 8


@dataclass(frozen=True)
class Recorded:
    """Steps of a training without what only sampled records hold."""

    sites: list[Site]
    ids: list[np.ndarray]
    rows: list[np.ndarray]

    @property
    def num_records(self) -> int:
        """Of all steps."""
        return sum(map(len, self.ids))


def recorded(dtype: torch.dtype) -> Recorded:
    """What a small model hands to the agent, at attach's defaults."""
    torch.manual_seed(0)
    model = ByteModel(dim=64, num_layers=3, num_heads=2, hidden=192).to(dtype)
    data, optimizer = batches(load_text(), 8, 32), torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = attached(model, observe=True)
    recorder = watch._recorder
    assert recorder is not None
    out = Recorded([], [], [])

    def catch(header, site_ids, rows, *_args, **_more):  # type: ignore[no-untyped-def]
        out.ids.append(site_ids.copy())
        out.rows.append(lightened(rows, np.ones(len(rows), dtype=np.bool_)))

    recorder.record_step, recorder.register_sites = catch, out.sites.extend  # type: ignore[method-assign,assignment]
    for _ in range(STEPS):
        loss = model(*next(data))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    watch.detach()
    return out


def bodies(of: Recorded, steps_a_body: int) -> list[bytes]:
    """As the agent sends them."""
    out = []
    for seq, first in enumerate(range(0, len(of.ids), steps_a_body)):
        ids, rows = of.ids[first : first + steps_a_body], of.rows[first : first + steps_a_body]
        steps = np.zeros(len(ids), STEP)
        steps["step"] = first + np.arange(len(ids))
        sizes = [len(i) for i in ids]
        header = wire.Header(
            run=RUN, session="s", rank=0, seq=seq, step0=first, num_steps=len(ids), num_records=sum(sizes)
        )
        step = np.repeat(steps["step"], sizes)
        out.append(wire.encode_batch(header, steps, step, np.concatenate(ids), np.concatenate(rows)))
    return out


def stored(of: Recorded, folder: Path) -> tuple[float, dict[str, float]]:
    """Bytes a record of the SQLite file after compaction, and of a sheet's columns, the largest first."""
    folder.mkdir(exist_ok=True)
    database = Database(f"sqlite:///{folder / 'light.db'}")
    known, before = commit.KnownSites(), database.bytes()
    with writing(database.engine) as conn:
        registrations.register_run(conn, RUN, name=RUN, recipe="blockwise", backend="cpu", world_size=1, now=1.0)
        facts = registrations.StoredSession("s", 0, 1, {}, "node", 1, None, {}, "blockwise", "f", "cpu", {})
        registrations.register_session(conn, RUN, facts, now=1.0)
        registrations.register_sites(conn, RUN, "s", of.sites, now=1.0)
    items = [commit.Incoming(wire.decode_batch(b), b, hashlib.sha256(b).digest()) for b in bodies(of, STEPS_A_BODY)]
    with writing(database.engine) as conn:
        commit.commit_group(conn, items, known, now=1.0, replays=False)
        conn.execute(t.hot_batch.update().values(detected=1))
    Compactor(database.engine, clock=lambda: time.time() + 1e6).round()
    size = database.bytes() - before
    with database.engine.connect() as conn:
        rows = conn.execute(t.sheet.select()).all()
        left = conn.execute(t.hot_batch.select()).all()
    assert rows
    assert not left
    columns = Counter({"histogram of amax": float(sum(len(r.histograms) for r in rows))})
    names = {spec.code: name for name, spec in blocks.TABLE.items()}
    for row in rows:
        (*_, entries), _ = sheet_codec.unseal(row.body, True)
        for code, _, lanes in entries:
            columns[names[code]] += sum(sheet_codec.payload_bytes(lane, row.num_records) for lane in lanes)
    database.engine.dispose()
    return size / of.num_records, {name: n / of.num_records for name, n in columns.most_common()}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1, help="without effect: bytes are counted, not timed")
    parser.parse_args()
    torch.set_num_threads(1)
    lines, shares, exact = [], {}, {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FP8WATCH_SPOOL_DIR"] = folder
            of = recorded(dtype)
            wires = [sum(map(len, bodies(of, n))) / of.num_records for n in (1, STEPS_A_BODY, 32)]
            with mock.patch.object(compact, "round_light", return_value=None):
                exact[name], _ = stored(of, Path(folder) / "exact")
            size, shares[name] = stored(of, Path(folder))
        lines.append((name, *(f"{w:.1f}" for w in wires), f"{size:.1f}"))
    columns = [c for c in shares["float32"] if max(s.get(c, 0.0) for s in shares.values()) >= 0.05]
    text = f"""## What a light record takes

{table.machine("torch", "numpy", "zstandard")} A model of 21 Linears, 64 wide, trained for {
        STEPS
    } steps by one rank; of each
record what light ones have: counts, amax and its histogram, scales and ratios. Bytes a record with its share of everything
else. Goals: ≤ 16 in bodies of 8 steps, ≤ 12 stored. Stored is what the SQLite file grows by, after compaction.

{table.table(("computes in", "bodies of 1 step", "of 8 steps", "of 32 steps", "stored"), lines)}

Of a stored record, by column:

{table.table(("", *shares), [(f"`{c}`", *(f"{s.get(c, 0.0):.2f}" for s in shares.values())) for c in columns])}

In bfloat16 an amax has eight bits of fraction. In float32 it has 24 that nothing compresses, and so have both ratios. What a
scale must be is held against the largest amax, which is kept to the last bit. Of a light record that counts nothing wrong the
ratios within the invariant are kept within 2^-9, and the smallest amax within 2^-11; full records, and what is broken, keep
every bit. With every bit of these too it would be {exact["float32"]:.1f} in float32 and {
        exact["bfloat16"]:.1f} in bfloat16.
Sites that read one tensor hold the same numbers; a sheet finds them among its own 32 sites only.
"""
    table.write("light_rows", text)


if __name__ == "__main__":
    main()
