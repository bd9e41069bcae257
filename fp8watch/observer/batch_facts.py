"""What entered the model in a step, as a hash and a few shares: batches that repeat, labels beside their tokens, padding.

Shapes:     inputs of the model, targets of its loss -> numbers, or 0-d tensors, once a step     Thread: training

Inputs come from the forward hook of the root module, targets from `torch.nn.functional.cross_entropy`. Both are read on
their device and without waiting; a compiled or captured model shows neither, and then the names are absent. The hash is
of each micro-batch, the shares are of the first one of a step. No input leaves the process, only these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from fp8watch.kernels.cpu_batch import BYTES, count_scored, count_shifts, look_at_batch
from fp8watch.observer.batch_arithmetic import (
    HASHED_ELEMENTS,
    RULE,
    Number,
    concentration,
    concentration_of,
    copies,
    fits_shifts,
    hash_integers,
    mean,
    scored,
    shares_of_counts,
    shares_of_shifts,
)
from fp8watch.sketch.weight_hash import hash_bits
from fp8watch_agent.batch_names import CONCENTRATION, COPIES, HASH, MASK, SCORED, TARGETS

MAX_TENSORS = 16
MIN_TOKENS, MAX_TOKENS = 64, 8192
"""Of a micro-batch; of more, the first rows are read."""
MIN_TARGETS = 16
MIN_ROWS, MAX_ROWS, MIN_COLUMNS = 4, 4096, 4
"""Of a micro-batch whose rows are held against each other."""
_HASH_BITS = (1 << 52) - 1  # a float64 holds it
_STRIDED = torch.strided
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_tracing_state = torch._C._get_tracing_state


class BatchFacts:
    """Those of the step that runs, of one watched model."""

    def __init__(self) -> None:
        self._hash: Tensor | int | None = None
        self._facts: dict[str, Number] = {}
        self._tokens: Tensor | None = None
        self._targets: tuple[Tensor, int] | None = None
        self._paired = False  # labels were held against their tokens: other losses of the step are others'

    def forward_begins(self) -> None:
        """The model is called with gradients: targets that were seen before, and go with no tokens of its, are of another one."""
        if self._targets is not None and not self._paired:
            self._targets = None
            self._facts.pop(SCORED, None)

    def see_inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Take what one forward pass was given. Integers of any shape, or floats where there are none."""
        whole: list[Tensor] = []
        floats: list[Tensor] = []
        tokens = mask = None
        for name, x in _readable_tensors(args, kwargs):
            if x.dtype in BYTES:
                whole.append(x)
            elif x.is_floating_point():
                floats.append(x)
                continue
            if x.ndim != 2:
                continue
            if "mask" in name:
                mask = x if mask is None else mask
            elif tokens is None and x.numel() >= MIN_TOKENS:
                tokens = x
        facts, inputs = self._facts, whole or floats
        if CONCENTRATION in facts or tokens is None or tokens.dtype not in BYTES:
            tokens = None
        mask = None if MASK in facts else mask
        num_rows = 0 if COPIES in facts else _num_rows(inputs)
        if not (whole and self._see_at_once(whole, num_rows, tokens, mask)):
            with torch.no_grad():
                self._see_each(inputs, num_rows, tokens, mask)
        if tokens is not None:
            self._tokens = tokens
            self._pair()

    def _see_at_once(self, inputs: list[Tensor], num_rows: int, tokens: Tensor | None, mask: Tensor | None) -> bool:
        """By the C library; false where it does not do it."""
        which, token_rows, masked = 0, 0, -1
        for place, x in enumerate(inputs):
            if x is tokens:
                which, token_rows = place, _num_few_rows(x)
            if x is mask:
                masked = place
        found = look_at_batch(inputs, RULE, num_rows, which, token_rows, masked)
        if found is None:
            return False
        facts, (mine, num_distinct, squares, total) = self._facts, found
        self._add(mine)
        if num_rows:
            facts[COPIES] = 1.0 - num_distinct / num_rows
        if tokens is not None:
            facts[CONCENTRATION] = concentration_of(token_rows * tokens.shape[1], squares)
        if mask is not None:
            facts[MASK] = mean(mask) if masked < 0 else total / mask.numel()
        return True

    def _see_each(self, inputs: list[Tensor], num_rows: int, tokens: Tensor | None, mask: Tensor | None) -> None:
        for x in inputs:
            self._add(hash_bits(_some(x)) if x.is_floating_point() else hash_integers(_some(x)))
        if num_rows:
            self._facts[COPIES] = copies(_rows(inputs, num_rows))
        if tokens is not None:
            self._facts[CONCENTRATION] = concentration(tokens[: _num_few_rows(tokens)])
        if mask is not None:
            self._facts[MASK] = mean(mask)

    def _add(self, mine: Tensor | int) -> None:
        self._hash = mine if self._hash is None else _sum(self._hash, mine)

    def see_targets(self, targets: Tensor, ignored: int) -> None:
        """Take the targets of one loss: class indices of any shape, and the one that is not scored."""
        if self._paired or not _readable(targets) or targets.dtype not in BYTES or _tracing_state() is not None:
            return
        seen = count_scored(targets, ignored, concentrated=False)
        self._facts[SCORED] = scored(targets, ignored) if seen is None else seen[0] / targets.numel()
        self._targets = targets, ignored
        self._pair()

    def take(self) -> dict[str, Number]:
        """All of the step, by name, and forget it: numbers, or 0-d tensors."""
        if not self._paired and self._targets is not None:
            targets, ignored = self._targets
            if MIN_TARGETS <= targets.numel() <= MAX_TOKENS:
                seen = count_scored(targets, ignored, concentrated=True)
                self._facts[TARGETS] = concentration(targets, ignored) if seen is None else concentration_of(*seen)
        facts, hashed = self._facts, self._hash
        self._facts, self._hash, self._tokens, self._targets, self._paired = {}, None, None, None, False
        if hashed is not None:
            facts[HASH] = hashed & _HASH_BITS
        return facts

    def _pair(self) -> None:
        """Hold labels against tokens, once both of a micro-batch are there."""
        if self._tokens is None or self._targets is None:
            return
        tokens, (targets, ignored) = self._tokens, self._targets
        if not (columns := _columns_beside(tokens, targets)) or not fits_shifts(tokens):
            return
        self._paired = True
        num_rows = _num_few_rows(tokens)
        seen = count_shifts(tokens, targets, columns, num_rows, ignored)
        if seen is not None:
            self._facts.update(shares_of_counts(seen))
            return
        labels = targets.reshape(tokens.shape[0], columns)
        self._facts.update(shares_of_shifts(tokens[:num_rows], labels[:num_rows], ignored))


