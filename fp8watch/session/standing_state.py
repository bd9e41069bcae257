"""Whether what an optimizer keeps stands still between its steps: moments and weights, a few elements of each.

Shapes:     state of an optimizer, T tensors -> [T, WIDTH] elements, read behind one step and before the next
Thread:     training, around each optimizer step; nothing waits for a device

Between two steps nobody writes into an optimizer's moments. A load that takes the wrong file, a restore that hands them
to other parameters, a stray kernel or a bad cell does, and the loss shows it late or never. Each tensor is looked at in
WIDTH neighbouring elements, at another place every TURN_STEPS steps: what changes a whole tensor is seen at once, what
changes one element is seen where it lies there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.session.by_optimizer import ByOptimizer
from fp8watch.session.standing_elements import WIDTH, StandingElements, readable
from fp8watch.session.tensor_places import Optimizer, TensorPlace, TensorPlaces, parameter_names, state_of
from fp8watch_agent.training_names import (
    CHANGED,
    EPS,
    MOMENTS_CHANGED,
    MOMENTS_LOOKED,
    MOMENTS_WHICH,
    SECOND_LOOKED,
    SECOND_ZERO,
    WEIGHTS_CHANGED,
    WEIGHTS_LOOKED,
    WEIGHTS_WHICH,
    WRITTEN,
)

TURN_STEPS = 64
MAX_TENSORS = 4096
MAX_NAMES = 8 * MAX_TENSORS
MAX_REMADE = 8
"""Steps in a row with other tensors than in the step before: such an optimizer makes them anew, and is left alone."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"
LEAST_FIRST = 1e-18
"""First moments below it are of gradients whose squares float32 does not hold."""


