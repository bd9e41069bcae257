"""Whether the gradient that an optimizer is given is the one that backward gave: a few parameters in each step, one after the other.

Shapes:     [PIECES, WIDTH] elements of a gradient, where autograd hands it over and where its optimizer steps -> how far they
            lie apart, only where they do
Thread:     training, and autograd's; nothing waits for a device

Between backward and optimizer a gradient is accumulated, reduced, copied, cast, unscaled and clipped. Whatever that is, it
multiplies all elements by one number, or else it is another gradient: of fewer micro-batches, with another tensor's elements in it,
with small ones flushed. Autograd tells what it adds to `.grad` before it adds it; a hook on the parameter keeps a sample of the sum,
and it is held against what is there when the optimizer steps, up to a number. That needs no past of the run, but a parameter
of which the first look is wrong is one whose gradient training changes on purpose, perhaps: noise, projections, masks. Those
are counted, and said apart. Values that are clipped one by one are no news either, nor is a mask that covers just the weights that are 0.

Where processes share gradients autograd's is of this process alone: each says a sketch of its own, and the collector holds their sum
against what arrived (`gradient_sketch`; `gradient_shards` where each keeps a part of it). The hook is there from the first backward
of a step to its optimizer: a checkpoint, or a copy of the model between two steps, sees none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8watch.session.by_optimizer import ByOptimizer
from fp8watch.session.gradient_cut_off import GradientCutOff
from fp8watch.session.gradient_sample import sample
from fp8watch.session.gradient_shards import ShardLook, Shards, all_shards
from fp8watch.session.gradient_sketch import STEPS_APART, compressed_by, only_finite, sketches
from fp8watch.session.gradients_apart import NORMAL_ELEMENTS, Pair, alike, gradients_apart
from fp8watch.session.tensor_places import parameter_names
from fp8watch_agent.guard import Guard
from fp8watch_agent.update_names import (
    GRADIENT_APART,
    GRADIENT_CUT_OFF,
    GRADIENTS_FEW,
    GRADIENTS_FLUSHED,
    GRADIENTS_NORMAL,
    GRADIENTS_OTHER,
)

STEPS_A_ROUND = 32
"""Turns in which each parameter has had its own."""
LOOK_S, COST_SHARE, MAX_REST = 2e-4, 0.001, 4
"""About what a look takes of a CPU that has forgotten the code; which share of a step looks may be, once each parameter has been
looked at; of at most so many steps one has turns."""
GOLDEN = 0.618
"""Of the parameters lie between two that have their turns one behind the other."""
MAX_TURNS = 16
"""Parameters of an optimizer in one step."""
REFRESH_STEPS = 256
OTHERS = 3
"""Parameters whose gradient is another one from the first look on, and no fewer than those of which it is not, before that is said."""
Optimizer = torch.optim.Optimizer


@dataclass
class _Look:
    """At one parameter, from the first backward of a step to its optimizer."""

    name: str
    parameter: Tensor
    start: int  # of a stretch within its part of the tensor
    handle: RemovableHandle | None = None
    mark: tuple[int, int] | None = None  # of `.grad` before autograd added to it: address, and version
    expected: Tensor | None = None  # float32 sample of what `.grad` is then; None: it is not known
    there: Tensor | None = None  # float32 sample of what it was before


@dataclass
class _Known:
    """Of one optimizer."""

    parameters: list[tuple[str, Tensor | Shards]]
    next: int = 0
    refresh: int = REFRESH_STEPS  # steps until they are listed anew
    turn: list[_Look | ShardLook] = field(default_factory=list)
    rest: int = 0  # steps until the next turn
    stepped_s: float = 0.0  # when its optimizer did
    shared_by: int = 0  # processes; 0: gradients are this one's own
    compressed_by: str = ""  # a communication hook after which nothing can be told from outside
    sharded: bool = False  # its parameters are parts of tensors, and none of them is followed


class GradientArrival:
    """Looks at the optimizers of one watch.

    Args:
        model: whose parameters have names.
        guard: counts what goes wrong.
    """

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self._model, self._guard = model, guard
        self._known = ByOptimizer[_Known](_forget)
        self._right: set[str] = set()  # that arrived as they were given, once
        self._other: set[str] = set()
        self._cut_off = GradientCutOff()
        self._met = False  # a gradient was looked at
        self._says_sketches = False

    @property
    def unseen(self) -> str:
        """Why no gradient was held against what backward gave so far; empty where one was."""
        if self._met:
            return ""
        if name := next((known.compressed_by for known in self._known.values() if known.compressed_by), ""):
            return f"{name} compresses them on their way: what arrives is not the sum of what processes gave"
        if any(known.sharded for known in self._known.values()):
            return "parameters are sharded over processes (DTensor), and not along their rows as FSDP2 does it"
        if not any(known.parameters for known in self._known.values()):
            return "no step of a torch optimizer over the model's own parameters was looked at"
        return "what backward fills, `.grad` of the parameters, is not what an optimizer steps with, or cannot be read"

    @property
    def has_turn(self) -> bool:
        """Whether a parameter has its turn in this step."""
        return any(known.turn for known in self._known.values())

    def stop(self) -> None:
        """Look no more, and leave nothing on the parameters."""
        for known in self._known.values():
            _let_go(known.turn)
        self._known.clear()

    def after(self, optimizer: Optimizer, *, looks: bool) -> None:
        """It has stepped: whose turn it is in the step that begins, if the watch `looks` at it."""
        known = self._known.get(id(optimizer))
        if known is not None:
            if known.turn:
                _let_go(known.turn)
                known.turn = []
            known.refresh -= 1
        if not looks:
            self._known.pop(id(optimizer), None)
            return
        if known is None or known.refresh <= 0:
            names, first = dict(parameter_names(self._model)), 0 if known is None else known.next
            held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
            shards = all_shards(self._model, held)
            some: list[tuple[str, Tensor | Shards]] = [
                (names[id(p)], shards.get(id(p), p)) for p in held if type(p) is nn.Parameter or id(p) in shards
            ]
            known = _Known(_scattered(some), first, sharded=bool(held) and not some)
            known.compressed_by = compressed_by(self._model)
            self._known.put(optimizer, known)
        known.shared_by = _shared_by()
        now, last = perf_counter(), known.stepped_s
        known.stepped_s = now
        if known.rest > 0 or known.compressed_by:
            known.rest -= 1
            return
        some, first = known.parameters, known.next
        num = min(1 if known.shared_by else MAX_TURNS, -(-len(some) // STEPS_A_ROUND))
        known.next += num
        if known.shared_by:
            known.rest = STEPS_APART - 1
        elif known.next > len(some):  # all have been looked at: what is wrong from here on is told from what always was
            known.rest = min(MAX_REST - 1, int(num * LOOK_S / max(COST_SHARE * (now - last), 1e-9)))
        known.turn = [
            self._look(*some[i % len(some)], i % len(some) + i // len(some)) for i in range(first, known.next)
        ]

    def _look(self, name: str, of: Tensor | Shards, turn: int) -> _Look | ShardLook:
        return _Look(name, of, turn) if isinstance(of, Tensor) else ShardLook(name, of, turn, self._guard)

    def backward_begins(self) -> None:
        """A backward of the model has come to its first watched module."""
        for known in list(self._known.values()):
            for look in known.turn:
                if isinstance(look, ShardLook):
                    look.begin()
                elif look.handle is None and look.parameter.requires_grad:
                    look.handle = look.parameter.register_hook(partial(_see, self._guard, look))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> dict[str, Any]:
        """It is about to step: name -> how far off a gradient is, as a share of its norm, 0 where that is rounding; nothing
        where it is known to be none."""
        found: dict[str, Any] = {}
        pairs: list[Pair] = []
        seen: list[tuple[str, Tensor]] = []
        known = self._known.get(id(optimizer))
        for look in () if known is None else known.turn:
            if isinstance(look, ShardLook):
                if said := look.before():
                    self._met = self._says_sketches = True
                    found |= said
                continue
            if look.handle is None:
                continue
            look.handle.remove()
            gradient, look.handle = look.parameter.grad, None
            if gradient is None:
                continue
            # where what autograd gave last went elsewhere, nothing was added
            expected = look.there if look.mark == (gradient.data_ptr(), gradient._version) else look.expected
            got = None if expected is None else sample(gradient, look.start)
            if got is None or expected is None or got.device != expected.device or got.shape != expected.shape:
                continue
            self._met = True
            if got.is_cpu and 2 * int(torch.count_nonzero(got)) > got.numel():
                self._cut_off.whole.add(look.name)
            else:
                seen.append((look.name, got))
            if known is not None and known.shared_by:
                self._says_sketches = True
                found |= sketches(look.name, expected, got, known.shared_by)
                continue
            if got.is_cpu and torch.equal(got, expected):
                self._right.add(look.name)
                continue
            pairs.append(Pair(look.name, got, expected, sample(look.parameter.detach(), look.start), gradient.dtype))
        for group in alike(pairs):
            apart, flushed, normal = gradients_apart(group)
            if apart.is_cpu:  # of which nothing can be said, nothing is
                kept = apart >= 0
                group, apart, flushed, normal = (
                    [p for p, k in zip(group, kept.tolist(), strict=True) if k],
                    apart[kept],
                    flushed[kept],
                    normal[kept],
                )
            if not group:
                continue
            found |= {GRADIENT_APART + pair.name: of for pair, of in zip(group, apart.unbind(), strict=True)}
            flushed, few = flushed.amax(), group[0].got.numel() < NORMAL_ELEMENTS
            found[GRADIENTS_FLUSHED] = torch.maximum(found.get(GRADIENTS_FLUSHED, flushed), flushed)
            found[GRADIENTS_NORMAL] = found.get(GRADIENTS_NORMAL, 0) + (0 if few else normal.sum())
            found[GRADIENTS_FEW] = found.get(GRADIENTS_FEW, 0) + few * len(group)
        return found | self._cut_off.look(seen) if seen else found

    def named(self, numbers: dict[str, float]) -> None:
        """Numbers of a step that have arrived: what was right once and is wrong stays; of others only how many there are."""
        if self._says_sketches:
            only_finite(numbers)
        for key in [n for n in numbers if n.startswith(GRADIENT_APART)]:
            name, apart = key.removeprefix(GRADIENT_APART), numbers[key]
            if apart == 0:
                self._right.add(name)
            if apart > 0 and name not in self._right:
                self._other.add(name)
                if len(self._other) >= max(OTHERS, len(self._right)):
                    numbers[GRADIENTS_OTHER] = float(len(self._other))
            if not apart > 0 or name not in self._right:
                del numbers[key]
        named = any(n.startswith(GRADIENT_APART) for n in numbers)
        for key in (GRADIENTS_FLUSHED, GRADIENTS_NORMAL, GRADIENTS_FEW):
            if not named or not numbers.get(key):
                numbers.pop(key, None)
        if any(n.startswith(GRADIENT_CUT_OFF) for n in numbers):
            self._cut_off.named(numbers, GRADIENT_APART)


def _scattered(parameters: list[tuple[str, Tensor | Shards]]) -> list[tuple[str, Tensor | Shards]]:
    """All of them, neighbours far from each other: what breaks some layers is met after a few turns, wherever they lie."""
    num = len(parameters)
    stride = next((s for s in range(round(GOLDEN * num), num) if math.gcd(s, num) == 1), 1)
    return [parameters[i * stride % num] for i in range(num)]


def _shared_by() -> int:
    """So many processes may share gradients; 0: this one has its own."""
    distributed = torch.distributed
    num = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    return num if num > 1 else 0


def _let_go(looks: list[_Look | ShardLook]) -> None:
    for look in looks:
        if isinstance(look, ShardLook):
            look.let_go()
        elif look.handle is not None:
            look.handle.remove()
            look.handle = None


def _forget(known: _Known) -> None:
    _let_go(known.turn)
    known.turn.clear()


def _see(guard: Guard, look: _Look, given: Tensor) -> None:
    """Autograd is about to add to `.grad`. A second time in a step: another micro-batch, or a backward that went elsewhere."""
    look.expected, look.there, before = None, None, look.parameter.grad
    try:
        with torch.no_grad():
            if (now := sample(given, look.start)) is None:
                return
            if before is None:
                look.mark, look.expected = None, now.clone()
                return
            look.mark = before.data_ptr(), before._version
            there = sample(before, look.start)
            if there is not None and there.shape == now.shape and there.device == now.device:
                look.there, look.expected = there.clone(), there + now
    except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
        guard.swallow("gradients", error)
