"""What one step of an optimizer did to a few weights, and with which gradients: looked at in turns.

Downstream: fp8watch.session.update_size
Shapes:     SAMPLE elements each of up to ROWS weights, their gradients and moments, at two steps of an optimizer one behind the
            other -> a few numbers, only where there is news
Thread:     training, before an optimizer steps; nothing waits for a device

Looked at is what the optimizer steps with: a layer that was taken out of its groups keeps its last gradient, and so does one
that is frozen. Four things hold for every optimizer and need no past of the run. A gradient is not that of the step before
times a number, while others moved on: a buffer that nobody writes is. What an update has moved uses all bits of its dtype: a weight that was rounded
to fewer does not. Weights do not shrink along themselves, all of them together, by more than their decay. And where Adam has
a first moment, or an optimizer has none, each element moves against it: updates of other rows, or of another tensor, do not.
How far it moves follows from what Adam keeps, see `update_size`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8watch.session.by_optimizer import ByOptimizer
from fp8watch.session.standing_elements import readable
from fp8watch.session.standing_state import FIRST, SECOND
from fp8watch.session.tensor_places import parameter_names
from fp8watch.session.update_astray import MIN_MOVED, astray, beside_decay
from fp8watch.session.update_size import Rate, rate_of, update_times
from fp8watch_agent.update_names import (
    ASTRAY,
    COARSE,
    COARSE_BITS,
    DECAY,
    OF,
    REPEATED,
    SHRINK,
    SHRINKING,
    UPDATE_TIMES,
    UPDATES_LOOKED,
    UPDATES_LOST,
    WHICH,
)

ROWS, SAMPLE = 8, 512
COST_SHARE, MAX_REST = 0.001, 30
"""Of the time of a step, that turns take on average; at most so many steps lie between two of them."""
REFRESH_TURNS = 64
MAX_NAMES = 1 << 16
MIN_NONZERO = 16
"""Elements of a sample of a gradient that are not 0; of fewer nothing is said."""
ROUNDINGS, MEAN_ROUNDINGS = 16.0, 4.0
"""A gradient is another's multiple where each element is within so many roundings of its dtype of the largest, and the whole within
so many of its norm: sixteen of bfloat16 are an eighth."""
OTHERS_MOVED = 0.01
"""How far gradients of others are from such a multiple, at least, before one says anything: a batch that comes again at a learning rate
of 0 repeats all of them."""
LEAST_SHRINK = 0.004
"""Of a weight in one step: half of it is gone in 173. Decay of 0.1 at a learning rate of 0.01 is 0.001."""
SHRUNK_LOOKS = 3
"""In a row: averages that are written back shrink all weights once."""
PULL_TIMES = 2.0
"""Times what updates of one size would shrink a weight with which they agree that much: Adam's differ in size."""
WITHOUT_FIRST = frozenset({SECOND, "sum", "square", "square_avg", "variance", "max_exp_avg_sq"})
"""States as large as their weight of an optimizer that moves each element against its gradient."""
LOW_BITS = {16: 0xFF, 11: 0x1FFF, 8: 0xFFFF}
"""Bits of the significand of a format -> those of float32 that are 0 in it."""
Optimizer = torch.optim.Optimizer


class _Row(NamedTuple):
    name: str
    parameter: Tensor
    group: int


@dataclass
class _Turn:
    """What the first of two steps has shown."""

    rows: list[_Row]
    numbers: Tensor  # [R] of their names
    offset: int
    weights: Tensor  # [R, SAMPLE]
    gradients: Tensor  # [R, SAMPLE]
    eps: float  # of the gradients' dtype
    decays: list[float]  # [R] by which decay is to shrink them in this step
    rates: list[Rate | None]  # [R] of plain Adam


@dataclass
class _Known:
    """Of one optimizer."""

    rows: list[_Row]
    begin: int  # of their names
    num_turns: int = 0
    rest: int = 0  # steps until the next turn
    turn: _Turn | None = None
    began_s: float = 0.0  # its first step
    took_s: float = 0.0  # there

    def rests(self, began_s: float) -> int:
        """Steps to rest behind a turn whose second step was looked at from `began_s` on."""
        took_s, step_s = self.took_s + perf_counter() - began_s, began_s - self.began_s
        return max(0, min(MAX_REST, int(took_s / max(COST_SHARE * step_s, 1e-9)) - 1))


