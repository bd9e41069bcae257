"""Which optimizers end a step: those that hold a watched parameter, or the one that holds copies of them.

Thread:     training

Mixed precision keeps float32 copies of the parameters, and its optimizer holds those: DeepSpeed ZeRO, Megatron, loops
of one's own. Megatron leaves each copy on its parameter as `main_param`. Where nothing leads from parameter to copy, an
optimizer is adopted: one that steps after backwards of watched modules, while none that holds their parameters was met.
An optimizer that takes over the parameters of another one (a second stage of training) ends its first step as any later one; where
the other goes on all the same, both are waited for. One that steps behind another without a backward of its own (AdamW behind
Muon, each over its own part) is waited for until the next forward begins: it may sit steps out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fp8watch.layers.fp8_linear import SITE_KEY
from fp8watch.observer.step_state import STUCK_AFTER_PASSES, StepState
from fp8watch.session.companions import Companions
from fp8watch.session.nested_steps import Nesting
from fp8watch_agent.record import StepStatus
from fp8watch_agent.training_names import OPTIMIZER_BEGINS

Optimizer = torch.optim.Optimizer

ADOPT_AFTER_STEPS = 3
SURE_AFTER_STEPS = 8
"""Steps that one optimizer ended, each behind a backward of watched modules: from then on the next may do without."""
NO_STEP_ENDED = (
    f"no step has ended after {STUCK_AFTER_PASSES} backward passes, so nothing is recorded: call watch.step() after "
    "each optimizer step, or give attach(optimizer=...) the torch optimizer inside your trainer's"
)
NEVER_RAN = (
    f"after {STUCK_AFTER_PASSES} optimizer steps nothing that is watched of the model has run with gradients, so nothing is "
    "recorded: attach to what is trained, after what copies it (an engine, model_init, deepcopy); a weight that its module "
    "masks or normalises before it multiplies with it is not seen"
)
RUNS_NO_MORE = (
    "since step {step} nothing that is watched of the model has run with gradients, and an optimizer of as many parameters has made "
    f"{STUCK_AFTER_PASSES} steps without it: if a copy of the model is trained now (deepcopy, a loaded one), attach to that one"
)
STUCK_FACT = "no_step_ended"
ASK_AGAIN = 32
"""Times that it is asked for one that holds nothing watched, after which the model's parameters are listed anew; before that the first
time, the second, the fourth …"""
PADDING = 1.1  # of flattened copies, over the number of elements that they are of
FOUND_INF = "found_inf"
"""Fact of an optimizer: it was told to skip."""


def num_elements(tensors: Iterable[Any]) -> int:
    """Elements in all; a partitioned parameter of DeepSpeed counts whole."""
    return sum(_numel(t) for t in tensors)


def _numel(t: Any) -> int:
    if isinstance(t, UninitializedParameter):
        return 0
    whole = getattr(t, "ds_numel", None)
    return int(t.numel() if whole is None else whole)


class StepOwner:
    """Which optimizers own the step.

    Args:
        model: that is watched.
        as_they_are: modules that are observed although they were not taken over.
        optimizers: those that the user named; none: found by their parameters.
        say: tells people.
    """

    frozen: bool
    """No watched parameter is trained (LoRA, a trained head): the optimizer of any parameter of the model owns the step,
    and a forward is enough to have something to end, because a frozen site may have no backward."""

    def __init__(
        self,
        model: nn.Module,
        as_they_are: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        say: Callable[[str], None],
    ) -> None:
        self._model, self._as_they_are, self._say = model, list(as_they_are), say
        self._named = weakref.WeakSet(optimizers)
        self._by_name = bool(self._named)
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet(self._named)
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that have stepped, ever
        self._begins = False  # one took over from another in the step that ends now
        self._replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that it took over from, until the next step
        self._strangers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._asked: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )  # of those that hold nothing
        self._parts: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that step inside others: none is waited for
        self._companions = Companions()
        self._passes = 0  # backwards in the running step before the last that stepped
        self._last: Callable[[], Optimizer | None] = _nobody  # that ended a step
        self.may_end = False
        """All have stepped but companions: the step has ended where the next forward begins."""
        self._adopted: Optimizer | None = None
        self._had_one = bool(self._named)  # that holds watched parameters, and may be gone
        self._by_hand = False  # the user ends steps: nothing is adopted
        self._late = 0
        self._num_idle = 0  # optimizer steps in a row before which nothing of the model ran
        self._told_idle = False
        self._num_ended = 0  # steps in a row that optimizers of ours ended, each behind a backward of watched modules
        self._refresh()

    def _refresh(self) -> None:
        modules = [m for m in self._model.modules() if SITE_KEY in m.__dict__] + self._as_they_are
        watched, every = [p for m in modules for p in m.parameters(recurse=False)], list(self._model.parameters())
        self.frozen = not any(p.requires_grad for p in watched)
        watched = every if self.frozen else watched
        copies = (getattr(p, "main_param", None) for p in watched)
        self._ids = {id(p) for p in watched} | {id(c) for c in copies if c is not None}
        self._num_watched = num_elements(p for p in watched if p.requires_grad)
        self._num_trained = num_elements(p for p in every if p.requires_grad)

    def _holds(self, optimizer: Optimizer) -> bool:
        if self._by_name:
            return optimizer in self._named
        ids = {id(p) for g in optimizer.param_groups for p in g["params"]}
        if ids & self._ids:
            return True
        asked = self._asked[optimizer] = self._asked.get(optimizer, 0) + 1
        # another model's, where ours is known: listing takes long, and it steps often
        if self._known and asked & (asked - 1) and asked % ASK_AGAIN:
            return False
        self._refresh()  # FSDP2 replaces parameters after attach, Megatron adds the copies
        return bool(ids & self._ids)

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether it holds a watched parameter, or was adopted; from then on it is waited for."""
        if optimizer in self._known:
            return True
        if not self._holds(optimizer):
            return False
        if self._adopted is not None:  # it was another model's
            self._known.discard(self._adopted)
            self._adopted = None
        self._known.add(optimizer)
        self._had_one = True
        return True

    def meets(self, optimizer: Optimizer, ran: bool, num_passes: int) -> None:
        """A GradScaler is about to let it step, or to skip it."""
        if not self.owns(optimizer) and ran:
            self._adopts(optimizer, num_passes)

    def named(self) -> list[Optimizer]:
        """Those that the user named."""
        return list(self._named)

    def has(self, parameter: int) -> bool:
        """Whether an optimizer that has been met holds the parameter of this id."""
        return any(id(p) == parameter for o in self._known for g in o.param_groups for p in g["params"])

    @property
    def known(self) -> list[Optimizer]:
        """The optimizers that have been met."""
        return list(self._known)

    def owns_any(self, ids: set[int]) -> bool:
        """Whether one of the optimizers that has been met has one of these ids."""
        return any(id(o) in ids for o in self._known)

    def closes(self, optimizer: Optimizer, ran: bool, step: StepState) -> bool:
        """Whether the step of this optimizer ends the step of the run.

        Args:
            optimizer: it has just stepped.
            ran: watched modules ran a backward since the last end.
            step: the running one.
        """
        self._num_idle, self.may_end = 0 if ran else self._num_idle + 1, False
        if not self.owns(optimizer) and not (ran and self._adopts(optimizer, step.num_passes)):
            return False
        self._parts.discard(optimizer)
        again, is_new = optimizer in self._stepped, optimizer not in self._met
        if is_new:
            self._companions.meet(optimizer)
        if self._stepped or not ran:
            same, last = step.num_passes == self._passes, self._last()
            self._companions.follow(optimizer, self._stepped, last, ran=ran, same=same)
        self._passes = step.num_passes
        self._stepped.add(optimizer)
        self._met.add(optimizer)
        goes_on = optimizer in self._replaced
        if not ran and not (step.returned and self._goes_on(optimizer)):
            if goes_on or self._companions.all_of([optimizer]):  # of the step that has ended: none of the next
                self._stepped.discard(optimizer)
            self._num_ended = 0
            return False
        self._replaced = weakref.WeakSet()
        self._begins = is_new and self._takes_over(optimizer)
        if again or goes_on or self._begins:  # the others sit this one out
            self._known = weakref.WeakSet([optimizer])
        waited = [o for o in self._known if o not in self._stepped and o not in self._parts]
        if len(self._known) == 1 or not waited:  # one is this one
            self._ended(optimizer)
            return True
        self.may_end = self._companions.all_of(waited)
        return False

    def _ended(self, optimizer: Optimizer | None) -> None:
        self._stepped.clear()
        self._num_ended += 1
        if optimizer is not self._last():
            self._last = _nobody if optimizer is None else weakref.ref(optimizer)

    def at_forward(
        self, optimizer: Optimizer, close: weakref.WeakMethod[Callable[[StepStatus], None]]
    ) -> Callable[[], None]:
        """What a forward does that finds the step of this optimizer still open: companions sit this one out. It keeps nobody
        alive."""
        ended, stepped = weakref.WeakMethod(self._ended), weakref.ref(optimizer)

        def end() -> None:
            ends, closes, it = ended(), close(), stepped()
            if ends is not None and closes is not None:
                ends(it)
                closes(StepStatus.OK)

        return end

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether it holds all that is trained of each that is still to step: those ended the steps before, and it steps in their stead."""
        waited = [o for o in self._known if o not in self._stepped and o not in self._parts]
        if self._num_ended < SURE_AFTER_STEPS or not waited or not all(_holds_all(optimizer, o) for o in waited):
            return False
        self._replaced.update(waited)
        return True

    def scalars(self, optimizer: Optimizer, nesting: Nesting) -> dict[str, Any]:
        """Those of an optimizer that ends the step, or may end it, and whether it is the first that it ends in another's stead."""
        begins = {OPTIMIZER_BEGINS: 1.0} if self._begins else {}
        found = optimizer_scalars(optimizer, *nesting.inside) | begins
        if len(self._known) > 1 and not self._companions.tells_rate(optimizer):
            found = {name: value for name, value in found.items() if name != "lr" and value is not None}
        return found

    def _goes_on(self, optimizer: Optimizer) -> bool:
        """Whether it steps the model as it did in all the steps before, although no gradient reached a watched module: their
        layers were dropped. It alone owns the step, and holds gradients that are new: those of what is watched were cleared."""
        if self._num_ended < SURE_AFTER_STEPS or self._adopted is not None or list(self._known) != [optimizer]:
            return False
        held = [p for group in optimizer.param_groups for p in group["params"]]
        watched = [p for p in held if id(p) in self._ids and p.requires_grad]
        return all(p.grad is None for p in watched) and any(p.grad is not None for p in held)

    def is_part(self, optimizer: Optimizer, nesting: Nesting) -> bool:
        """Whether it stepped parameters of another that owns the step, within its step: that one ends it."""
        around = [o for o in nesting.around if self.owns(o)]
        if not around or not (optimizer in self._parts or any(_share(optimizer, o) for o in around)):
            return False
        self._parts.add(optimizer)
        if not self._by_name:
            self._known.add(optimizer)
        return True

    def parts(self, nesting: Nesting) -> list[Optimizer]:
        """Those of it that stepped within its step."""
        return [o for o in nesting.inside if o in self._parts]

    def idle(self, optimizer: Optimizer, last_step: int | None, is_watched: Callable[[Optimizer], bool]) -> str:
        """What to say where this was the step of an optimizer, one of so many in a row, before which nothing of the model ran; once.

        Args:
            last_step: that has ended; None: none has.
            is_watched: whether the optimizer ends the steps of some watch.
        """
        if self._num_idle != STUCK_AFTER_PASSES:
            return ""
        if last_step is None:
            return NEVER_RAN
        of_copy = not self._by_hand and optimizer not in self._known and self._holds_copies(optimizer)
        if self._told_idle or not of_copy or is_watched(optimizer):
            return ""
        self._told_idle = True
        return RUNS_NO_MORE.format(step=last_step + 1)

    def ended_by_hand(self) -> bool:
        """`watch.step()` was called: nothing is adopted from now on. True where an adopted optimizer was let go."""
        self._by_hand = True
        self._stepped.clear()
        adopted, self._adopted = self._adopted, None
        if adopted is None or adopted not in self._known:
            return False
        self._known.discard(adopted)
        self._stepped.discard(adopted)
        return True

    # ---- adoption -----------------------------------------------------------------------------------------------

    def _adopts(self, optimizer: Optimizer, num_passes: int) -> bool:
        """At once, where it is alone, holds what must be copies, and none was there that holds the parameters themselves (a cell of a
        notebook leaves a step open and makes another model); else after three steps, each behind a backward."""
        if self._by_name or self._by_hand or self._known:
            return False
        count, before = self._strangers.get(optimizer, (0, 0))
        if num_passes and num_passes == before:
            return False  # no backward since its last step
        self._strangers[optimizer] = (count + 1, num_passes)
        at_once = len(self._strangers) == 1 and not self._had_one and self._holds_copies(optimizer)
        if not at_once and count + 1 < ADOPT_AFTER_STEPS:
            return False
        self._adopted, self._late = optimizer, count
        self._strangers.clear()
        self._known.add(optimizer)
        merged = f"; its first {count + 1} steps are recorded as one" if count else ""
        self._say(
            f"{type(optimizer).__name__} holds none of the watched parameters but steps after their backward: taken "
            f"for the optimizer of their copies, its steps end the step{merged}; attach(optimizer=...) names another"
        )
        return True

    def _holds_copies(self, optimizer: Optimizer) -> bool:
        """Tensors that no backward reaches, or just as many elements as are trained, or this rank's part of them."""
        tensors = [p for g in optimizer.param_groups for p in g["params"]]
        if tensors and not any(p.requires_grad for p in tensors):
            return True
        parts = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        size = num_elements(tensors)
        return 0 < self._num_watched <= size * parts and size <= self._num_trained * PADDING

    def take_late(self) -> int:
        """Steps that went by before the owner was adopted, once: the one that ends now has a number so much higher."""
        late, self._late = self._late, 0
        return late


