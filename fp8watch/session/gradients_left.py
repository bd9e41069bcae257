"""Whether gradients that an optimizer has used are cleared before a backward adds to them, and whether it uses them again.

Shapes:     WIDTH elements of a few gradients, behind a step of their optimizer, where each backward begins and where it adds
Thread:     training, and autograd's; nothing waits for a device

Without `zero_grad` each update is that of the sum of all gradients since, and no loss says why. Trainings clear gradients
anywhere between two backwards, and several micro-batches add up on purpose; so what counts is that the very bits which the
optimizer left are there where the first backward behind it begins, that none of the backwards of the step begins without them, and that
what the optimizer is given lies in the same memory and along them: loops that write a new gradient over the old one clear nothing
either. A backward may be heard late, behind what it has added already, and may add nothing to `.grad` (`torch.autograd.grad`): a gradient that
was there where the first began is looked at again each time that autograd is about to add to it. What the optimizer no longer holds is left on
purpose. Copies that an optimizer holds of the parameters are written over as a rule, and are not looked at.

Where no backward began and the optimizer steps on the same bits in the same memory, it applies an update a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8watch.kernels.cpu_standing import piece
from fp8watch.session.by_optimizer import ByOptimizer
from fp8watch.session.standing_elements import WIDTH, readable
from fp8watch_agent.guard import Guard
from fp8watch_agent.update_names import GRADIENTS_KEPT, GRADIENTS_LEFT, STEPPED_AGAIN

MAX_KEPT = 3
"""Parameters of an optimizer whose gradients are followed: one of each of its groups."""
ALONG = 0.35
"""Cosine of what the optimizer left and what it is given: 0.7 where as large a gradient was added, 0 ± 0.13 where one was written over it."""
REFRESH_STEPS = 256
_SIZES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}
Optimizer = torch.optim.Optimizer


@dataclass
class _Left:
    """A gradient behind its optimizer's step."""

    parameter: Tensor
    copy: Tensor | bytes  # [WIDTH]: the gradient's memory is not held; bytes where the C library read them
    dtype: torch.dtype
    address: int
    begun: bool = False  # a backward has
    stays: Tensor | bool = True  # as far as is known: [] bool on the device
    handle: RemovableHandle | None = None  # of the hook that looks again, from the first backward on

    @property
    def values(self) -> Tensor:
        """The copy as numbers. [WIDTH]"""
        return self.copy if isinstance(self.copy, Tensor) else torch.frombuffer(bytearray(self.copy), dtype=self.dtype)