def _readable_tensors(args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Plain tensors of a call, one level deep, and their names where they have one: the first MAX_TENSORS."""
    found: list[tuple[str, Tensor]] = []
    if _tracing_state() is not None:  # what torch.jit.trace writes down is the model's alone
        return found
    for name, value in (*zip(repeat(""), args), *kwargs.items()):
        if type(value) is Tensor:
            if _readable(value):
                found.append((name, value))
        elif isinstance(value, list | tuple):
            found += ((name, x) for x in value if _readable(x))
        elif value is not None and isinstance(value, Mapping):
            found += ((str(k), x) for k, x in value.items() if _readable(x))
    return found[:MAX_TENSORS]


def _readable(x: Any) -> bool:
    """Whether it is a plain tensor with values of its own."""
    if type(x) is not Tensor or not x.numel() or x.layout is not _STRIDED or _is_wrapped(x):
        return False
    return x.is_cpu or not (x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def _num_rows(inputs: list[Tensor]) -> int:
    """Of the first one that has rows; 0 where they are few, very many, or numbers alone."""
    for x in inputs:
        if x.ndim >= 2:
            rows = x.shape[0]
            return rows if MIN_ROWS <= rows <= MAX_ROWS and x.numel() >= MIN_COLUMNS * rows else 0
    return 0


def _rows(inputs: list[Tensor], num_rows: int) -> list[Tensor]:
    """Those that hold a row for each row of the first one."""
    first = next(x for x in inputs if x.ndim >= 2)
    return [x for x in inputs if x.ndim >= 1 and x.shape[0] == num_rows and x.device == first.device]


def _some(x: Tensor) -> Tensor:
    """At most HASHED_ELEMENTS of a tensor. [n]"""
    flat = x.detach().reshape(-1) if x.is_contiguous() or x.numel() <= HASHED_ELEMENTS else x.detach()[:1].reshape(-1)
    return flat[:: -(-flat.numel() // HASHED_ELEMENTS)]


def _sum(known: Tensor | int, more: Tensor | int) -> Tensor | int:
    """Of two hashes; of numbers one that int64 may not hold, but whose low bits are the same."""
    if isinstance(known, Tensor) and isinstance(more, Tensor):
        return known + more.to(known.device, non_blocking=True)
    if isinstance(known, Tensor) or isinstance(more, Tensor):  # one of them lies on a device: there the sum has 64 bits
        return (known & _HASH_BITS) + (more & _HASH_BITS)
    return known + more


def _num_few_rows(tokens: Tensor) -> int:
    """Of [B, T] tokens, those that are read."""
    rows, columns = tokens.shape
    return min(rows, max(1, MAX_TOKENS // columns))


def _columns_beside(tokens: Tensor, targets: Tensor) -> int:
    """How many labels stand beside a row of tokens: as many, or one less; 0 where they are none of these tokens."""
    rows, width = tokens.shape
    num = targets.numel()
    if num not in (rows * width, rows * (width - 1)) or targets.device != tokens.device:
        return 0
    return num // rows
