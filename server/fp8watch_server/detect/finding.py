"""What detection says: one failure mode, at one step of one rank, at the place where it began.

Shapes:     frozen data
Thread:     any

A finding covers every site that was hit in that step of that rank: a NaN that reached sixty modules is one finding.
`site` is the first of them in the order of execution; the others are in `extra["sites"]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fp8watch_agent.record import is_probe
from fp8watch_server.detect.precedence import (
    BLIND,
    EXACT_MODES,
    FACTOR,
    FALL,
    HABIT,
    IN_EFFECT,
    LEAP,
    LOADED,
    LOSS_FALL,
    NONFINITE_MODES,
    ON_THE_WAY,
    WEIGHT_FIRST,
    WEIGHT_LEAP,
    latest,
)

Severity = Literal["info", "warning", "critical"]
Verdict = Literal["fp8", "shared", "unknown"]

MAX_SITES_IN_FINDING = 256
"""Site ids carried by one finding; `extra["num_sites"]` counts all of them."""

LOSS_FLOW = 1 << 40
"""The place of the loss in the order of execution: after every forward operand."""


OBSERVED = "observe"
"""The recipe of a site that computes as before: nothing of it is quantised."""
UNOBSERVED = "blind"
"""The topic of a `recipe-mismatch` that says of what a session announced that nobody observes it: it stands for as long as the session
says so."""

_OF_KIND = {
    "in-effect": IN_EFFECT,
    "gradient-apart": ON_THE_WAY,
    "gradient-sum": ON_THE_WAY,
    "gradients-flushed": ON_THE_WAY,
    "gradients-cut-off": ON_THE_WAY,
    "weights-written": BLIND,
    "gradient-noise": BLIND,
    "gradients-other": BLIND,
    "no-replicas": BLIND,
    "frozen-written": BLIND,
    "repeated": BLIND,
    "copies": BLIND,
    "labels": BLIND,
    "composition": BLIND,
    "overflow": BLIND,
}
"""`extra["kind"]` -> what precedence knows it as."""
_HABITS = frozenset({"update-times", "update-astray", "weights-rounded"})
"""`extra["kind"]` of what is information where a training began with it."""


@dataclass(frozen=True)
class SiteFacts:
    """Static facts of one quantised operand, or of what a probe looks at, as registered."""

    id: int
    module: str
    operand: str  # input | weight | grad_output | output
    direction: str  # rowwise | columnwise
    gemm: str  # fprop | dgrad | wgrad
    order: int  # place in data-flow order within the model
    shape: tuple[int, int]
    tile: tuple[int, int]
    format: str
    power_2_scale: bool
    eps: float
    recipe: str
    backend: str

    @property
    def is_probe(self) -> bool:
        """Whether no quantiser reads it: what a module returned, or what a Linear in high precision was given."""
        return is_probe(self.operand, self.recipe)


class _SiteLike(Protocol):
    """What `facts_of` reads: the agent's Site, or a row of the site table."""

    id: Any
    module: Any
    operand: Any
    direction: Any
    gemm: Any
    order: Any
    shape: Any
    tile: Any
    format: Any
    power_2_scale: Any
    eps: Any
    recipe: Any
    backend: Any


def facts_of(sites: Iterable[_SiteLike]) -> dict[int, SiteFacts]:
    """Facts by site id, from anything that has the attributes of `fp8watch_agent.record.Site`."""
    return {
        int(s.id): SiteFacts(
            id=int(s.id),
            module=str(s.module),
            operand=str(s.operand),
            direction=str(s.direction),
            gemm=str(s.gemm),
            order=int(s.order),
            shape=(int(s.shape[0]), int(s.shape[1])),
            tile=(int(s.tile[0]), int(s.tile[1])),
            format=str(s.format),
            power_2_scale=bool(s.power_2_scale),
            eps=float(s.eps),
            recipe=str(s.recipe),
            backend=str(s.backend),
        )
        for s in sites
    }


LEFT_OUT = "left-out"
"""Kind of a notice: steps of a session that came when those behind them were judged."""