class UpdateTurns:
    """Looks at the optimizers of one watch.

    Args:
        model: whose parameters have names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = ByOptimizer[_Known]()
        self._names: list[str] = []
        self._num_shrunk = 0  # looks in a row at which all weights had shrunk

    def follow(self, optimizer: Optimizer, *, looks: bool) -> None:
        """It has stepped, and is ours: look at it from now on, or no more."""
        if not looks:
            self._known.pop(id(optimizer), None)
        elif id(optimizer) not in self._known:
            made = self._made(optimizer)
            made.rest = 2 * len(self._known)  # of several, one after the other
            self._known.put(optimizer, made)

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether it is looked at."""
        return id(optimizer) in self._known

    def stop(self) -> None:
        """Look no more."""
        self._known.clear()

    def before(self, optimizer: Optimizer) -> dict[str, Any]:
        """It is about to step: what its step before did, in the second step of a turn; name -> number, or [] tensor."""
        if (known := self._known.get(id(optimizer))) is None:
            return {}
        if known.rest > 0:
            known.rest -= 1
            return {}
        return self._looked(optimizer, known)

    @torch.no_grad()
    def _looked(self, optimizer: Optimizer, known: _Known) -> dict[str, Any]:
        """One of the two steps of a turn."""
        began_s = perf_counter()
        turn, known.turn = known.turn, None
        if turn is None:
            known.turn, known.began_s = self._begun(optimizer, known), began_s
            known.took_s = perf_counter() - began_s
            return {}
        known.num_turns += 1
        numbers = _ended(optimizer, turn)
        if turn.weights.is_cpu:
            self.named(numbers)
        known.rest = known.rests(began_s)
        return numbers

    def _made(self, optimizer: Optimizer) -> _Known:
        rows = list(_rows(self._model, optimizer))
        if len(self._names) > MAX_NAMES:
            self._names.clear()
        begin = len(self._names)
        self._names += [row.name for row in rows]
        return _Known(rows, begin)

    def _begun(self, optimizer: Optimizer, known: _Known) -> _Turn | None:
        if known.num_turns and known.num_turns % REFRESH_TURNS == 0:  # FSDP2 and added groups change parameters
            made = self._made(optimizer)
            known.rows, known.begin, known.num_turns = made.rows, made.begin, 1
        num, parts = len(known.rows), max(1, -(-(len(known.rows) - 1) // (ROWS - 1)))
        part, held = known.num_turns % parts, _held(optimizer)
        places = [i for i in (0, *range(1 + part, num, parts)) if i < num and id(known.rows[i].parameter) in held]
        chosen = [i for i in places if _gradient(known.rows[i]) is not None]
        if not chosen:
            known.num_turns, known.rest = known.num_turns + 1, 1
            return None
        rows = [known.rows[i] for i in chosen]
        dtypes = {row.parameter.dtype for row in rows}, {row.parameter.device for row in rows}
        if any(len(kind) > 1 for kind in dtypes):
            kind = rows[0].parameter
            chosen = [
                i for i in chosen if (p := known.rows[i].parameter).dtype == kind.dtype and p.device == kind.device
            ]
            rows = [known.rows[i] for i in chosen]
        offset = known.num_turns // parts
        gradients = [g for row in rows if (g := _gradient(row)) is not None]
        weights = _samples([_local(row.parameter) for row in rows], offset)
        numbers = torch.tensor([known.begin + i for i in chosen], device="cpu").to(weights.device, non_blocking=True)
        groups = optimizer.param_groups
        decays = [_decay(groups[row.group]) if row.group < len(groups) else 0.0 for row in rows]
        eps = max(float(torch.finfo(g.dtype).eps) for g in gradients)
        rates = [rate_of(optimizer, groups[row.group]) if row.group < len(groups) else None for row in rows]
        return _Turn(rows, numbers, offset, weights, _samples(gradients, offset).float(), eps, decays, rates)

    def named(self, numbers: dict[str, float]) -> None:
        """Numbers of a step that have arrived: what is about a weight gets its name, and where nothing is new nothing stays."""
        if _which(REPEATED) not in numbers:  # no turn ended, or these were looked at
            return
        first = [name for name in (REPEATED, COARSE, ASTRAY) if numbers.get(name)]
        for name in (REPEATED, COARSE, ASTRAY):
            which = numbers.pop(_which(name), None)
            if name in first[:1] and which is not None:
                number = int(which)
                numbers[OF + (self._names[number] if number < len(self._names) else f"parameter {number}")] = 1.0
            else:  # none, or a consequence: an update that is rounded goes astray
                numbers.pop(name, None)
        if COARSE not in numbers:
            numbers.pop(COARSE_BITS, None)
            numbers.pop(UPDATES_LOST, None)
        shrinks = numbers.get(SHRINK, 0.0) > max(LEAST_SHRINK, 4 * numbers.get(DECAY, 0.0))
        shrinks = shrinks and numbers.get(SHRINKING, 0.0) >= numbers[UPDATES_LOOKED]
        self._num_shrunk = self._num_shrunk + 1 if shrinks else 0
        numbers.pop(SHRINKING, None)
        if not numbers.get(UPDATE_TIMES):
            numbers.pop(UPDATE_TIMES, None)
        if self._num_shrunk < SHRUNK_LOOKS:
            for name in (SHRINK, DECAY):
                numbers.pop(name, None)
            if not first and UPDATE_TIMES not in numbers:
                del numbers[UPDATES_LOOKED]


def _which(name: str) -> str:
    return WHICH + name.rpartition("/")[2]


def _rows(model: nn.Module, optimizer: Optimizer) -> Iterator[_Row]:
    """Matrices that the optimizer moves, in its order; tables that bound their rows are left out: they move by themselves."""
    names = dict(parameter_names(model))
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None]
    bound = {id(m._parameters.get("weight")) for m in tables}
    for number, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if p.ndim >= 2 and p.requires_grad and id(p) not in bound and _sampled(p) is not None:
                yield _Row(names.get(id(p), f"parameter {i} of {type(optimizer).__name__}"), p, number)


def _local(x: Tensor) -> Tensor:
    return getattr(x, "_local_tensor", x)


def _sampled(x: Any) -> Tensor | None:
    local = readable(x)
    return local if local is not None and local.numel() >= SAMPLE else None


def _gradient(row: _Row) -> Tensor | None:
    """This rank's part of it, where it is as large as the weight's."""
    found = _sampled(row.parameter.grad)
    return found if found is not None and found.numel() == _local(row.parameter).numel() else None


def _samples(tensors: list[Tensor], offset: int) -> Tensor:
    """SAMPLE elements of each, evenly spread, from another one at each offset. [R, SAMPLE]"""
    views = []
    for x in tensors:
        stride = x.numel() // SAMPLE
        stride -= stride > 1 and stride % 2 == 0  # an even one meets the same columns in each row
        free = x.numel() - stride * (SAMPLE - 1)
        views.append(x.as_strided((SAMPLE,), (stride,), x.storage_offset() + offset * 7 % free))
    return torch.stack(views)


def _held(optimizer: Optimizer) -> set[int]:
    """Ids of the parameters that it steps with now."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _decay(group: dict[str, Any]) -> float:
    """By which share a weight is to shrink in a step; 0 where the rate lies on a device."""
    lr, decay = group.get("lr"), group.get("weight_decay", 0.0)
    if isinstance(lr, Tensor) and not lr.is_cpu:
        return 0.0
    return float(lr or 0.0) * float(decay) if isinstance(decay, float | int) else 0.0


def _ended(optimizer: Optimizer, turn: _Turn) -> dict[str, Any]:
    """The second step of a turn: numbers, or [] tensors on the device; on a CPU nothing where there is no news."""
    found, held = [_gradient(row) for row in turn.rows], _held(optimizer)
    if any(g is None for g in found) or not all(id(row.parameter) in held for row in turn.rows):
        return {}
    if any(_local(row.parameter).device != turn.weights.device for row in turn.rows):
        return {}
    before = turn.weights
    weights = _samples([_local(row.parameter) for row in turn.rows], turn.offset)
    if weights.dtype != before.dtype:
        return {}
    decays = torch.tensor(turn.decays, device="cpu").to(weights.device, non_blocking=True)
    moved, was = weights.float() - before.float(), before.float()
    gradients = _samples([g for g in found if g is not None], turn.offset).float()
    numbers: dict[str, Any] = {UPDATES_LOOKED: float(len(turn.rows))}
    repeated = _repeated(turn.gradients, gradients, turn.eps)
    if not all(row.parameter.requires_grad for row in turn.rows):  # its gradient stays, and moves it or not
        repeated = repeated & (moved != 0).any(1)
    numbers |= {REPEATED: repeated.sum(), _which(REPEATED): _at(turn.numbers, repeated.byte().argmax())}
    if weights.dtype == torch.float32:
        numbers |= _coarse(weights, moved != 0, turn)
    directions = [_direction(optimizer, row, turn, i) for i, row in enumerate(turn.rows)]
    against = torch.stack([direction for direction, _ in directions])
    numbers |= _times(optimizer, turn, was, moved) if weights.dtype == torch.float32 else {}
    numbers |= _shrink(was, moved, against) | {DECAY: max(turn.decays)}
    exact = [i for i, (_, exact) in enumerate(directions) if exact]
    if wrong := astray(exact, beside_decay(was, moved, decays, against), against):
        share, place = wrong
        numbers |= {ASTRAY: share, _which(ASTRAY): _at(turn.numbers, place)}
    return {name: float(value) for name, value in numbers.items()} if weights.is_cpu else numbers


def _at(values: Tensor, place: Tensor) -> Tensor:
    """`values[place]` of a [] tensor, which would wait for a device. []"""
    return values.index_select(0, place.view(1))[0]


def _repeated(last: Tensor, now: Tensor, eps: float) -> Tensor:
    """Whose gradient is a multiple of the last one, while none of the others is near one. [R, SAMPLE] -> bool [R]"""
    factor = (last * now).sum(1) / last.square().sum(1).clamp(min=1e-30)
    apart = now - factor[:, None] * last
    far = apart.abs().amax(1) / now.abs().amax(1).clamp(min=1e-30)
    near = apart.square().sum(1).sqrt() <= MEAN_ROUNDINGS * eps * now.square().sum(1).sqrt()
    known = (now.count_nonzero(1) >= MIN_NONZERO) & (last.count_nonzero(1) >= MIN_NONZERO)
    same = known & (factor > 0) & (far <= ROUNDINGS * eps) & near
    others = torch.where(known & ~same, far, torch.inf).amin()
    return same & (others > OTHERS_MOVED) & (others < torch.inf)


def _coarse(weights: Tensor, moved: Tensor, turn: _Turn) -> dict[str, Any]:
    """Whose elements that moved all lie on a coarser grid than float32. [R, SAMPLE]"""
    bits, enough = weights.view(torch.int32), moved.sum(1) >= MIN_MOVED
    on = {num: enough & ~((bits & low) != 0).logical_and(moved).any(1) for num, low in LOW_BITS.items()}
    coarse = on[16]
    first = coarse.byte().argmax()
    fewest = 16 - 5 * _at(on[11].float(), first) - 3 * _at(on[8].float(), first)
    given = turn.gradients != 0
    lost = (given & ~moved).sum() / given.sum().clamp(min=1)
    return {COARSE: coarse.sum(), _which(COARSE): _at(turn.numbers, first), COARSE_BITS: fewest, UPDATES_LOST: lost}


def _shrink(was: Tensor, moved: Tensor, against: Tensor) -> dict[str, Any]:
    """How much the median weight shrank along itself beyond what gradients make of it, and how many did. [R, SAMPLE]

    A loss that wants smaller weights moves them by as much as any other update, and `against` agrees with them in sign.
    """
    size = was.abs().mean(1).clamp(min=1e-30)
    shrink = -(moved * was).sum(1) / was.square().sum(1).clamp(min=1e-30)
    pull = (against.sign() * was).mean(1).clamp(min=0) / size
    shrink = shrink - PULL_TIMES * pull * (moved + shrink[:, None] * was).abs().mean(1) / size
    median = shrink.median()
    return {SHRINK: median, SHRINKING: ((shrink > 0.5 * median) & (median > 0)).sum()}


def _times(optimizer: Optimizer, turn: _Turn, was: Tensor, moved: Tensor) -> dict[str, Any]:
    """How far weights moved beside what they were to; nothing of an optimizer of which that is not known. [R, SAMPLE]"""
    places: list[int] = []
    moments: list[tuple[Tensor, Tensor, Tensor]] = []
    for i, (row, rate) in enumerate(zip(turn.rows, turn.rates, strict=True)):
        kept = optimizer.state.get(row.parameter)
        if rate is None or not isinstance(kept, dict):
            continue
        first, second, num = _sampled(kept.get(FIRST)), _sampled(kept.get(SECOND)), kept.get("step")
        whole = _local(row.parameter).numel()
        if (
            first is None
            or second is None
            or not first.numel() == second.numel() == whole
            or first.device != was.device
        ):
            continue
        if isinstance(num, Tensor | float | int):
            places.append(i)
            num = num.detach() if isinstance(num, Tensor) else torch.tensor(num, device="cpu")
            moments.append((first, second, num.to(was.device, non_blocking=True).reshape(())))
    if not places:
        return {}
    firsts, seconds = (_samples([m[k] for m in moments], turn.offset).float() for k in (0, 1))
    rates = [rate for i in places if (rate := turn.rates[i]) is not None]
    at = torch.tensor(places, device="cpu").to(was.device, non_blocking=True)
    steps = torch.stack([m[2] for m in moments])
    return {UPDATE_TIMES: update_times(rates, was[at], moved[at], firsts, seconds, steps)}


def _direction(optimizer: Optimizer, row: _Row, turn: _Turn, i: int) -> tuple[Tensor, bool]:
    """What the last step went against; whether it did so in each element. [SAMPLE]"""
    state = optimizer.state.get(row.parameter)
    kept = state if isinstance(state, dict) else {}
    for key in (FIRST, "momentum_buffer"):
        first = _sampled(kept.get(key))
        if first is not None and first.numel() == _local(row.parameter).numel() and first.device == turn.weights.device:
            return _samples([first], turn.offset)[0].float(), key == FIRST
    held = {str(k) for k, v in kept.items() if isinstance(v, Tensor) and v.numel() == row.parameter.numel()}
    return turn.gradients[i], held <= WITHOUT_FIRST