@dataclass
class _Kept:
    """What one optimizer was left with."""

    names: list[str]  # of the tensors, weights behind moments
    num_moments: int
    places: TensorPlaces
    elements: StandingElements
    offset: int
    left: int  # steps until other elements are looked at
    values: Tensor  # [T · WIDTH]
    num_remade: int = 0
    last: Tensor | None = None  # values of the step before, of the same elements
    pairs: Tensor | None = None  # numbers of first and second moments of a parameter, [2, P] int64 on the device
    is_new: bool = True  # other elements than before: their second moments were not looked at

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether all of them lie where they lay."""
        return self.places.is_current(optimizer)

    def release(self) -> None:
        """What is loaded takes the place of these tensors: their memory must not be held any longer."""
        self.places, self.elements = TensorPlaces(), StandingElements([], 0)


class _Weights(NamedTuple):
    """Of an optimizer as it left them, without its moments: it may be gone when another one takes its parameters."""

    names: list[str]
    offset: int
    values: Tensor  # [W, WIDTH]

    @classmethod
    def of(cls, kept: _Kept) -> _Weights:
        """Those that are looked at."""
        num = kept.num_moments
        return cls(kept.names[num:], kept.offset, kept.values.view(-1, WIDTH)[num:])


class StandingState:
    """Looks at the optimizers of one watch.

    Args:
        model: whose parameters have names.
        plan: with the clock of the running step; None: nothing is looked at.
    """

    def __init__(self, model: nn.Module, plan: ObservationPlan | None) -> None:
        self._model, self._plan = model, plan
        self._kept = ByOptimizer[_Kept | None]()  # None: it is left alone
        self._names: dict[int, str] = {}
        self._hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._left: _Weights | None = None  # by the optimizer that stepped last
        self.names: list[str] = []
        """Of what was looked at, optimizer after optimizer, "exp_avg of layers.0.fc1.weight", and weights: MOMENTS_WHICH counts
        in them."""
        self._begins: weakref.WeakKeyDictionary[Optimizer, tuple[list[str], int]] = weakref.WeakKeyDictionary()

    def before(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer is about to step: what is not as it was left, as scalars of the step that ends now.

        Returns:
            name -> number, or [] tensor on the device; empty where nothing can be compared, and on a CPU where nothing
            has changed.
        """
        kept = self._kept.get(id(optimizer))
        if kept is not None:
            return self._changes(optimizer, kept)
        return {} if self._left is None else self._weights_alone(optimizer, self._left)

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether there is something to hold against: what it has left, or, before its first step, what the one before it has."""
        return id(optimizer) in self._kept or self._left is not None

    def after(self, optimizer: Optimizer, *, looks: bool = True, parts: Sequence[Optimizer] = ()) -> None:
        """The optimizer has stepped: keep what it leaves, where the next step `looks` at it. Where `parts` of it stepped in its
        step they are looked at in its stead, as moments are theirs."""
        for part in parts:  # it may have moved weights behind them
            self._settle(part)
        self._left = None
        if looks and not parts and self._plan is not None:
            self._keep(optimizer)
            kept = self._kept.get(id(optimizer))
            self._left = None if kept is None else _Weights.of(kept)
        elif self._kept.get(id(optimizer)) is not None:
            del self._kept[id(optimizer)]

    @property
    def unseen(self) -> str:
        """Why gradients that optimizers are given are held against nothing; empty where they are, or nobody asks for it."""
        return ""

    def stop(self) -> None:
        """Look no more, and leave nothing on the optimizers."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._kept.clear()
        self._plan = self._left = None

    def _release(self, optimizer: Optimizer) -> None:
        if (kept := self._kept.get(id(optimizer))) is not None:
            kept.release()

    def _settle(self, optimizer: Optimizer) -> None:
        kept = self._kept.get(id(optimizer))
        if kept is not None and kept.is_current(optimizer):
            kept.values = kept.elements.read(spare=kept.values)

    def _keep(self, optimizer: Optimizer) -> None:
        kept = self._kept.get(id(optimizer))
        if kept is not None and kept.left > 0 and kept.is_current(optimizer):
            kept.left, kept.num_remade = kept.left - 1, 0
            kept.last, kept.values = kept.values, kept.elements.read(spare=kept.last)
        elif kept is not None or id(optimizer) not in self._kept:
            self._keep_others(optimizer, kept)

    def _keep_others(self, optimizer: Optimizer, kept: _Kept | None) -> None:
        """Other elements than before, or those of other tensors."""
        remade = kept.num_remade + 1 if kept is not None and kept.left > 0 else 0
        made = self._look(optimizer, 0 if kept is None else kept.offset + WIDTH * (kept.left <= 0))
        if made is None or remade > MAX_REMADE:
            self._kept.put(optimizer, None if remade > MAX_REMADE else kept)
            return
        made.num_remade = remade
        self._kept.put(optimizer, made)
        # a wrapper that is an optimizer by name alone may have no hooks
        if optimizer not in self._hooks and hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
            released = partial(_release, weakref.WeakMethod(self._release))
            self._hooks[optimizer] = optimizer.register_load_state_dict_pre_hook(released)

    def _changes(self, optimizer: Optimizer, kept: _Kept) -> dict[str, Any]:
        now = kept
        if kept.is_current(optimizer):
            if not kept.is_new and kept.elements.are(kept.values):
                return {}
        else:  # loaded, or made anew: the same elements of other tensors
            found = self._look(optimizer, kept.offset)
            same = found is not None and found.names == kept.names and found.values.device == kept.values.device
            if found is None or not same or found.values.shape != kept.values.shape:
                self._kept.pop(id(optimizer), None)
                return self._weights_alone(optimizer, _Weights.of(kept))
            now = found
        values = now.values if now is not kept else kept.elements.read()
        same = values.device.type == "cpu" and torch.equal(values, kept.values)
        zeros = {} if same and not kept.is_new else _zeros(now, values, optimizer)
        kept.is_new = False
        if same:
            return zeros
        changed = (values != kept.values).view(-1, WIDTH).any(1)
        moments, weights = changed[: kept.num_moments], changed[kept.num_moments :]
        begin = self._begin(optimizer, kept.names)
        return {
            **zeros,
            MOMENTS_CHANGED: moments.sum(),
            MOMENTS_WHICH: moments.to(torch.uint8).argmax() + begin,
            MOMENTS_LOOKED: len(moments),
            WEIGHTS_CHANGED: weights.sum(),
            WEIGHTS_WHICH: (weights.to(torch.uint8).argmax() if len(weights) else 0) + kept.num_moments + begin,
            WEIGHTS_LOOKED: len(weights),
        }

    def _weights_alone(self, optimizer: Optimizer, left: _Weights) -> dict[str, Any]:
        """What is not as it was left where moments have gone, as those of a training that begins anew: of the weights."""
        weights, before = list(self._weights(optimizer)), left.values
        if not weights or [place.name for place in weights] != left.names:
            return {}
        values = StandingElements([place.local for place in weights], left.offset).read().view(-1, WIDTH)
        if values.shape != before.shape or values.device != before.device or values.dtype != before.dtype:
            return {}
        changed = (values != before).any(1)
        if changed.is_cpu and not changed.any():
            return {}
        begin = self._begin(optimizer, left.names)
        return {
            MOMENTS_CHANGED: torch.zeros_like(changed.sum()),
            MOMENTS_WHICH: begin,
            MOMENTS_LOOKED: 0,
            WEIGHTS_CHANGED: changed.sum(),
            WEIGHTS_WHICH: changed.to(torch.uint8).argmax() + begin,
            WEIGHTS_LOOKED: len(changed),
        }

    def _begin(self, optimizer: Optimizer, names: list[str]) -> int:
        """Where the names of an optimizer's tensors begin. A step on its way counts in them, so none is taken out but where
        they would grow for ever."""
        known, begin = self._begins.get(optimizer, ([], 0))
        if known != names:
            if len(self.names) > MAX_NAMES:
                self.names.clear()
                self._begins.clear()
            begin = len(self.names)
            self.names += names
            self._begins[optimizer] = names, begin
        return begin

    def named(self, numbers: dict[str, float]) -> None:
        """Numbers of a step that have arrived: the first tensor gets its name, and where nothing changed nothing stays."""
        which, written = numbers.pop(MOMENTS_WHICH, None), numbers.pop(WEIGHTS_WHICH, None)
        if SECOND_ZERO in numbers and not numbers[SECOND_ZERO]:
            for name in (SECOND_ZERO, SECOND_LOOKED, EPS):
                numbers.pop(name, None)
        if which is None:
            return
        if numbers[MOMENTS_CHANGED]:
            numbers[f"{CHANGED}{self._name(which)}"] = 1.0
        elif numbers[WEIGHTS_CHANGED]:
            numbers[f"{WRITTEN}{self._name(which if written is None else written)}"] = 1.0
        else:
            for name in (MOMENTS_CHANGED, MOMENTS_LOOKED, WEIGHTS_CHANGED, WEIGHTS_LOOKED):
                numbers.pop(name, None)

    def _name(self, number: float) -> str:
        first = int(number)
        return self.names[first] if first < len(self.names) else f"tensor {first}"

    def update_of(self, weight: str) -> Tensor | None:
        """How far the last update moved a weight, mean over mean of the magnitudes that are looked at: [] float32,
        where they are; None where that is not known."""
        for kept in list(self._kept.values()):
            if (
                kept is None
                or kept.last is None
                or not kept.elements.views
                or weight not in kept.names[kept.num_moments :]
            ):
                continue
            at = kept.names.index(weight, kept.num_moments)
            both, dtype = (kept.values, kept.last), kept.elements.dtype
            now, last = (bits.view(dtype).view(-1, WIDTH)[at].float() for bits in both)
            return (now - last).abs().mean() / now.abs().mean()
        return None

    def _look(self, optimizer: Optimizer, offset: int) -> _Kept | None:
        """The elements from `offset` on of each tensor, and what they hold; None where there is none."""
        moments, weights = list(self._moments(optimizer)), list(self._weights(optimizer))
        on = Counter(place.local.device for place in (*moments, *weights)).most_common(1)
        moments, weights = ([p for p in some if p.local.device == on[0][0]] for some in (moments, weights))
        if not moments:
            return None
        places = [*moments, *weights]
        elements, names = StandingElements([place.local for place in places], offset), [place.name for place in places]
        where, values = TensorPlaces.of(optimizer, places), elements.read()
        kept = _Kept(names, len(moments), where, elements, offset, TURN_STEPS, values)
        at = {(id(place.parameter), place.key): i for i, place in enumerate(moments)}
        seconds = ((i, at.get((parameter, SECOND))) for (parameter, key), i in at.items() if key == FIRST)
        if pairs := [pair for pair in seconds if pair[1] is not None]:
            kept.pairs = torch.tensor(pairs, device="cpu").t().contiguous().to(kept.values.device, non_blocking=True)
        return kept

    def _moments(self, optimizer: Optimizer) -> Iterator[TensorPlace]:
        """Of at most MAX_TENSORS tensors."""
        found = (
            TensorPlace(f"{key} of {name}", parameter, key, value, local)
            for name, parameter in self.parameters(optimizer)
            for key, value in state_of(optimizer, parameter).items()
            if (local := readable(value)) is not None
        )
        return islice(found, MAX_TENSORS)

    def _weights(self, optimizer: Optimizer) -> Iterator[TensorPlace]:
        found = (
            TensorPlace(name, parameter, None, parameter, local)
            for name, parameter in self.parameters(optimizer)
            if parameter.requires_grad and (local := readable(parameter.detach())) is not None
        )
        return islice(found, MAX_TENSORS)

    def parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Each that it has, and its name in the model."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) not in self._names for p in parameters):
            self._names = dict(parameter_names(self._model))
        for i, p in enumerate(parameters):
            yield self._names.get(id(p), f"parameter {i} of {type(optimizer).__name__}"), p


