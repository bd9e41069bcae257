"""What batches are made of changed and stays so: mode 14, bad-batch, as information.

Shapes:     shares of padding, scored labels, frequent tokens and classes, and labels in their own place, per step -> at most one finding
Thread:     detect worker

A mask that no longer reaches the model, padding that is scored, a source whose tokens are noise: what the model is given
stands on another level, while the loss may not show it. Levels are compared as those of the loss (`level`), both ways.
Information, because a mixture is often changed on purpose; a level that batches come back to again and again, as where samplers sort
them by length within every fifty, is told twice and then is theirs. A batch that is used several times in a row counts once.
"""

from __future__ import annotations

import math

import numpy as np

from fp8watch_agent.batch_names import CONCENTRATION, HASH, MASK, SCORED, SHIFTS, TARGETS
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding
from fp8watch_server.detect.modes.bad_batch.level import levels, onset

WINDOWS = ((4, 24, 5.0), (8, 24, 2.5), (24, 48, 1.25))
"""(last values, those before, difference in spreads of one value)."""
MOST = sum(WINDOWS[-1][:2])
LEAST = 0.03
"""Share of the usual value under which a change is none."""
ONE_SIDE = 0.85
FEW, BEYOND = 8, 0.9
"""So many last values or fewer must lie beyond this share of those before: a spread of 24 values is known to a third alone, and of
small batches these shares are skewed."""
LEAST_SHOWN = 0.05
"""Of all labels: fewer that stand where they are asked for, or more, are another text."""
TOLD_ENOUGH, NEAR = 2, 0.5
"""Times that a level was told; how near to it, as a share of the change, another is the same."""
NAMES = (MASK, SCORED, CONCENTRATION, TARGETS, SHIFTS[0])


class Composition(Detector):
    """The last values of each share against those before."""

    modes = ("bad-batch",)
    between_samples = True

    def __init__(self, num_sites: int = 0) -> None:
        self._values: dict[str, list[float]] = {}
        self._steps: dict[str, list[int]] = {}
        self._batch: float | None = None  # hash of the last
        self._told: dict[str, list[tuple[float, float]]] = {}  # levels, and how far they were from what was usual

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Nothing of the sites."""

    def resume(self) -> None:
        """Values of the attempt before stay: a level that a restart changed is one."""

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        same = self._batch is not None and ctx.now.logs.get(HASH) == self._batch
        self._batch = ctx.now.logs.get(HASH)
        if same:
            return []
        for name in NAMES:
            value = ctx.now.logs.get(name)
            if value is None or not math.isfinite(value):
                continue
            values = self._values[name] = [*self._values.get(name, []), value][-MOST:]
            steps = self._steps[name] = [*self._steps.get(name, []), ctx.now.step][-MOST:]
            if (moved := _moved(values, steps, LEAST_SHOWN if name == SHIFTS[0] else 0.0)) is not None:
                if self._comes_back(name, moved[1], moved[1] - moved[0]):
                    continue
                self._values[name], self._steps[name] = [], []
                return [_finding(ctx, name, *moved)]
        return []

    def _comes_back(self, name: str, level: float, change: float) -> bool:
        """Whether it was told often enough that batches go to this level."""
        told = self._told.setdefault(name, [])
        near = [(at, by) for at, by in told if by * change > 0 and abs(level - at) <= NEAR * abs(by)]
        if len(near) < TOLD_ENOUGH:
            told.append((level, change))
        return len(near) >= TOLD_ENOUGH


def _moved(values: list[float], steps: list[int], least: float = 0.0) -> tuple[float, float, int, int] | None:
    """(usual, level, first step, values on it) of a level that was left for good, by more than `least`."""
    for num_last, num_before, sigma in WINDOWS:
        if len(values) < num_last + num_before:
            continue
        some = np.array(values[-num_last - num_before :])
        usual, level, spread = levels(some, num_last)
        change = level - usual
        if abs(change) <= max(sigma * spread, LEAST * abs(usual), least):
            continue
        side = float(np.sign(change))
        edge = float(np.quantile(side * some[:-num_last], BEYOND)) if num_last <= FEW else side * usual
        if np.count_nonzero(side * some[-num_last:] > edge) < ONE_SIDE * num_last:
            continue
        return usual, level, onset(side * some, steps, side * (usual + change / 2)), num_last
    return None


def _finding(ctx: Context, name: str, usual: float, level: float, began: int, num: int) -> Finding:
    evidence = [
        Evidence(name, float(f"{level:.4g}"), float(f"{usual:.4g}"), "share", began),
        Evidence("steps_on_this_level", num, None, "steps", began),
    ]
    loss, usual_loss = ctx.now.scalar("loss"), float(ctx.base.loss.median()[0])
    if loss is not None and math.isfinite(loss) and math.isfinite(usual_loss):
        evidence.append(Evidence("loss", round(loss, 4), round(usual_loss, 4), "", ctx.now.step))
    none = np.zeros(0, dtype=np.int64)
    found = ctx.now.finding(
        "bad-batch", "info", none, evidence, "shared", kind="composition", name=name, began=began, not_before=began
    )
    return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})
