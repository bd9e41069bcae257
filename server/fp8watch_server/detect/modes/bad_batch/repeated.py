"""Batches that come again: mode 14, bad-batch.

Shapes:     hash of what entered the model, per step and rank -> at most one finding
Thread:     detect worker

A loader that gives one batch again and again, or a few in turn, shows in nothing but a loss that falls too well. Here the
inputs of several steps in a row are bit for bit those of as many steps before. Told only of a run that has seen many more
batches than it is apart from its repetition: a small data set that goes round in order repeats all that it ever gave. One
batch that stays is a warning; several in turn may be a small set that is trained on from here on purpose: info. Where each
batch is used several times on purpose (the inner epochs of PPO and GRPO), only a repetition twice as long as those before
is news.
"""

from __future__ import annotations

import numpy as np

from fp8watch_agent.batch_names import HASH
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding

KEPT = 64
"""Steps that are looked back."""
MIN_FRESH = 24
"""Batches that were not seen before, until a repetition says anything."""
MAX_RANKS = 64
"""Ranks that are followed: what one loader does to all of them, some show."""
REPEAT_STEPS = 5


class RepeatedBatches(Detector):
    """The inputs of each rank against those of its last steps."""

    modes = ("bad-batch",)
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._kept: dict[int, list[int]] = {}  # rank -> hashes, oldest first
        self._fresh: dict[int, int] = {}  # rank -> batches that none of those kept was
        self._lag: dict[int, int] = {}  # rank -> steps to the batch that came again
        self._run: dict[int, int] = {}  # rank -> steps in a row with this lag
        self._since: dict[int, int] = {}
        self._usual: dict[int, int] = {}  # rank -> the longest run that ended and was not told
        self._told = -1

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Baselines of sites go on."""

    def resume(self) -> None:
        """A new session may go over steps again, with their data; how the run goes over its batches stays known."""
        for part in (self._kept, self._lag, self._run, self._since):
            part.clear()
        self._told = -1

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        hit: list[int] = []
        for view in ctx.now.views:
            value = view.logs().get(HASH)
            if value is None or not np.isfinite(value):
                continue
            if (view.rank in self._kept or len(self._kept) < MAX_RANKS) and self._repeats(ctx, view.rank, int(value)):
                hit.append(view.rank)
        if not hit or (self._told >= 0 and ctx.now.step - self._told < REPEAT_STEPS):
            return []
        self._told = ctx.now.step
        return [self._finding(ctx, hit)]

    def _repeats(self, ctx: Context, rank: int, value: int) -> bool:
        kept, fresh = self._kept.setdefault(rank, []), self._fresh.get(rank, 0)
        lag = next((k for k in range(1, len(kept) + 1) if kept[-k] == value), 0)
        self._kept[rank] = [*kept, value][-KEPT:]
        if lag != self._lag.get(rank, 0):
            self._ended(ctx, rank, fresh, news=not lag)
        if not lag:
            self._fresh[rank], self._lag[rank] = fresh + 1, 0
            return False
        if not self._lag.get(rank):
            self._since[rank] = ctx.now.step
        self._run[rank], self._lag[rank] = self._run.get(rank, 0) + 1, lag
        return self._is_news(ctx, rank, fresh)

    def _is_news(self, ctx: Context, rank: int, fresh: int) -> bool:
        run, usual = self._run.get(rank, 0), self._usual.get(rank, 0)
        return fresh >= max(MIN_FRESH, 2 * self._lag[rank]) and run >= max(ctx.limit.repeated_steps, 2 * usual + 1)

    def _ended(self, ctx: Context, rank: int, fresh: int, *, news: bool) -> None:
        """A run of repetitions is over: what was not told, and was followed by a batch that is `news`, is how this training goes."""
        if news and self._run.get(rank, 0) and not self._is_news(ctx, rank, fresh):
            self._usual[rank] = max(self._usual.get(rank, 0), self._run[rank])
        self._run[rank] = 0

    def _finding(self, ctx: Context, ranks: list[int]) -> Finding:
        rank = ranks[0]
        lag, run, since = self._lag[rank], self._run[rank], self._since[rank]
        evidence = [
            Evidence("repeated_batches", lag, None, "in turn", since),
            Evidence("repeated_steps", run, 0, "steps", since),
            Evidence("batches_before", self._fresh[rank], None, "all different", since),
        ]
        if len(self._kept) > 1:
            evidence.append(Evidence("ranks", len(ranks), None, f"of {len(self._kept)} followed", ctx.now.step))
        none = np.zeros(0, dtype=np.int64)
        return ctx.now.finding(
            "bad-batch", "warning" if lag == 1 else "info", none, evidence, "shared", kind="repeated", began=since,
            not_before=since, rank=rank,
        )  # fmt: skip
