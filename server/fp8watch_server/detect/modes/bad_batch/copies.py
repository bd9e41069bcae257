"""Rows of a batch that are copies of each other: mode 14, bad-batch.

Shapes:     share of copied rows in a micro-batch, per step and rank -> at most one finding
Thread:     detect worker

Workers of a loader that draw with one seed, a sampler with replacement over a few rows, an augmentation that was lost: batches hold each
of a few rows several times, and the loss hardly shows it. Where groups of one prompt are meant they were there before; so a share
counts that stays over all that it ever was.
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_agent.batch_names import COPIES
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding

MIN_LOOKS = 16
"""Steps whose share is known, before a larger one says anything."""
MORE = 0.15
"""Over the largest share that there ever was."""
STEPS = 3
"""In a row: the last batch of an epoch may be filled up."""
MAX_RANKS = 64
REPEAT_STEPS = 5


class CopiedRows(Detector):
    """The rows of each rank's batches."""

    modes = ("bad-batch",)
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._most: dict[int, float] = {}  # rank -> largest share so far
        self._num: dict[int, int] = {}
        self._run: dict[int, int] = {}  # rank -> steps in a row over it
        self._since: dict[int, int] = {}
        self._told = -1

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Nothing of the sites."""

    def resume(self) -> None:
        """What was usual stays: a restart with another loader is told."""
        self._run.clear()
        self._told = -1

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        hit: list[tuple[int, float]] = []
        for view in ctx.now.views:
            share = view.logs().get(COPIES)
            if share is None or not math.isfinite(share):
                continue
            if (view.rank in self._num or len(self._num) < MAX_RANKS) and self._is_more(ctx, view.rank, share):
                hit.append((view.rank, share))
        if not hit or (self._told >= 0 and ctx.now.step - self._told < REPEAT_STEPS):
            return []
        self._told = ctx.now.step
        return [self._finding(ctx, hit)]

    def _is_more(self, ctx: Context, rank: int, share: float) -> bool:
        num, most = self._num.get(rank, 0), self._most.get(rank, 0.0)
        if num < MIN_LOOKS or share < most + MORE:
            self._num[rank], self._most[rank], self._run[rank] = num + 1, max(most, share), 0
            return False
        if not self._run.get(rank):
            self._since[rank] = ctx.now.step
        self._run[rank] = self._run.get(rank, 0) + 1
        return self._run[rank] >= STEPS

    def _finding(self, ctx: Context, hit: list[tuple[int, float]]) -> Finding:
        rank, share = max(hit, key=lambda h: h[1])
        since = self._since[rank]
        evidence = [
            Evidence(COPIES, float(f"{share:.3g}"), float(f"{self._most[rank]:.3g}"), "share", since),
            Evidence("steps_with_copies", self._run[rank], None, "steps", since),
        ]
        if len(self._num) > 1:
            evidence.append(Evidence("ranks", len(hit), None, f"of {len(self._num)} followed", ctx.now.step))
        none = np.zeros(0, dtype=np.int64)
        return ctx.now.finding(
            "bad-batch", "warning", none, evidence, "shared", kind="copies", began=since, not_before=since, rank=rank
        )
