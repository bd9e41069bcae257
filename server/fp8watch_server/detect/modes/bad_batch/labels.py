"""Labels that no longer follow from the tokens: mode 14, bad-batch.

Shapes:     share of the labels that are the token at some shift, per step -> at most one finding
Thread:     detect worker

In a language model each label is a token of the same row, one place further on, in every row: a share of 1 that no
batch changes. Labels that were shifted once more, drawn at random or taken from another row lower it in the first step,
while the loss may not show it for many. Where the share has always varied, it must stay under all that it was.
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_agent.batch_names import SHIFTS
from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding

MIN_LOOKS = 12
FOLLOWS = 0.9
"""Usual share from which on labels are those of the tokens."""
ALWAYS = 0.999
EDGE = 0.002
VARIES_STEPS = 3
"""Steps in a row, where the share was not always 1."""
MOVED = 0.4
"""Of the labels that went, as many must be found at another shift, to name it."""
REPEAT_STEPS = 5


class LabelMatch(Detector):
    """Labels against the tokens that they were made of."""

    modes = ("bad-batch",)
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._usual = Baseline(len(SHIFTS))
        self._num_off, self._since, self._told = 0, -1, -1

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Its own shares only."""

    def resume(self) -> None:
        """What is usual stays: a restart with other labels is told."""
        self._num_off, self._since, self._told = 0, -1, -1

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        share = _shares(ctx)
        if share is None:
            return []
        usual = self._usual.median()
        best = int(np.nanargmax(usual)) if np.isfinite(usual).any() else 0
        known = int(self._usual.count[best]) >= MIN_LOOKS and usual[best] >= FOLLOWS
        ring = self._usual.ordered()[best].astype(np.float64)
        low, high = (float(np.nanmin(ring)), float(np.nanmax(ring))) if known else (0.0, 1.0)
        if not known or not share[best] < low - max(EDGE, high - low):
            self._num_off, self._since, self._told = 0, -1, -1
            self._usual.push(share)
            return []
        if not self._num_off:
            self._since = ctx.now.step
        self._num_off += 1
        if self._num_off < (1 if low >= ALWAYS else VARIES_STEPS):
            return []
        if self._told >= 0 and ctx.now.step - self._told < REPEAT_STEPS:
            return []
        self._told = ctx.now.step
        return [self._finding(ctx, share, usual, best)]

    def _finding(
        self, ctx: Context, share: np.ndarray[tuple[int], np.dtype[np.float64]],
        usual: np.ndarray[tuple[int], np.dtype[np.float64]], best: int,
    ) -> Finding:  # fmt: skip
        shifts, names = list(SHIFTS), list(SHIFTS.values())
        gone = float(usual[best] - share[best])
        rose = share - np.nanmax(self._usual.ordered(), axis=1)  # over all that it was: tokens are alike by chance too
        other = int(np.nanargmax(rose))
        moved = other != best and rose[other] > MOVED * gone
        since = self._since
        evidence = [Evidence(names[best], round(float(share[best]), 4), round(float(usual[best]), 4), "share", since)]
        if moved:
            evidence.append(
                Evidence(names[other], round(float(share[other]), 4), round(float(usual[other]), 4), "share", since)
            )
        loss, usual_loss = ctx.now.scalar("loss"), float(ctx.base.loss.median()[0])
        if loss is not None and math.isfinite(loss) and math.isfinite(usual_loss):
            evidence.append(Evidence("loss", round(loss, 4), round(usual_loss, 4), "", ctx.now.step))
        none = np.zeros(0, dtype=np.int64)
        found = ctx.now.finding(
            "bad-batch", "warning", none, evidence, "shared", kind="labels", began=since, not_before=since,
            gone=gone, by=shifts[other] - shifts[best] if moved else None, jump_batch_id=ctx.now.batch_id,
        )  # fmt: skip
        return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})


def _shares(ctx: Context) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """The rank whose labels follow least; None where no rank measured them in this step. [shifts]"""
    seen = []
    for logs in (view.logs() for view in ctx.now.views):
        values = [logs.get(name, math.nan) for name in SHIFTS.values()]
        if all(map(math.isfinite, values)):
            seen.append(values)
    return np.array(min(seen, key=max)) if seen else None
