"""What updates did to weights, and gradients that are not those of their step: modes 13, 15 and 10.

Shapes:     numbers of a few weights per step and rank, only where there is news -> findings of one step
Thread:     detect worker

No baseline: bits that the optimizer left are there or not, a gradient is a multiple of the last one to the last rounding or not,
a weight that moved uses its last bits or does not. Where chance or a habit of the trainer could do it once (elements that move with their
moment), it must be seen again; weights that shrink together are only sent where they did so at several looks in a row. What is done on purpose to all weights at once, averages that are
written back for one, is none of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8watch_agent.update_names import (
    ASTRAY,
    COARSE,
    COARSE_BITS,
    DECAY,
    GRADIENT_APART,
    GRADIENT_CUT_OFF,
    GRADIENTS_FEW,
    GRADIENTS_FLUSHED,
    GRADIENTS_KEPT,
    GRADIENTS_LEFT,
    GRADIENTS_NORMAL,
    GRADIENTS_OTHER,
    OF,
    RATE_PARAMETERS,
    RATE_TIMES,
    RECOMPUTED,
    REPEATED,
    SHRINK,
    STEPPED_AGAIN,
    UPDATE_TIMES,
    UPDATES_LOOKED,
    UPDATES_LOST,
)
from fp8watch_server.detect.context import Context
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Evidence, Finding, Severity, Verdict

REPEAT_STEPS = 5
"""Steps after which what goes on is told again, so that its incident stays open."""
AGAIN = {
    "weights-rounded": (2, 24),
    "update-astray": (2, 96),
    "update-times": (2, 96),
    "gradients-other": (1, 96),
    "gradients-cut-off": (2, 160),
}
"""(times that it must be seen, each within so many steps of the one before)."""
MAX_SEEN = 8
FROM_THE_START, BY_HABIT = 24, 64
"""Steps of a run. Weights that were coarse before the first, and updates that went astray before the second, are meant to be, perhaps."""
FLUSHED_SHARE = 0.02
"""Of the elements of a gradient: from here on those that arrive as 0 are what is wrong with it."""
SAME_STEPS = 64
"""Gradients that arrive otherwise within so many steps of each other do so for one reason: each parameter has its turn now and then."""
ROUND_STEPS, OTHERS_APART = 40, 16
"""Steps in which each parameter has had its turn; and between two in which one whose gradient always was another has its own."""
FAR_APART = 0.05
"""Of its norm; what is nearer is information."""
RATE_LEAP = 3.0
"""As of the learning rate of all: a leap, not a schedule."""
Logs = Mapping[str, float]


class _Hit(NamedTuple):
    kind: str
    mode: str
    severity: Severity
    about: str  # the tensor or operand that is named
    evidence: list[Evidence]


@dataclass
class _Arrivals:
    """Gradients that arrive otherwise, from the first that was seen on."""

    kind: str
    mode: str
    about: str
    names: set[str]
    first: int  # step
    last: int
    apart: int = 1  # steps between the last two
    few: bool = False  # none of them has elements enough to tell noise from anything else
    flushed: float = 0.0  # share of its elements that became 0, of the one that lost most
    flushed_of: str = ""
    flushed_at: int = 0  # step


class WeightUpdates(Detector):
    """What each rank says of its last update."""

    modes = ("optimizer-divergence", "silent-data-corruption", "recipe-mismatch", "gradient-underflow")
    parts = (_Arrivals,)
    between_samples = True
    _arriving: _Arrivals | None = None  # a state that was saved before has none

    def __init__(self, num_sites: int = 0) -> None:
        self._told: dict[str, int] = {}
        self._seen: dict[str, list[int]] = {}  # kind and name -> steps
        self._num_steps = 0
        self._first: dict[str, int] = {}  # kind and name -> how many steps were seen before it
        self._arriving = None

    def grow(self, num_sites: int) -> None:
        """Not by site."""

    def frozen(self) -> None:
        """Baselines of sites go on."""

    def resume(self) -> None:
        """What was followed is over; how many steps the run has stays."""
        self._told.clear()
        self._seen.clear()
        self._arriving = None

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        self._num_steps += 1
        found: dict[str, Finding] = {}
        for view in ctx.now.views:
            logs = view.logs()
            if (
                not any(
                    name in logs
                    for name in (GRADIENTS_LEFT, STEPPED_AGAIN, UPDATES_LOOKED, RATE_TIMES, GRADIENTS_OTHER)
                )
                and not any(name.startswith((RECOMPUTED, GRADIENT_APART, GRADIENT_CUT_OFF)) for name in logs)
                and not (view.scalar("lr") or 0.0) < 0
            ):
                continue
            for kind, told in self._of_rank(ctx, view.rank, logs, view.scalar("lr")):
                found.setdefault(kind, told)
        return list(found.values())

    def _of_rank(self, ctx: Context, rank: int, logs: Logs, lr: float | None) -> list[tuple[str, Finding]]:
        step, about = ctx.now.step, next((n.removeprefix(OF) for n in logs if n.startswith(OF)), "")
        of = f"of {int(logs.get(UPDATES_LOOKED, 0))} looked at"
        hits: list[_Hit] = []
        if num := int(logs.get(GRADIENTS_LEFT, 0)):
            kept = f"of {int(logs.get(GRADIENTS_KEPT, num))} looked at"
            hits.append(
                _Hit(
                    "gradients-left",
                    "optimizer-divergence",
                    "warning",
                    "",
                    [Evidence("gradients_left", num, 0, kept, step)],
                )
            )
        if lr is not None and lr < 0:
            below = [Evidence("lr", _short(lr), 0, "at least", step)]
            hits.append(_Hit("rate-below-zero", "optimizer-divergence", "warning", "", below))
        hits += [*self._arrivals(logs, step), *self._cut_off(logs, step)]
        if logs.get(STEPPED_AGAIN, 0.0) > 0:
            twice = [Evidence("updates_of_one_gradient", 2, 1, "", max(0, step - 1))]
            hits.append(_Hit("stepped-again", "optimizer-divergence", "warning", "", twice))
        if logs.get(RATE_TIMES, 0.0) >= RATE_LEAP:
            rate = [
                Evidence("rate_times", _short(logs[RATE_TIMES]), 1, "of the others' rate", step),
                Evidence("parameters", int(logs.get(RATE_PARAMETERS, 1)), None, "", step),
            ]
            hits.append(_Hit("rate-of-group", "optimizer-divergence", "warning", about, rate))
        if num := int(logs.get(REPEATED, 0)):
            same = [Evidence("gradients_repeated", num, 0, of, step)]
            hits.append(_Hit("gradients-repeated", "silent-data-corruption", "warning", about, same))
        if (share := logs.get(ASTRAY, 0.0)) > 0 and self._again("update-astray", about, step):
            astray = [Evidence("update_astray", _short(share), 0, "share of the update", step)]
            habit: Severity = "warning" if self._first[f"update-astray {about}"] > BY_HABIT else "info"
            hits.append(_Hit("update-astray", "silent-data-corruption", habit, about, astray))
        if (times := logs.get(UPDATE_TIMES, 0.0)) > 0 and self._again("update-times", "", step):
            size = [
                Evidence("update_times", _short(times), 1, "of what moments and rate say", step),
                Evidence("weights", int(logs.get(UPDATES_LOOKED, 0)), None, "looked at", step),
            ]
            usual: Severity = "warning" if self._first["update-times "] > FROM_THE_START else "info"
            hits.append(_Hit("update-times", "optimizer-divergence", usual, "", size))
        if (num := int(logs.get(COARSE, 0))) and self._again("weights-rounded", "", step):
            bits = [
                Evidence("weight_bits", int(logs.get(COARSE_BITS, 16)), 24, "bits at most", step),
                Evidence("weights", num, 0, of, step),
                Evidence("updates_lost", _short(logs.get(UPDATES_LOST, 0.0)), 0, "share of the elements", step),
            ]
            begins: Severity = "warning" if self._first["weights-rounded "] > FROM_THE_START else "info"
            hits.append(_Hit("weights-rounded", "recipe-mismatch", begins, about, bits))
        if (shrink := logs.get(SHRINK, 0.0)) > 0:
            shrinks = [
                Evidence("weights_shrink", _short(shrink), _short(logs.get(DECAY, 0.0)), "share a step", step),
                Evidence("weights", int(logs.get(UPDATES_LOOKED, 0)), None, "all that were looked at", step),
            ]
            hits.append(_Hit("weights-shrink", "optimizer-divergence", "warning", "", shrinks))
        for name, value in logs.items():
            if name.startswith(RECOMPUTED):
                off = [Evidence("recompute_differs", _short(value), 0, "of its norm", step)]
                hits.append(_Hit("recompute", "silent-data-corruption", "warning", name.removeprefix(RECOMPUTED), off))
        return [(hit.kind, self._finding(ctx, rank, hit)) for hit in hits if self._is_due(hit.kind, step)]

    def _arrivals(self, logs: Logs, step: int) -> list[_Hit]:
        """Gradients that an optimizer got otherwise than backward gave them: the one that is furthest off, and later ones under it."""
        off = {n.removeprefix(GRADIENT_APART): v for n, v in logs.items() if n.startswith(GRADIENT_APART) and v > 0}
        if not off:
            if not (num := int(logs.get(GRADIENTS_OTHER, 0))):
                return []
            self._again("gradients-other", "", step)
            others = [Evidence("parameters", num, 0, "so far, whose gradient always was another one", step)]
            return [_Hit("gradients-other", "silent-data-corruption", "info", "", others)]
        name = max(off, key=lambda n: off[n])
        flushed, num_few = logs.get(GRADIENTS_FLUSHED, 0.0), logs.get(GRADIENTS_FEW, 0.0)
        normal, few = logs.get(GRADIENTS_NORMAL, 0.0), num_few >= len(off)
        known = self._arriving
        if known is None or step - known.last > SAME_STEPS or (known.few and not few):
            kind, mode = "gradient-apart", "silent-data-corruption"
            if flushed >= FLUSHED_SHARE:
                kind, mode = "gradients-flushed", "gradient-underflow"
            elif normal > 0 and normal + num_few >= len(off):
                kind, mode = "gradient-noise", "recipe-mismatch"
            known = self._arriving = _Arrivals(kind, mode, name, set(), step, step, few=few)
        elif step > known.last:
            known.apart = step - known.last
        known.last, known.names = step, known.names | set(off)
        if flushed > known.flushed:
            known.flushed, known.flushed_of, known.flushed_at = flushed, name, step
        loud = known.kind == "gradients-flushed" or (
            known.kind == "gradient-apart" and off[name] >= FAR_APART and not few
        )
        far: Severity = "warning" if loud else "info"
        evidence = [
            Evidence("gradient_apart", _short(off[name]), 0, f"of its norm, {name}", step),
            Evidence("parameters", len(known.names), 0, "so far", step),
        ]
        if known.kind == "gradients-flushed":
            lost = Evidence("gradients_flushed", _short(known.flushed), 0, "share of its elements", known.flushed_at)
            evidence.insert(0, lost)
        return [_Hit(known.kind, known.mode, far, known.about, evidence)]

    def _cut_off(self, logs: Logs, step: int) -> list[_Hit]:
        """Gradients of which nothing small is left: the one that lost most. One look alone is information."""
        lost = {
            n.removeprefix(GRADIENT_CUT_OFF): v for n, v in logs.items() if n.startswith(GRADIENT_CUT_OFF) and v > 0
        }
        if not lost:
            return []
        name = max(lost, key=lambda n: lost[n])
        sure: Severity = "warning" if self._again("gradients-cut-off", "", step) or len(lost) > 1 else "info"
        share = Evidence("gradient_cut_off", _short(lost[name]), 0, f"share of its elements, {name}", step)
        return [_Hit("gradients-cut-off", "gradient-underflow", sure, name, [share])]

    def _again(self, kind: str, name: str, step: int) -> bool:
        """Whether it was seen often enough; the first of these steps is when it began."""
        times, within = AGAIN[kind]
        self._first.setdefault(f"{kind} {name}", self._num_steps)
        steps = [s for s in self._seen.get(f"{kind} {name}", []) if s < step]
        if not steps or step - steps[-1] >= within:
            steps = []
        self._seen[f"{kind} {name}"] = [*steps[:1], *steps[1:][-MAX_SEEN:], step]
        return len(steps) + 1 >= times

    def _is_due(self, kind: str, step: int) -> bool:
        last = self._told.get(kind, -REPEAT_STEPS)
        if step - last < REPEAT_STEPS:
            return False
        self._told[kind] = step
        return True

    def _finding(self, ctx: Context, rank: int, hit: _Hit) -> Finding:
        kind, about, facts = hit.kind, hit.about, ctx.now.table.facts
        module, _, operand = about.rpartition(".")
        rows = [i for i, f in enumerate(facts) if module and f.module == module and f.operand == operand]
        seen = self._seen.get(f"{kind} {about if kind == 'update-astray' else ''}", [ctx.now.step])
        began = seen[0]
        if kind == "stepped-again":  # behind the step before, and its update
            began = max(0, began - 1)
        more: dict[str, Any] = {"kind": kind, "first": about, "rank": rank, "began": began, "not_before": began}
        if (known := self._arriving) is not None and kind == known.kind:
            more |= {"began": known.first, "not_before": known.first, "apart": known.apart, "num": len(known.names)}
            more |= {"flushed_of": known.flushed_of, "flushed_at": known.flushed_at}
        if len(seen) > 1:  # looks at updates are some steps apart: the incident stays open from one to the next
            more["apart"] = max(1, seen[-1] - seen[-2])
        if kind == "gradients-other":  # it goes on for as long as the run does
            more["apart"] = max(OTHERS_APART, more.get("apart", 1))
            if ctx.now.step - began >= ROUND_STEPS:
                in_all = Evidence("parameters_in_all", hit.evidence[0].value, 0, "each had its turn", ctx.now.step)
                more["news"] = [in_all]
        ranks, of_rank = ctx.now.ranks, Evidence("rank", rank, None, f"of {len(ctx.now.ranks)}", ctx.now.step)
        evidence = [*hit.evidence, of_rank] if len(ranks) > 1 else hit.evidence
        where = np.array(rows, dtype=np.int64)
        verdict: Verdict = "unknown" if kind == "gradients-cut-off" else "shared"
        return ctx.now.finding(hit.mode, hit.severity, where, evidence, verdict, **more)


def _short(value: float) -> float:
    return float(f"{value:.3g}")
