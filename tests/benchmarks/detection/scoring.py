"""What is counted of one run: found or not, when, by which name, at which place, and what else was said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from benchmarks.detection.public_rules import RULES, episodes
from detect.folded import Folded
from detect.play import place_is_right
from detect.scenarios import Expected

from fp8watch_server.detect.finding import SiteFacts
from fp8watch_server.detect.precedence import explains


@dataclass
class Outcome:
    """One faulty run."""

    name: str
    level: int
    mode: str
    found: bool = False
    delay: int | None = None
    said: str = "nothing"  # mode of the first incident at or after the onset
    place: bool = False
    verdict: bool = False
    num_incidents: int = 0
    num_false: int = 0  # incidents that are neither the fault nor its consequence
    lead: int | None = None
    rules: dict[str, int | None] = field(default_factory=dict)  # public rule -> delay


@dataclass
class Healthy:
    """Healthy steps, and what was raised in them."""

    name: str
    num_steps: int = 0
    pages: int = 0
    warnings: int = 0
    infos: int = 0
    named: list[str] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)


def judge(
    name: str,
    level: int,
    expected: Expected,
    onset: int,
    incidents: Sequence[Folded],
    twin: Sequence[Folded],
    sites: dict[int, SiteFacts],
    *,
    loss_from: int = 0,
) -> Outcome:
    """A faulty run against its healthy twin: what the twin says as well is no detection."""
    out = Outcome(name, level, expected.mode)
    in_twin = {i.mode for i in twin}
    after = [i for i in incidents if i.last_step >= onset and (i.severity != "info" or i.mode == expected.mode)]
    after = [i for i in after if i.mode not in in_twin or i.mode == expected.mode]
    hit = next((i for i in after if expected.mode in i.modes), None)
    out.num_incidents = len(after)
    if after:
        out.said = after[0].mode
    if hit is not None and expected.mode not in in_twin:
        out.found = True
        out.delay = max(0, min(hit.modes[expected.mode], *(s for s in hit.modes.values())) - onset)
        out.place = place_is_right(sites, hit.named, expected)
        out.verdict = expected.verdict in ("any", hit.named.verdict)
        if loss_from:
            out.lead = onset + loss_from - (onset + out.delay)
    out.num_false = sum(
        1
        for i in after
        if i.mode != expected.mode and not explains(expected.mode, i.mode) and expected.mode not in i.modes
    )
    return out


def rules_of(
    loss: np.ndarray, norm: np.ndarray, amax: np.ndarray, onset: int, twin: dict[str, list[int]] | None = None
) -> dict[str, int | None]:
    """Delay of each public rule; None where it says nothing that it does not say of the twin."""
    out: dict[str, int | None] = {}
    for name, rule in RULES.items():
        alarms = [t for t in rule(loss, norm, amax) if t >= onset]
        known = set(twin[name]) if twin else set()
        fresh = [t for t in alarms if t not in known]
        out[name] = fresh[0] - onset if fresh else None
    return out


def rule_alarms(loss: np.ndarray, norm: np.ndarray, amax: np.ndarray) -> dict[str, list[int]]:
    """Alarms of each public rule."""
    return {name: rule(loss, norm, amax) for name, rule in RULES.items()}


def count_healthy(total: Healthy, incidents: Sequence[Folded], num_steps: int, alarms: dict[str, list[int]]) -> None:
    """Add one healthy run."""
    total.num_steps += num_steps
    for i in incidents:
        total.pages += i.severity == "critical"
        total.warnings += i.severity == "warning"
        total.infos += i.severity == "info"
        total.named.append(i.mode)
    for name, steps in alarms.items():
        total.rules[name] = total.rules.get(name, 0) + len(episodes(steps))


def upper_bound(count: int, steps: int) -> float:
    """95 % upper bound of a Poisson rate per 1000 steps, exact (Garwood)."""
    if steps == 0:
        return math.inf
    low, high = 0.0, 10.0 * (count + 3)
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(
            math.exp(-middle + k * math.log(max(middle, 1e-300)) - math.lgamma(k + 1)) for k in range(count + 1)
        )
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return 1000 * high / steps
