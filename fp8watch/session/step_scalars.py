"""Scalars of the running step: what training says of it, and what is seen of its loss and its optimizer.

Shapes:     numbers, or tensors of one element where they are     Thread: training
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.local_part import is_dtensor, local_part
from fp8watch.observer.batch_facts import BatchFacts
from fp8watch.observer.step_state import MAX_LOSSES, StepState
from fp8watch.session.gradient_norm import GradientNorm
from fp8watch.session.standing_state import StandingState, merge
from fp8watch.session.step_optimizer import FOUND_INF, updates_made
from fp8watch_agent.guard import Guard
from fp8watch_agent.nonfinite_names import NONFINITE_INPUT
from fp8watch_agent.training_names import CLIP_NORM, OPTIMIZER_BEGINS, SEES_AHEAD

LOSS_MISSING_STEPS = 20
MAX_BATCH_ID = 512
MADE_BEFORE = 2
"""Updates that an optimizer has behind it where steps begin at 0, from which on that is said: a trial step is one."""


class StepScalars:
    """Those of the steps of one watch.

    Args:
        guard: counts what goes wrong.
        say: tells people that no loss is seen.
        norms: of the gradients that training clips.
        standing: what optimizers keep, between their steps.
    """

    def __init__(self, guard: Guard, say: Callable[[str], None], norms: GradientNorm, standing: StandingState) -> None:
        self._guard, self._say, self.norms, self.standing = guard, say, norms, standing
        self.batches = BatchFacts()
        self._logged: dict[str, Any] = {}
        self._left_apart: set[str] = set()  # names that were said not to be recorded
        self._batch_id: str | None = None
        self.of_optimizer: dict[str, Any] = {}
        """Of the optimizer and the GradScaler: numbers, or tensors on the device. They stay until there are others."""
        self.of_state: dict[str, Any] = {}
        """Of what optimizers keep: what changed in it since they stepped last."""
        self._losses: list[tuple[Tensor, bool]] = []  # that were computed behind the model
        self._steps_without_loss = 0
        self._has_begun = False  # an optimizer has stepped

    @property
    def loss_is_missing(self) -> bool:
        """Whether the last steps had no loss."""
        return self._steps_without_loss >= LOSS_MISSING_STEPS

    def log(self, values: Mapping[str, float | Tensor], batch_id: str | None) -> None:
        """Take what training says of the step that ends next. What is no number costs itself alone, and is said once of each name."""
        for name, value in values.items():
            try:
                if not isinstance(value, Tensor):
                    self._logged[name] = _number(value)
                elif (here := self._here(name, value)) is not None:
                    self._logged[name] = here.detach().clone()
            except Exception as error:  # noqa: BLE001 - whatever it is: the others are numbers
                why = f"{type(value).__name__} ({str(error)[:100]})"
                self._leave_apart(name, why, "give a number, or a tensor of one element")
        if batch_id is not None:
            self._batch_id = str(batch_id)[:MAX_BATCH_ID]

    def _here(self, name: str, value: Tensor) -> Tensor | None:
        """A tensor's value on this rank; None of a DTensor that each rank has a part of, as FSDP2's norm of gradients is: to add
        the parts up would wait for the other ranks. Nor of what has no mean that is a number. That is said once of each."""
        here = value
        if is_dtensor(value):
            sharded: Any = value
            if not all(placement.is_replicate() for placement in sharded.placements):
                self._leave_apart(
                    name,
                    "a DTensor of which each rank has a part, and putting it together would wait for the other ranks",
                    f"give {name}.full_tensor(), on all of them",
                )
                return None
            here = local_part(value)
        if here.is_complex() or not here.numel():
            self._leave_apart(name, f"a tensor of {here.dtype} {list(here.shape)}", "give a real number")
            return None
        return here

    def _leave_apart(self, name: str, what: str, remedy: str) -> None:
        """Say once of a name that what it was given is not recorded."""
        if name not in self._left_apart:
            self._left_apart.add(name)
            self._say(f"watch.log({name}=…) was given {what}: it is not recorded; {remedy}")

    def see_loss_scale(self, scale: Tensor) -> None:
        """Keep the scale that a GradScaler works with: a copy where it lies on a device, as the next update writes into it."""
        self.of_optimizer["loss_scale"] = float(scale) if scale.device.type == "cpu" else scale.detach().clone()

    def see_loss(self, loss: Tensor, adds_up: bool) -> None:
        """Keep the loss of a micro-batch that was computed behind the model; what the model returns wins. []"""
        if len(self._losses) < MAX_LOSSES:
            self._losses.append((loss.detach().clone(), adds_up))

    def before(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """An optimizer is about to step: what it keeps is looked at, and gradients that nobody clips any more."""
        if not self._has_begun:
            self._has_begun = True
            if not step:
                self._guard.run("numbers", self._say_what_came_before, optimizer)
        if self.norms.to_measure:
            self._guard.run("norm", self.norms.measure, optimizer)
        if found := self.standing.before(optimizer):
            merge(self.of_state, found)

    def take(self, step: StepState) -> tuple[dict[str, Any], str | None]:
        """All of the step that ends, by name, and the name of its data; what belongs to it alone is forgotten. What
        training said wins over what was seen."""
        try:
            return self._collected(step), self._batch_id
        except Exception as error:  # noqa: BLE001 - the step ends without them, and the guard counts
            self._guard.swallow("values", error)
            return {}, self._batch_id
        finally:
            self._logged.clear()
            self._losses.clear()
            self.of_state.clear()
            for of_one_step in (FOUND_INF, OPTIMIZER_BEGINS):
                self.of_optimizer.pop(of_one_step, None)
            self._batch_id = None

    def _say_what_came_before(self, optimizer: torch.optim.Optimizer) -> None:
        made = updates_made(optimizer)
        if made is not None and made >= MADE_BEFORE:
            self._say(
                f"{type(optimizer).__name__} has made {made} updates before the first of this run, whose steps are numbered from 0: "
                f"attach(start_step={made}) or watch.load_state_dict() keeps the numbers of training that goes on"
            )

    def _collected(self, step: StepState) -> dict[str, Any]:
        values = {name: value for name, value in self.of_optimizer.items() if value is not None}
        values.update(self.of_state)
        values.update(self.batches.take())
        values.update(step.again.take())
        values.update({f"max_attention_logit/{fqn}": largest for fqn, largest in step.logits.items()})
        values.update({SEES_AHEAD + fqn: ahead for fqn, ahead in step.sees_ahead.items()})
        values.update({NONFINITE_INPUT + fqn: count for fqn, count in step.entered.items()})
        for loss, adds_up in () if step.losses else tuple(self._losses):
            step.note_loss(loss, adds_up=adds_up)
        if step.losses:
            values["loss"] = step.loss()
        if (norm := self.norms.take()) is not None:
            values["grad_norm"] = norm
        if (limit := self.norms.take_limit()) is not None:
            values[CLIP_NORM] = limit
        values.update(self._logged)
        self._steps_without_loss = 0 if "loss" in values else self._steps_without_loss + 1
        if self._steps_without_loss == LOSS_MISSING_STEPS:
            self._say(f"loss not seen for {LOSS_MISSING_STEPS} steps: call watch.log(loss=...)")
        return values


def _number(value: Any) -> float:
    try:
        return float(value)
    except TypeError:
        if not hasattr(value, "item"):  # as an array of one element has
            raise
        return float(value.item())