def _zeros(kept: _Kept, values: Tensor, optimizer: Optimizer) -> dict[str, Any]:
    """Second moments that are 0 where the first is not, of the elements that were read; nothing where there are none, on a CPU."""
    if kept.pairs is None:
        return {}
    numbers = values.view(kept.elements.dtype).view(-1, WIDTH)
    first, second = (numbers.index_select(0, at) for at in kept.pairs)
    moving = first.abs() >= LEAST_FIRST
    zero, looked = (moving & (second == 0)).sum(), moving.sum()
    if zero.is_cpu and not zero:
        return {}
    eps = optimizer.param_groups[0].get("eps")
    return {SECOND_ZERO: zero, SECOND_LOOKED: looked, **({EPS: float(eps)} if isinstance(eps, float) else {})}


_COUNTED_BY = {MOMENTS_WHICH: MOMENTS_CHANGED, WEIGHTS_WHICH: WEIGHTS_CHANGED}


def merge(known: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put what another optimizer of the step says beside what is known: counts add up, and the first that has a changed moment,
    or weight, names it. Numbers, or [] tensors on their devices; of another device than the first's it is left out."""
    out = dict(more)
    for name in known.keys() & more.keys():
        before, value = known[name], more[name]
        if isinstance(before, Tensor) and isinstance(value, Tensor) and before.device != value.device:
            return
        if (of := _COUNTED_BY.get(name)) is not None:
            out[name] = torch.where(known[of] > 0, before, value)
        else:
            out[name] = before if name == EPS else before + value
    known.update(out)


def _release(method: weakref.WeakMethod[Callable[[Optimizer], None]], optimizer: Optimizer, _state: Any) -> None:
    if (release := method()) is not None:
        release(optimizer)


def moments_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of what these optimizers keep of a parameter, under the names of `StandingState`; a step count is left out."""
    standing = StandingState(model, None)
    for optimizer in optimizers:
        for name, parameter in standing.parameters(optimizer):
            for key, value in state_of(optimizer, parameter).items():
                local = getattr(value, "_local_tensor", value)
                if isinstance(local, Tensor) and local.numel() > 1:
                    yield f"{key} of {name}", local