@dataclass(frozen=True)
class Notice:
    """Something that is worth a line, and no fault: a gap, a restart, steps out of order, a rank that went silent."""

    kind: str  # gap | late | left-out | restart | rewind | resumed | silent-rank
    step: int
    rank: int
    text: str
    session: str = ""  # of LEFT_OUT, which is one line for all such steps of a session
    num: int = 1


@dataclass(frozen=True)
class Evidence:
    """One number that speaks for the finding. `baseline` is what it was, or must be; None where neither is known."""

    field: str
    value: float | int | str | None
    baseline: float | int | str | None = None
    unit: str = ""
    since_step: int | None = None

    def as_json(self) -> dict[str, Any]:
        """As CONTRACT names it; non-finite numbers stay floats, the store writes them as strings."""
        return {
            "field": self.field,
            "value": self.value,
            "baseline": self.baseline,
            "unit": self.unit,
            "since_step": self.since_step,
        }


@dataclass(frozen=True)
class Finding:
    """One failure mode in one step of one rank.

    `extra` holds: `sites` (ids, the named one first), `num_sites`, `loss_seen`, `stride` (steps between samples),
    `consequence` (the spread of a cause that is already known: never opens an incident), `weight_born` (only already
    broken weights were seen: another rank may hold the cause), `operands` (the roles that are hit, for the fix),
    `batch_id`, `began` and `not_before` (see `onset` and `earliest`), `leap` (a jump in one step, of a mode that is a
    slope by its name), `seen` (its onset is known to the step), `apart` (steps between looks that have turns of their own), `sampled` (it rests on what only full samples hold), and what a mode adds for its own text.
    """

    mode: str
    severity: Severity
    step: int
    rank: int
    site: int | None
    tile: tuple[int, int] | None
    element: tuple[int, int] | None
    evidence: tuple[Evidence, ...]
    verdict: Verdict
    rank_in_flow: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def onset(self) -> int:
        """The step in which it began, as far as is known: of a slow mode, steps before it was understood."""
        return min(self.step, int(self.extra.get("began", self.step)))

    def earliest(self, window: int) -> int:
        """The step before which it cannot have begun.

        Args:
            window: steps by which the onset of a slow mode is uncertain.
        """
        given = self.extra.get("not_before")
        if given is not None:
            return min(int(given), self.onset)
        return self.onset - (0 if self.mode in EXACT_MODES else window)

    def latest(self, window: int) -> int:
        """The step after which it cannot have begun: its onset, where that was seen (`extra["seen"]`)."""
        return self.onset if self.extra.get("seen") else latest(self.kind, self.onset, window)

    @property
    def scalar(self) -> str:
        """The logged scalar that it is about; "" where it is about a place or the whole step."""
        return str(self.extra.get("name", "")) if self.mode == "scalar-shift" else ""

    @property
    def topic(self) -> str:
        """Which of the things that its mode tells of: a batch that comes again is none whose loss jumps."""
        if self.mode in NONFINITE_MODES:  # whether NaN or Inf
            return ""
        return UNOBSERVED if self.extra.get("blind") else str(self.extra.get("kind") or "")

    @property
    def kind(self) -> str:
        """Its mode, or one of those that only precedence knows: what explains a leap is not what explains a slope."""
        if self.severity == "info" and self.extra.get("kind") in _HABITS:
            return HABIT
        if (told := _OF_KIND.get(str(self.extra.get("kind")))) is not None:
            return BLIND if told == ON_THE_WAY and self.severity == "info" else told  # information takes nothing in
        if self.mode == "outlier-growth" and self.extra.get("leap"):
            return LEAP
        if self.mode == "silent-data-corruption" and self.extra.get("octaves") is not None:
            return WEIGHT_FIRST if self.extra.get("first") is True else WEIGHT_LEAP
        if self.mode == "recipe-mismatch" and self.extra.get("blind"):
            return BLIND
        if self.mode == "recipe-mismatch" and self.severity == "info":
            return HABIT
        if self.mode == "recipe-mismatch" and self.extra.get("loaded"):
            return LOADED
        if self.mode == "bad-batch" and self.extra.get("fell"):
            return LOSS_FALL
        kinds = {"fall": FALL, "factor": FACTOR} if self.mode == "scalar-shift" else {}
        return kinds.get(str(self.extra.get("why")), self.mode)