class GradientsLeft:
    """Follows the optimizers of one watch.

    Args:
        model: whose parameters autograd gives gradients.
        guard: counts what goes wrong.
    """

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self._model, self._guard, self._ids = model, guard, frozenset[int]()
        self._left = ByOptimizer[list[_Left]](_forget)
        self._turn = 0

    def stop(self) -> None:
        """Follow nothing any more, and leave nothing on the parameters."""
        for left in self._left.values():
            _let_go(left)
        self._left.clear()

    def after(self, optimizer: Optimizer, *, looks: bool) -> None:
        """It has stepped: what gradients it leaves."""
        _let_go(self._left.get(id(optimizer), ()))
        if not looks:
            self._left.pop(id(optimizer), None)
            return
        if self._turn % REFRESH_STEPS == 0:  # FSDP2 replaces them
            self._ids = frozenset(id(p) for p in self._model.parameters())
        left, self._turn = [], self._turn + 1
        for group in optimizer.param_groups[:MAX_KEPT]:
            if not (params := group["params"]):
                continue
            p = params[(self._turn * 7 + len(params) // 2) % len(params)]
            if id(p) in self._ids and (one := _leave(p, p.grad)) is not None:
                left.append(one)
        if id(optimizer) in self._left:
            self._left[id(optimizer)] = left
        else:
            self._left.put(optimizer, left)

    def backward_begins(self) -> None:
        """A backward of the model has come to its first watched module."""
        for left in list(self._left.values()):
            for one in left:
                if one.stays is not False:
                    _look(one)
                if one.stays is not False and one.handle is None and _takes_hooks(one.parameter):
                    one.handle = one.parameter.register_hook(partial(_adds, self._guard, one))  # type: ignore[no-untyped-call]

    def before(self, optimizer: Optimizer) -> dict[str, Any]:
        """It is about to step: how many gradients were left in place, or that it has stepped on these; empty where neither is so,
        on a CPU."""
        if known := self._left.get(id(optimizer), []):
            self._left[id(optimizer)] = []
            _let_go(known)
        if known and not any(one.begun for one in known):
            return _again(optimizer, known)
        left = [one for one in known if one.begun]
        stay = [
            stays for one in left if (stays := _was_added_to(one)) is not False and _is_held(optimizer, one.parameter)
        ]
        if not stay:
            return {}
        tensors = [s for s in stay if isinstance(s, Tensor)]
        if len({t.device for t in tensors}) > 1:
            return {}
        num: Any = torch.stack(tensors).sum() if tensors else 0
        return {GRADIENTS_LEFT: num + (len(stay) - len(tensors)), GRADIENTS_KEPT: len(left)}

    @staticmethod
    def named(numbers: dict[str, float]) -> None:
        """Numbers of a step that have arrived: where nothing was left, nothing stays."""
        if not numbers.get(GRADIENTS_LEFT):
            numbers.pop(GRADIENTS_LEFT, None)
            numbers.pop(GRADIENTS_KEPT, None)
        if not numbers.get(STEPPED_AGAIN):
            numbers.pop(STEPPED_AGAIN, None)


@torch.no_grad()
def _again(optimizer: Optimizer, left: list[_Left]) -> dict[str, Any]:
    """Whether no gradient has changed since this optimizer stepped on it, and none of them is 0."""
    same: list[Tensor] = []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}  # engines step part after part
    for one in left:
        gradient = readable(one.parameter.grad) if id(one.parameter) in held else None
        if gradient is None or gradient.data_ptr() != one.address or gradient.device != one.values.device:
            return {}
        now = _part(gradient)
        same.append((now == one.values).all() & (now != 0).any())
    if len({t.device for t in same}) > 1 or (same[0].is_cpu and not all(same)):
        return {}
    return {STEPPED_AGAIN: torch.stack(same).all().float()}


def _part(gradient: Tensor) -> Tensor:
    """Elements from the middle. [WIDTH]"""
    start = (gradient.numel() - WIDTH) // 2
    return gradient.as_strided((WIDTH,), (1,), gradient.storage_offset() + start)


def _here(gradient: Tensor) -> tuple[int, bytes] | None:
    """Address of a gradient, and what lies in its middle, read without torch: behind GEMMs each of its calls takes microseconds.
    None where it is not `readable`, or lies on a device, or where the C library is not there."""
    if type(gradient) is not Tensor or not gradient.is_cpu or gradient.layout is not torch.strided:
        return None
    size, num = _SIZES.get(gradient.dtype), gradient.numel()
    if size is None or num < WIDTH or not gradient.is_contiguous() or gradient.is_neg():
        return None
    address = gradient.data_ptr()
    copy = piece(address + (num - WIDTH) // 2 * size, WIDTH * size) if address else None
    return None if copy is None else (address, copy)


def _leave(p: Tensor, gradient: Tensor | None) -> _Left | None:
    """What is to be known of a gradient; None where it cannot be read, or on a CPU is 0."""
    if gradient is None:
        return None
    if (here := _here(gradient)) is not None and here[1].strip(b"\0\x80"):  # more than zeros of either sign
        return _Left(p, here[1], gradient.dtype, here[0])
    with torch.no_grad():
        if (local := readable(gradient)) is None:
            return None
        part = _part(local)
        return None if part.is_cpu and not part.any() else _Left(p, part.clone(), local.dtype, local.data_ptr())


def _look(one: _Left) -> None:
    """Hold what is there against what was left: its bits at the first backward, that it is not 0 at the others."""
    first, one.begun = not one.begun, True
    gradient = one.parameter.grad
    if gradient is None or _is_cleared(one, gradient):
        one.stays = False
    else:
        _hold(one, gradient, first)


def _takes_hooks(p: Tensor) -> bool:
    """Whether autograd itself adds to its `.grad`."""
    return type(p) in (Tensor, nn.Parameter) and p.requires_grad


def _adds(guard: Guard, one: _Left, _: Tensor) -> None:
    """Autograd is about to add to `.grad`, or gives it elsewhere: what was cleared since is not part of the sum."""
    try:
        if one.stays is not False:
            _look(one)
        if one.stays is False:  # autograd holds the hooks that it runs
            _let_go((one,))
    except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
        guard.swallow("updates", error)


def _let_go(left: Sequence[_Left]) -> None:
    for one in left:
        if one.handle is not None:
            one.handle.remove()
            one.handle = None


def _forget(left: list[_Left]) -> None:
    _let_go(left)
    left.clear()


def _is_held(optimizer: Optimizer, p: Tensor) -> bool:
    """Whether the optimizer steps with it now: layers that are frozen, or taken out of its groups, keep their last gradient."""
    return p.requires_grad and any(p is other for group in optimizer.param_groups for other in group["params"])


def _is_cleared(one: _Left, gradient: Tensor) -> bool:
    """Whether there are zeros now, as far as that is seen without torch."""
    here = _here(gradient) if isinstance(one.copy, bytes) else None
    return here is not None and not here[1].strip(b"\0")


@torch.no_grad()
def _hold(one: _Left, gradient: Tensor | None, first: bool) -> None:
    values = one.values
    if (gradient := readable(gradient)) is None or gradient.dtype != values.dtype or gradient.device != values.device:
        one.stays = False
        return
    now = _part(gradient)
    if now.is_cpu:
        one.stays = torch.equal(now, values) if first else bool(now.any())
        return
    stays = (now == values).all() & (now != 0).any() if first else (now != 0).any()
    one.stays = stays & one.stays if isinstance(one.stays, Tensor) else stays


def _was_added_to(one: _Left) -> Tensor | bool:
    """Whether what stayed is part of the gradient of now."""
    return one.stays is not False and _lies_along(one, readable(one.parameter.grad))


@torch.no_grad()
def _lies_along(one: _Left, gradient: Tensor | None) -> Tensor | bool:
    if gradient is None or gradient.data_ptr() != one.address:
        return False
    now, last = _part(gradient).double(), one.values.double()
    along = (now * last).sum() > ALONG * now.norm() * last.norm()
    return bool(along) and one.stays if along.is_cpu else along & one.stays
