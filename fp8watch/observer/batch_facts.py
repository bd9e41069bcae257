"""What entered the model in a step, as a hash and a few shares: batches that repeat, labels beside their tokens, padding.

Shapes:     inputs of the model, targets of its loss -> numbers, or 0-d tensors, once a step     Thread: training

Inputs come from the forward hook of the root module, targets from `torch.nn.functional.cross_entropy`. Both are read on
their device and without waiting; a compiled or captured model shows neither, and then the names are absent. The hash is
of each micro-batch, the shares are of the first one of a step. No input leaves the process, only these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8watch.observer.batch_arithmetic import (
    HASHED_ELEMENTS,
    Number,
    concentration,
    copies,
    fits_shifts,
    hash_integers,
    mean,
    scored,
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
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BatchFacts:
    """Those of the step that runs, of one watched model."""

    def __init__(self) -> None:
        self._hash: Tensor | int | None = None
        self._facts: dict[str, Number] = {}
        self._tokens: Tensor | None = None
        self._targets: tuple[Tensor, int] | None = None
        self._paired = False  # labels were held against their tokens: other losses of the step are others'

    @torch.no_grad()
    def see_inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Take what one forward pass was given. Integers of any shape, or floats where there are none."""
        named = [(name, x) for name, x in _tensors(args, kwargs) if _readable(x)][:MAX_TENSORS]
        whole = [x for _, x in named if x.dtype in _INTEGERS]
        for x in whole or [x for _, x in named if x.is_floating_point()]:
            mine = hash_bits(_some(x)) if x.is_floating_point() else hash_integers(_some(x))
            self._hash = mine if self._hash is None else _sum(self._hash, mine)
        if COPIES not in self._facts:
            rows = _rows(whole or [x for _, x in named if x.is_floating_point()])
            if rows:
                self._facts[COPIES] = copies(rows)
        flat = [(name, x) for name, x in named if x.ndim == 2 and not x.is_floating_point()]
        tokens = next((x for name, x in flat if "mask" not in name and x.numel() >= MIN_TOKENS), None)
        if tokens is not None and tokens.dtype in _INTEGERS and CONCENTRATION not in self._facts:
            self._tokens = tokens
            self._facts[CONCENTRATION] = concentration(_few_rows(tokens))
            self._pair()
        mask = next((x for name, x in flat if "mask" in name), None)
        if mask is not None and MASK not in self._facts:
            self._facts[MASK] = mean(mask)

    @torch.no_grad()
    def see_targets(self, targets: Tensor, ignored: int) -> None:
        """Take the targets of one loss: class indices of any shape, and the one that is not scored."""
        if self._paired or not _readable(targets) or targets.dtype not in _INTEGERS:
            return
        self._facts[SCORED] = scored(targets, ignored)
        self._targets = targets, ignored
        self._pair()

    def take(self) -> dict[str, Number]:
        """All of the step, by name, and forget it: numbers, or 0-d tensors."""
        if not self._paired and self._targets is not None:
            targets, ignored = self._targets
            if MIN_TARGETS <= targets.numel() <= MAX_TOKENS:
                with torch.no_grad():
                    self._facts[TARGETS] = concentration(targets, ignored)
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
        if (labels := _beside(tokens, targets)) is None or not fits_shifts(tokens):
            return
        self._paired = True
        self._facts.update(shares_of_shifts(_few_rows(tokens), _few_rows(labels), ignored))


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors of a call and their names, one level deep."""
    for name, value in (*((str(i), v) for i, v in enumerate(args)), *kwargs.items()):
        if isinstance(value, Mapping):
            yield from ((str(k), v) for k, v in value.items())
        elif isinstance(value, list | tuple):
            yield from ((name, v) for v in value)
        else:
            yield name, value


def _readable(x: Any) -> bool:
    """Whether it is a plain tensor with values of its own."""
    if type(x) is not Tensor or x.is_meta or not x.numel() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    if torch._C._get_tracing_state() is not None:  # what torch.jit.trace writes down is the model's alone
        return False
    return x.layout == torch.strided and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _rows(inputs: list[Tensor]) -> list[Tensor]:
    """Those that hold a row for each row of the first one; none where rows are few, very many, or numbers alone."""
    first = next((x for x in inputs if x.ndim >= 2), None)
    if first is None or not MIN_ROWS <= len(first) <= MAX_ROWS or first[0].numel() < MIN_COLUMNS:
        return []
    return [x for x in inputs if x.ndim >= 1 and len(x) == len(first) and x.device == first.device]


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


def _few_rows(x: Tensor) -> Tensor:
    return x[: max(1, MAX_TOKENS // x.shape[1])]


def _beside(tokens: Tensor, targets: Tensor) -> Tensor | None:
    """Labels in the shape of their tokens, or of all tokens but the last of each row; None where they are of others."""
    rows, width = tokens.shape
    if targets.device != tokens.device:
        return None
    for columns in (width, width - 1):
        if targets.numel() == rows * columns:
            return targets.reshape(rows, columns)
    return None
