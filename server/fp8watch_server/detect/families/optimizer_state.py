"""Moments, or weights, that did not stand still between two steps of their optimizer: mode 15, silent-data-corruption; and second
moments that are 0, where Adam divides by them: mode 13, optimizer-divergence.

Shapes:     tensors that changed, of those that were looked at, per step and rank -> at most one finding
Thread:     detect worker

No threshold: between two of its steps nobody else writes into an optimizer's moments. Where the weights changed with them, a
checkpoint was loaded, and that is no failure. Where it happens again and again, the trainer does it on purpose, and it is told once.
Weights alone are written by trainers as well, by averages, clamps and pruning: that it begins in a run that did without is information,
which waits for whatever says more of it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_agent.training_names import (
    CHANGED,
    EPS,
    MOMENTS_CHANGED,
    MOMENTS_LOOKED,
    SECOND_LOOKED,
    SECOND_ZERO,
    WEIGHTS_CHANGED,
    WEIGHTS_LOOKED,
    WRITTEN,
)
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding

REPEAT_STEPS = 200
FROM_THE_START = 24
"""Steps of a run. Weights that others than the optimizer wrote before are written on purpose."""
STAYS_STEPS = 5
HOLD_STEPS = 24
"""In which what such writes do may be told by its own name: weights that shrink, round or grow."""
ZERO_SHARE = 0.01
"""Of second moments whose first moment is not 0: in float32 none is."""


class OptimizerState(Detector):
    """What each rank says of its optimizer's moments."""

    modes = ("silent-data-corruption", "optimizer-divergence")
    between_samples = True

    # a state that was saved before has none of these
    _num_steps = 0
    _written = -1  # the last step before which weights were
    _since = -1  # the first, where the run did without before
    _first: tuple[int, int, int, int, str] | tuple[()] = ()
    """What was seen then: a rank, how many of them, weights, of so many, the first of them; empty: nothing is to be told."""
    _is_told = False

    def __init__(self, num_sites: int = 0) -> None:
        self._told = self._told_zero = -1

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Baselines of sites go on."""

    def resume(self) -> None:
        """A new session has an optimizer of its own."""
        self._told = self._told_zero = -1

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        self._num_steps += 1
        zeros = self._zeros(ctx)
        if zeros is not None:
            return zeros
        if (written := self._weights(ctx)) is not None:
            return written
        hit = [
            (view.rank, logs)
            for view in ctx.now.views
            if (logs := view.logs()).get(MOMENTS_CHANGED) and not logs.get(WEIGHTS_CHANGED)
        ]
        if not hit:
            return []
        last, self._told = self._told, ctx.now.step
        if last >= 0 and ctx.now.step - last < REPEAT_STEPS:
            return []
        rank, logs = hit[0]
        changed, looked = int(logs[MOMENTS_CHANGED]), int(logs.get(MOMENTS_LOOKED, 0))
        name = next((n.removeprefix(CHANGED) for n in logs if n.startswith(CHANGED)), "")
        evidence = [
            Evidence("moments_changed", changed, 0, f"of {looked} looked at", ctx.now.step),
            Evidence("first_of_them", name, None, "", ctx.now.step),
        ]
        if len(ctx.now.ranks) > 1:
            evidence.append(Evidence("ranks", len(hit), None, f"of {len(ctx.now.ranks)}", ctx.now.step))
        module = name.rpartition(" of ")[2].rpartition(".")[0]
        return [
            ctx.now.finding(
                "silent-data-corruption", "warning", _weights_of(ctx, module), evidence, "shared", kind="moments", first=name, changed=changed,
                looked=looked, rank=rank, not_before=ctx.now.step,
            )
        ]  # fmt: skip

    def _weights(self, ctx: Context) -> list[Finding] | None:
        """Weights that were written while no optimizer ran, and moments that were not; None where there are none."""
        step = ctx.now.step
        hit = [
            (view.rank, logs)
            for view in ctx.now.views
            if (logs := view.logs()).get(WEIGHTS_CHANGED) and not logs.get(MOMENTS_CHANGED)
        ]
        if hit:
            last, self._written = self._written, step
            if last < 0 and self._num_steps > FROM_THE_START:
                rank, logs = hit[0]
                self._since = step
                name = next((n.removeprefix(WRITTEN) for n in logs if n.startswith(WRITTEN)), "")
                self._first = rank, len(hit), int(logs[WEIGHTS_CHANGED]), int(logs.get(WEIGHTS_LOOKED, 0)), name
            elif self._is_told and step - last > STAYS_STEPS:
                self._first = ()  # it is done on purpose
        if not self._first or step - self._since < HOLD_STEPS or (self._is_told and not hit):
            return None
        since, held, self._is_told = self._since, step - self._since, True
        rank, num_ranks, changed, looked, name = self._first
        evidence = [Evidence("weights_changed", changed, 0, f"of {looked} looked at", since)]
        if name:
            evidence.append(Evidence("first_of_them", name, None, "", since))
        if len(ctx.now.ranks) > 1:
            evidence.append(Evidence("ranks", num_ranks, None, f"of {len(ctx.now.ranks)}", since))
        return [
            ctx.now.finding(
                "silent-data-corruption", "info", _weights_of(ctx, name.rpartition(".")[0] if changed == 1 else ""), evidence, "shared", kind="weights-written",
                first=name, changed=changed, looked=looked, rank=rank, began=since, not_before=since, held=held,
            )
        ]  # fmt: skip

    def _zeros(self, ctx: Context) -> list[Finding] | None:
        """Second moments that are 0; None where there are not many."""
        hit = [
            (view.rank, logs)
            for view in ctx.now.views
            if (logs := view.logs()).get(SECOND_ZERO, 0.0) > ZERO_SHARE * logs.get(SECOND_LOOKED, math.inf)
        ]
        if not hit:
            return None
        last, self._told_zero = self._told_zero, ctx.now.step
        goes_on = last >= 0 and ctx.now.step - last < REPEAT_STEPS
        rank, logs = hit[0]
        share = 100 * logs[SECOND_ZERO] / logs[SECOND_LOOKED]
        name = next((n.removeprefix(CHANGED) for n in logs if n.startswith(CHANGED)), "")
        looked = f"% of {int(logs[SECOND_LOOKED])} looked at"
        evidence = [Evidence("second_moments_zero", float(f"{share:.3g}"), 0, looked, ctx.now.step)]
        if EPS in logs:
            evidence.append(Evidence("eps", logs[EPS], None, "", None))
        if name:
            evidence.append(Evidence("first_of_them", name, None, "", ctx.now.step))
        return [
            ctx.now.finding(
                "optimizer-divergence", "warning", np.array([], dtype=np.int64), evidence, "shared", kind="second-moments", rank=rank,
                not_before=0 if last < 0 and not logs.get(MOMENTS_CHANGED) else ctx.now.step, consequence=goes_on,
            )
        ]  # fmt: skip


def _weights_of(ctx: Context, module: str) -> npt.NDArray[np.int64]:
    """Rows of the sites of a module's weight."""
    rows = [i for i, f in enumerate(ctx.now.table.facts) if f.module == module and f.operand == "weight"]
    return np.array(rows, dtype=np.int64)
