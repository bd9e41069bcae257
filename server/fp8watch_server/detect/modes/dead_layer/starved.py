"""Experts without tokens: the starved of mode 4, dead-layer.

Shapes:     tokens of each expert of a site [E], in the steps in which the site has its turn -> at most one finding
Thread:     detect worker

An expert is starved when it got nothing in several looks in which tokens for it were to be expected: 64 times as many as
there are experts. Tokens are summed over ranks. Information, as all of this mode: a young router is often unfair.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.step_view import INPUT, Mask

MIN_SHARE = 64
"""Tokens that an expert would have had, were all alike, before it is starved."""
REPEAT_STEPS = 8
MAX_NAMED = 8


class StarvedExperts(Detector):
    """Experts to which the router sends nothing."""

    modes = ("dead-layer",)
    between_samples = True

    def __init__(self, num_sites: int) -> None:
        self._forget()

    def _forget(self) -> None:
        self._looks: dict[int, npt.NDArray[np.int64]] = {}  # row -> looks since each expert had a token, [E]
        self._passed: dict[int, npt.NDArray[np.float64]] = {}  # ... and tokens that went to others since, [E]
        self._since: dict[int, int] = {}  # row in alarm -> first step of the run of looks
        self._began: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def grow(self, num_sites: int) -> None:
        """More sites were registered: what is followed is by site as it comes."""

    def frozen(self) -> Mask | None:
        """Baselines of sites go on."""
        return None

    def resume(self) -> None:
        """A new session: what is followed begins anew."""
        super().resume()
        self._forget()

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, role = ctx.now, ctx.now.table.role
        for row, seen in now.experts.items():
            if role[row] == INPUT and len(seen.tokens) > 1 and seen.tokens.sum() > 0:
                self._look(ctx, row, seen.tokens)
        due = [row for row in self._since if now.step - self._told.get(row, -REPEAT_STEPS) >= REPEAT_STEPS]
        if not due:
            return []
        rows = now.in_flow(np.isin(np.arange(len(now)), due))
        for row in due:
            self._told[row] = now.step
        return [self._finding(ctx, rows)]

    def _look(self, ctx: Context, row: int, tokens: npt.NDArray[np.float64]) -> None:
        looks, passed = self._looks.get(row), self._passed.get(row)
        if looks is None or passed is None or len(looks) != len(tokens):
            looks, passed = np.zeros(len(tokens), dtype=np.int64), np.zeros(len(tokens))
        none = tokens == 0
        if none.any() and not looks.any():
            self._began[row] = ctx.now.step
        self._looks[row] = looks = np.where(none, looks + 1, 0)
        self._passed[row] = passed = np.where(none, passed + tokens.sum(), 0.0)
        if self._starved(ctx, row).any():
            self._since.setdefault(row, self._began.get(row, ctx.now.step))
        else:
            self._since.pop(row, None)
            self._told.pop(row, None)

    def _starved(self, ctx: Context, row: int) -> Mask:
        looks, passed = self._looks[row], self._passed[row]
        return np.asarray((looks >= ctx.limit.starved_looks) & (passed >= MIN_SHARE * len(looks)))

    def _finding(self, ctx: Context, rows: npt.NDArray[np.int64]) -> Finding:
        first = int(rows[0])
        hungry = np.flatnonzero(self._starved(ctx, first))
        since = self._since[first]
        named = ", ".join(str(e) for e in hungry[:MAX_NAMED])
        evidence = [
            Evidence("experts_without_tokens", len(hungry), 0, f"of {len(self._looks[first])} experts", since),
            Evidence("tokens", 0, None, "tokens", since),
            Evidence("tokens_of_others", int(self._passed[first][hungry[0]]), None, "tokens", since),
        ]
        return ctx.now.finding(
            "dead-layer", "info", rows, evidence, "shared", tokens=0, began=since, which="starved",
            expert=int(hungry[0]), experts=named + (", …" if len(hungry) > MAX_NAMED else ""),
        )  # fmt: skip
