"""Gain error of healthy trainings: its distribution over sites and steps, for the thresholds of `chronic_gain` and `destroyed_gain`.

PYTHONPATH=tests build/proving/.venv/bin/python tests/benchmarks/gain_in_training.py   # no clock; packages of `make prove`
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in (".", "agent", "server", "tests")]

from proving.families import build  # noqa: E402

import fp8watch  # noqa: E402
import fp8watch.session.start as start_module  # noqa: E402
from benchmarks.operating_point import refuse_other_settings  # noqa: E402
from fp8watch_agent.health import Health  # noqa: E402
from fp8watch_agent.record import Measured  # noqa: E402

FAMILIES = ("llama", "moe", "delayed", "recurrent", "ssm", "vit", "diffusion")
STEPS, EVERY = 20, 4
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


class Kept:
    """In place of a recorder: gain errors, by role."""

    found: ClassVar[dict[str, list[float]]] = defaultdict(list)

    def __init__(self, settings: object, session: object, *_: object, **__: object) -> None:
        self.sites: dict[int, object] = {}
        self.spool_dir = settings.spool_dir  # type: ignore[attr-defined]

    def register_sites(self, sites: list) -> None:
        self.sites |= {s.id: s for s in sites}

    def record_step(self, step, site_ids, rows, logs, batch_id, **_):
        for i, row in zip(site_ids, rows, strict=True):
            if row["measured"] & Measured.GAIN and row["signal_energy"] > 0 and int(i) in self.sites:
                site = self.sites[int(i)]
                role = f"{site.operand} {site.format}"
                Kept.found[role].append(abs(float(row["gain_energy"] / row["signal_energy"])))

    def health(self) -> Health:
        return Health(state="kept")

    def wanted_captures(self) -> frozenset:
        return frozenset()

    def flush(self, timeout_s: float) -> bool:
        return True

    def nothing(self, *_: object, **__: object) -> None: ...

    record_tile_maps = hurry = update_facts = set_gauge = close = nothing


def train(family: str) -> None:
    """A few steps of one family, all sites in full."""
    torch.manual_seed(1)
    t = build(family, 1)
    watch = fp8watch.attach(t.model, recipe=t.recipe, every=EVERY, overhead_budget=None, **t.attach)
    try:
        for step in range(STEPS):
            if t.schedule is not None:
                for group in t.optimizer.param_groups:
                    group["lr"] = t.schedule(step) * group.get("lr_scale", 1)
            t.optimizer.zero_grad()
            t.loss(t.model, t.batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
            t.optimizer.step()
    finally:
        watch.detach()


def main() -> None:
    """Print quantiles of |gain error|, in per cent."""
    refuse_other_settings()
    start_module.Recorder = Kept  # type: ignore[misc]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FP8WATCH_SPOOL_DIR"] = folder
        for family in sys.argv[1:] or FAMILIES:
            before = {role: len(v) for role, v in Kept.found.items()}
            train(family)
            num = sum(len(v) - before.get(role, 0) for role, v in Kept.found.items())
            print(f"{family}: {num} operands", file=sys.stderr, flush=True)
    print("| operand | looks | " + " | ".join("largest" if q == 1 else f"{100 * q:g} %" for q in QUANTILES) + " |")
    print("|---|---|" + "---|" * len(QUANTILES))
    for role in sorted(Kept.found):
        values = 100 * np.array(Kept.found[role])
        print(f"| {role} | {len(values)} | " + " | ".join(f"{np.quantile(values, q):.3f}" for q in QUANTILES) + " |")


if __name__ == "__main__":
    main()
