"""What is remembered of one session: its order of steps, its last cause, and what follows from a cause.

Shapes:     findings of one step -> the same, told as cause or consequence
Thread:     detect worker
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from fp8watch_agent.wire import SPLIT_SHIFT
from fp8watch_server.detect.families import degenerate
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.precedence import NONFINITE_MODES
from fp8watch_server.detect.step_view import StepView
from fp8watch_server.detect.tallies import Seen

CONSEQUENCE_STEPS = 6
"""Observed steps for which a cause answers for what follows it."""
AFTER_INVARIANT_STEPS = 20
"""Observed steps after a broken quantiser in which growth of the weights is its consequence, not a cause."""
NO_LOSS_STEPS = 20
NEVER = -(1 << 40)


@dataclass
class Attempt:
    """What a training that began again began with: its ranks come one after the other."""

    step: int | None = None
    number: int = 0  # as registered; 0: not known

    def is_joined_at(self, step: int | None, number: int, *, took_part: bool, within: int) -> bool:
        """Whether a rank that begins again does so with the others, and not once more.

        Args:
            step: its first.
            number: of its attempt, as it registered; 0: not known.
            took_part: it has been heard in this attempt.
            within: steps between its first one and theirs, at most.
        """
        if number and self.number:
            return number == self.number
        return not took_part and self.step is not None and step is not None and abs(step - self.step) <= within


@dataclass
class Stream:
    """One session (one attach of one process, so one rank)."""

    rank: int
    zero_tiles: degenerate.ZeroTiles
    num_steps: int = 0  # observed, in order
    last_step: int | None = None
    stride: int = 1
    apart: int = 1  # steps between the last two observed
    cause: Finding | None = None  # the last cause of non-finite values or of divergence
    cause_seen: int = NEVER  # num_steps when it or a consequence was last seen
    invariant_seen: int = NEVER
    loss_seen: int | None = None  # num_steps of the last loss
    cause_step: int = 0  # the step in which the cause or a consequence was last seen
    last_seq: int = -1  # of whole batches
    norm_broken: int | None = None  # num_steps of the last whose gradient norm was not finite
    norm_step: int = 0  # its number
    heard: int = 0  # Engine._num_batches when its last batch came
    attempt: int = 0  # Engine._restarted while it began, or went on
    seen: Seen = field(default_factory=Seen)  # sequence numbers of its batches

    @staticmethod
    def upgraded(fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of a state that an earlier version saved, with the names of this one."""
        if "seqs" in fields:
            fields["seen"] = Seen()
            for seq in fields.pop("seqs"):
                fields["seen"].add(seq)
        if fields.get("last_seq", -1) > 0:  # of halves, once
            fields["last_seq"] &= (1 << SPLIT_SHIFT) - 1
        return fields

    def advance(self, step: int) -> bool:
        """The next step; False where it is none, because it came late."""
        if self.last_step is not None:
            if step <= self.last_step:
                return False
            apart = step - self.last_step
            if self.num_steps == 1 or apart == self.apart:  # one gap is a gap, two alike are the sampling
                self.stride = apart
            self.apart = apart
        self.last_step = step
        self.num_steps += 1
        return True

    @property
    def poisoned(self) -> bool:
        """Non-finite values were just seen: no statistic says anything."""
        recent = self.num_steps - self.cause_seen <= CONSEQUENCE_STEPS
        return recent and self.cause is not None and self.cause.mode in NONFINITE_MODES

    @property
    def quantiser_is_sound(self) -> bool:
        """No broken invariant within the last steps."""
        return self.num_steps - self.invariant_seen > AFTER_INVARIANT_STEPS

    def sees_loss(self) -> bool:
        """A loss came within the last steps."""
        return self.loss_seen is not None and self.num_steps - self.loss_seen < NO_LOSS_STEPS

    def note_cause(self, found: Finding) -> None:
        """A cause whose consequences are to be expected."""
        self.cause, self.cause_seen, self.cause_step = found, self.num_steps, found.step

    def as_cause_or_consequence(self, found: Finding, in_order: bool) -> Finding:
        """A cause keeps its name; what follows from a cause that is known is reported under that cause's name."""
        cause, since = self.cause, self.num_steps - self.cause_seen
        if not in_order:  # it came late, or training went back: the steps themselves say how far they are apart
            since = max(since, abs(found.step - self.cause_step) // self.stride)
        recent = cause is not None and since <= CONSEQUENCE_STEPS and _follows(cause, found, since)
        self.cause_seen, self.cause_step = self.num_steps, found.step
        if cause is None or not recent:
            if (
                found.extra.get("weight_born")
                and self.norm_broken is not None
                and self.num_steps <= self.norm_broken + 1
            ):
                found = replace(found, extra={**found.extra, "norm_step": self.norm_step})
            if cause is None or since > CONSEQUENCE_STEPS or cause.mode != found.mode:
                self.cause = found
            return found
        return replace(
            cause,
            step=found.step,
            evidence=(Evidence("nonfinite_sites", found.extra["num_sites"], 0, "sites", found.step),),
            extra={**found.extra, "sites": [*_named(cause), *found.extra["sites"]], "consequence": True},
        )

    def note_norm(self, view: StepView) -> None:
        """Whether the gradient norm of this step is finite: an update by one that is not breaks the weights of the next."""
        norm = view.scalar("grad_norm")
        if norm is not None and not math.isfinite(norm):
            self.norm_broken, self.norm_step = self.num_steps, view.step

    def poisoned_checkpoint(self, view: StepView) -> Finding | None:
        """A checkpoint was saved (`watch.log(checkpoint_saved=1)`) while weights are, or are about to be, non-finite."""
        if self.cause is None or not self.poisoned or not view.logs().get("checkpoint_saved"):
            return None
        news = Evidence("checkpoint_saved", view.step, "before the failure", "step", self.cause.step)
        extra = {**self.cause.extra, "consequence": True, "news": [news]}
        return replace(self.cause, step=view.step, evidence=(news,), extra=extra)


def _named(cause: Finding) -> list[int]:
    return [] if cause.site is None else [cause.site]


def _follows(cause: Finding, found: Finding, since: int) -> bool:
    """Whether `found`, `since` observed steps after `cause` was last seen, is its consequence.

    Weights change only by an update, so non-finite weights come from an earlier step. A cause that made NaN keeps
    making it in the steps right behind; laundered Infs do not, so what comes after them stands alone unless the weights
    tell.
    """
    if found.extra.get("weight_born"):
        return True
    if found.mode == cause.mode or found.mode == "zero-tile-eps":
        return False
    if cause.mode == "optimizer-divergence":
        return True
    return cause.mode != "inf-laundering" and since <= 1
