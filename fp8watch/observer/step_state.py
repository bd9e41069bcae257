"""State of the running step: what it measures, and what has happened in it so far.

Thread:     training, and autograd's

The watch writes what a step measures, before the step begins. The custom ops write what happens in it. `begin` forgets
the latter when the step has been copied out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8watch.observer.nonfinite_checks import nonfinite_outputs
from fp8watch.observer.pass_counter import graph_task
from fp8watch.observer.recompute_values import RecomputeValues
from fp8watch.observer.step_sample import EVERYTHING, StepSample
from fp8watch_agent.guard import Guard

MAX_LOSSES = 4096
"""Losses held for one step: a loop whose steps never end must not fill the memory."""

STUCK_AFTER_PASSES = 20
"""Backward passes without an end of step that are worth a word; more micro-batches than that are rare."""


@dataclass
class StepState:
    """The running step of one attach."""

    guard: Guard

    # ---- what the step measures: written by the watch ----------------------------------------------------------------
    sample: StepSample = EVERYTHING  # the sites whose turn it is
    paused: bool = False  # by the user
    outside: bool = False  # of the windows that attach was given
    warming: bool = False  # the recipe's warm-up: GEMMs multiply unquantised operands
    on_stuck: weakref.WeakMethod[Callable[[], None]] | None = None  # says that no step ends
    on_unwatched: weakref.WeakMethod[Callable[[], None]] | None = (
        None  # hears that the model ran, and no watched module
    )
    on_forward: Callable[[], None] | None = None  # ends the step before, where its optimizers have stepped already
    on_backward: tuple[weakref.WeakMethod[Callable[[], None]], ...] = ()  # hear that a backward has begun

    # ---- what has happened: written by the custom ops ----------------------------------------------------------------
    num_begun: int = 0  # steps
    calls: int = 0  # observations, in order of execution
    forward_seen: bool = False
    backward_seen: bool = False
    root_seen: bool = False  # the model returned, with gradients, and no watched module ran
    returned: bool = False  # ... whatever ran
    num_passes: int = 0  # backward passes; forward passes where no backward of a watched module is seen
    losses: list[Tensor] = field(default_factory=list)
    share_of: int = 1  # ranks, where a loss that adds up is this rank's share of it
    losses_add_up: bool = False  # they are shares of one loss, not each the mean of its micro-batch
    logits: dict[str, Tensor] = field(default_factory=dict)  # attention module -> largest logit
    sees_ahead: dict[str, Tensor | float] = field(
        default_factory=dict
    )  # attention module -> 1: a query saw a later key
    logits_unseen: set[str] | None = None  # attention modules whose logits were never seen in any step; None: has none
    entered: dict[str, Tensor] = field(default_factory=dict)  # Linear -> elements of its input that are not finite
    attention_dtypes: dict[str, str] = field(default_factory=dict)  # attention module -> of what it computes with
    hashed: set[int] = field(default_factory=set)  # rows whose weight was hashed
    held: dict[tuple[int, str], int] = field(default_factory=dict)  # (row, what) to be read again -> calls
    unasked: dict[int, int] = field(default_factory=dict)  # columnwise row -> calls that left it out
    again: RecomputeValues = field(default_factory=RecomputeValues)  # what is recomputed, beside what was computed
    forward_since: bool = False  # of the last backward that was counted
    _task: int = -1
    _resting: int = 0  # modules that ran and were not looked at, since the last backward; of those with a gradient

    def begin(self, sample: StepSample) -> None:
        """Forget the step that has just been copied out."""
        self.num_begun += 1
        self.calls = self.num_passes = self._resting = 0
        self.backward_seen = self.forward_seen = self.root_seen = self.returned = self.losses_add_up = False
        self.on_forward = None
        self.unasked.clear()
        self.hashed.clear()
        self.held.clear()
        self.losses.clear()
        self.logits.clear()
        self.sees_ahead.clear()
        self.entered.clear()
        self.sample = sample

    @property
    def observed(self) -> bool:
        """Whether what happens in this step is to leave."""
        return not self.paused and not self.outside

    @property
    def sampled(self) -> bool:
        """Whether full statistics of any site are taken."""
        return self.sample.any_full

    def holds(self, row: int, what: str) -> bool:
        """Whether something of a row is to be read again in this call of the step: the first, the second, the
        fourth … The first of a recurrent cell reads zeros."""
        num = self.held[row, what] = self.held.get((row, what), 0) + 1
        return num & (num - 1) == 0

    def end_before(self) -> bool:
        """End the step whose optimizers have stepped already; whether there was one."""
        end, self.on_forward = self.on_forward, None
        if end is not None:
            self.guard.run("on_forward", end)
        return end is not None

    def saw_forward(self) -> None:
        """A watched module is in its forward, and it counts."""
        self.end_before()
        self.forward_seen = self.forward_since = True

    def is_noted(self, grad: bool) -> bool:
        """Whether it is noted that a module runs which is not looked at, and whether a backward comes to it: of those whose
        output requires a gradient the first, the second, the fourth … since the last backward; of others the first."""
        if not grad:
            return not self.forward_since
        self._resting += 1
        return self._resting & (self._resting - 1) == 0

    def saw_backward(self) -> None:
        """A watched module is in its backward."""
        self.backward_seen, self._resting = True, 0
        task = graph_task()
        if task != self._task:
            self._task = task
            for hears in self.on_backward:
                if (begins := hears()) is not None:
                    try:
                        begins()
                    except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
                        self.guard.swallow("updates", error)
            if self.forward_since:  # reentrant checkpointing nests a backward for each of its parts
                self.forward_since = False
                self._count_pass()

    def saw_root(self, *, grad: bool) -> None:
        """The model returned. Where no watched module ran in it, this is all that is known of the pass."""
        self.returned |= grad
        if not grad or self.forward_seen:
            return
        if self.on_unwatched is not None and (look := self.on_unwatched()) is not None:
            self.on_unwatched = None  # once
            self.guard.run("replaced", look)
        self.end_before()
        self.root_seen = True
        self._count_pass()

    @property
    def ran(self) -> bool:
        """Whether anything of the model ran since the step began."""
        return self.forward_seen or self.backward_seen or self.root_seen

    def can_end(self, *, frozen: bool) -> bool:
        """Whether there is a step to end; where no watched parameter is trained (`frozen`), a forward is enough."""
        return self.backward_seen or (frozen and self.forward_seen) or (self.root_seen and not self.forward_seen)

    def _count_pass(self) -> None:
        self.num_passes += 1
        if self.num_passes == STUCK_AFTER_PASSES and self.on_stuck is not None and (say := self.on_stuck()) is not None:
            self.guard.run("stuck", say)

    def recount(self, column: int | None) -> bool:
        """In a recomputation that asks for a columnwise row: whether a first pass left it out, so that it counts now.

        Reentrant checkpointing runs the first pass without gradients, where nothing asks for the columnwise copy.
        """
        if column is None or not self.unasked.get(column):
            return False
        self.unasked[column] -= 1
        return True

    def note_loss(self, loss: Tensor, *, adds_up: bool) -> None:
        """Keep a loss of the step. 0-d."""
        if len(self.losses) < MAX_LOSSES:
            self.losses.append(loss.detach().clone())
            self.losses_add_up |= adds_up

    def loss(self) -> Tensor:
        """The loss of the step: the sum of its shares, or the mean over its micro-batches. [] float32"""
        if len(self.losses) == 1 and not self.losses_add_up:
            return self.losses[0].float()
        losses = torch.stack([x.float() for x in self.losses])
        return losses.sum() * self.share_of if self.losses_add_up else losses.mean()

    def note_entered(self, entered: tuple[str, Tensor] | None) -> None:
        """Keep how much of what a Linear was given is not finite, if anything is or the device alone knows."""
        if entered is None or (count := nonfinite_outputs(entered[1], overflow=True)) is None:
            return
        before = self.entered.get(entered[0])
        self.entered[entered[0]] = count if before is None else before + count

    def note_logits(self, fqn: str, largest: Tensor) -> None:
        """Keep the largest logit of this step; −Inf is what masks are made of. [] float32"""
        before = self.logits.get(fqn)
        self.logits[fqn] = largest if before is None else torch.maximum(before, largest)
        if self.logits_unseen:  # one inside the other is one place where logits are made
            self.logits_unseen = {
                name
                for name in self.logits_unseen
                if not (f"{fqn}.".startswith(f"{name}.") or name.startswith(f"{fqn}."))
            }
