"""Elements of one weight that become exactly 0: mode 15, silent-data-corruption.

Shapes:     share of zeros of weights [S], from one observation to the next -> at most one finding
Thread:     detect worker

No optimizer makes an element exactly 0, and amax does not see it: a page that was lost and came back empty, a shard that did not
arrive, rows that were never written. What prunes does it on purpose, and as a rule to all weights: of many at once nothing is said. Zeros are
counted before the cast, so what is known of codes alone says nothing here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding

LEAST = 0.003
"""Share of the elements of a weight."""
TIMES = 8.0
"""Times its share of zeros before."""
FEW = 0.1
"""Share of the weights that may have them: more is pruned, or loaded."""
MIN_LOOKS = 4
"""Of a weight, before anything is said of it."""


class WeightZeros(Detector):
    """Weights of which a part became 0."""

    modes = ("silent-data-corruption",)
    between_samples = True

    def __init__(self, num_sites: int) -> None:
        self._most = np.full(num_sites, np.nan)  # share of zeros, the largest so far
        self._looks = np.zeros(num_sites, dtype=np.int64)
        self._last_at = np.full(num_sites, -1, dtype=np.int64)  # step of the last look

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = num_sites - len(self._most)
        if more > 0:
            self._most = np.concatenate([self._most, np.full(more, np.nan)])
            self._looks = np.concatenate([self._looks, np.zeros(more, dtype=np.int64)])
            self._last_at = np.concatenate([self._last_at, np.full(more, -1, dtype=np.int64)])

    def frozen(self) -> None:
        """What became 0 is known when it is seen."""

    def resume(self) -> None:
        """Weights were loaded: they may be others."""
        self._most[:], self._looks[:], self._last_at[:] = np.nan, 0, -1

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now = ctx.now
        uncast = ctx.weights() & ~np.isnan(now.column("num_underflow"))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(uncast, 1.0 - now.column("num_nonzero") / now.column("num_elements"), np.nan)
        known = np.isfinite(share) & ~now.nonfinite
        if not known.any():
            return []
        judged = known & (self._looks >= MIN_LOOKS)
        with np.errstate(invalid="ignore"):
            hit = judged & (share >= LEAST) & (share >= TIMES * self._most)
        found = self._finding(ctx, hit, share, judged)
        self._most = np.where(known, np.fmax(self._most, share), self._most)
        self._looks = np.where(known, self._looks + 1, self._looks)
        self._last_at = np.where(known, now.step, self._last_at)
        few = np.count_nonzero(hit) <= max(1, FEW * np.count_nonzero(judged))
        return [found] if found is not None and few and ctx.clean else []

    def _finding(
        self, ctx: Context, hit: npt.NDArray[np.bool_], share: npt.NDArray[np.float64], judged: npt.NDArray[np.bool_]
    ) -> Finding | None:
        if not hit.any():
            return None
        now, rows = ctx.now, ctx.now.in_flow(hit)
        row = int(rows[0])
        last_at = int(self._last_at[row])
        elements = int(np.nan_to_num(now.column("num_elements")[row]))
        evidence = [
            Evidence(
                "zeros",
                float(f"{share[row]:.3g}"),
                float(f"{self._most[row]:.3g}"),
                f"of {elements} elements",
                now.step,
            ),
            Evidence("weights", len(rows), 0, f"of {int(np.count_nonzero(judged))} weights", now.step),
        ]
        return now.finding(
            "silent-data-corruption", "warning", rows, evidence, "shared",
            kind="zeros", share=float(share[row]), last_at=last_at, began=last_at + 1, not_before=last_at + 1,
        )  # fmt: skip