def at_forward(close: weakref.WeakMethod[Callable[[StepStatus], None]]) -> Callable[[], None]:
    """What a forward does that finds a step open whose optimizers have stepped in backward. It keeps nobody alive."""

    def end() -> None:
        if (closes := close()) is not None:
            closes(StepStatus.OK)

    return end


def _nobody() -> None:
    return None


def _holds_all(a: Optimizer, b: Optimizer) -> bool:
    ids = {id(p) for group in a.param_groups for p in group["params"]}
    return all(id(p) in ids for group in b.param_groups for p in group["params"] if p.requires_grad)


def _share(a: Optimizer, b: Optimizer) -> bool:
    ids = {id(p) for group in a.param_groups for p in group["params"]}
    return any(id(p) in ids for group in b.param_groups for p in group["params"])


def optimizer_scalars(*optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Learning rate of the first group of the first of them that has one, and whether a fused optimizer was told to skip by a
    GradScaler; as tensors where they are on a device, because reading them would wait for it."""
    rates = (o.param_groups[0].get("lr") for o in optimizers if o.param_groups)
    lr = next((rate for rate in rates if rate is not None), None)
    found = (getattr(o, "found_inf", None) for o in optimizers)
    return {"lr": _here(lr), FOUND_INF: _here(next((inf for inf in found if inf is not None), None))}


def updates_made(optimizer: Optimizer) -> int | None:
    """How many updates the optimizer has counted for its first parameter that has state; None where it counts none, or on a
    device, where reading would wait."""
    counted = next(
        (kept["step"] for kept in optimizer.state.values() if isinstance(kept, dict) and "step" in kept), None
    )
    if isinstance(counted, torch.Tensor):
        counted = counted.item() if counted.device.type == "cpu" and counted.numel() == 1 else None
    return int(counted) if isinstance(counted, int | float) else None


def _here(value: Any) -> Any:
    """A number where it can be had at once; a tensor's value of this moment where it cannot."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" else value.detach().clone()
    return None if value is None else float(value)
