"""What entered the model in a step, as a hash and a few shares: batches that repeat, labels beside their tokens, padding.

Shapes:     inputs of the model, targets of its loss -> 0-d tensors, once a step     Thread: training

Inputs come from the forward hook of the root module, targets from `torch.nn.functional.cross_entropy`. Both are read on
their device and without waiting; a compiled or captured model shows neither, and then the names are absent. The hash is
of each micro-batch, the shares are of the first one of a step. No input leaves the process, only these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8watch.sketch.weight_hash import hash_bits
from fp8watch_agent.batch_names import BUCKETS, CONCENTRATION, HASH, MASK, SCORED, SHIFTS

MAX_TENSORS = 16
HASHED_ELEMENTS = 1 << 16
"""At most so many of a tensor are hashed, evenly spread."""
MIN_TOKENS, MAX_TOKENS = 64, 8192
"""Of a micro-batch; of more, the first rows are read."""
_HASH_BITS = (1 << 52) - 1  # a float64 holds it
_GOLDEN = 0x1E3779B97F4A7C15  # odd, and of as many ones as zeros
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_FIRST, _LAST = min(SHIFTS), max(SHIFTS)


class BatchFacts:
    """Those of the step that runs, of one watched model."""

    def __init__(self) -> None:
        self._hash: Tensor | None = None
        self._facts: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None
        self._targets: tuple[Tensor, int] | None = None
        self._paired = False  # labels were held against their tokens: other losses of the step are others'

    @torch.no_grad()
    def see_inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Take what one forward pass was given. Integers of any shape, or floats where there are none."""
        named = [(name, x) for name, x in _tensors(args, kwargs) if _readable(x)][:MAX_TENSORS]
        whole = [x for _, x in named if x.dtype in _INTEGERS]
        for x in whole or [x for _, x in named if x.is_floating_point()]:
            mine = hash_bits(_some(x)) if x.is_floating_point() else _hash_integers(_some(x))
            self._hash = mine if self._hash is None else self._hash + mine.to(self._hash.device, non_blocking=True)
        flat = [(name, x) for name, x in named if x.ndim == 2 and not x.is_floating_point()]
        tokens = next((x for name, x in flat if "mask" not in name and x.numel() >= MIN_TOKENS), None)
        if tokens is not None and tokens.dtype in _INTEGERS and CONCENTRATION not in self._facts:
            self._tokens = tokens
            self._facts[CONCENTRATION] = _concentration(_few_rows(tokens))
            self._pair()
        mask = next((x for name, x in flat if "mask" in name), None)
        if mask is not None and MASK not in self._facts:
            self._facts[MASK] = mask.double().mean()

    @torch.no_grad()
    def see_targets(self, targets: Tensor, ignored: int) -> None:
        """Take the targets of one loss: class indices of any shape, and the one that is not scored."""
        if self._paired or not _readable(targets) or targets.dtype not in _INTEGERS:
            return
        self._facts[SCORED] = (targets != ignored).double().mean()
        self._targets = targets, ignored
        self._pair()

    def take(self) -> dict[str, Tensor]:
        """All of the step, by name, and forget it. 0-d each"""
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
        if (labels := _beside(tokens, targets)) is None or tokens.shape[1] < _LAST - _FIRST + 2:
            return
        self._paired = True
        width = labels.shape[1] - (_LAST - _FIRST)
        tokens, labels = _few_rows(tokens), _few_rows(labels)
        inner = labels[:, -_FIRST : -_FIRST + width]
        scored = inner != ignored
        shifted = tokens[:, : labels.shape[1]].unfold(1, width, 1)  # [B, shifts, width]
        same = ((shifted == inner[:, None]) & scored[:, None]).sum((0, 2))
        share = same.double() / scored.sum()  # NaN where nothing was scored
        for place, name in enumerate(SHIFTS.values()):
            self._facts[name] = share[place]


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


def _some(x: Tensor) -> Tensor:
    """At most HASHED_ELEMENTS of a tensor. [n]"""
    flat = x.detach().reshape(-1) if x.is_contiguous() or x.numel() <= HASHED_ELEMENTS else x.detach()[:1].reshape(-1)
    return flat[:: -(-flat.numel() // HASHED_ELEMENTS)]


@lru_cache(maxsize=8)
def _odd(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, 2 * HASHED_ELEMENTS, 2, dtype=torch.int64, device=device)


def _hash_integers(x: Tensor) -> Tensor:
    """As `hash_bits`, with all bits in use: tokens have few, and sums of few bits are soon the same. [n] -> []"""
    wide = x.long() * _GOLDEN
    return ((wide ^ (wide >> 32)) * _odd(x.device)[: len(wide)]).sum()


def _few_rows(x: Tensor) -> Tensor:
    return x[: max(1, MAX_TOKENS // x.shape[1])]


def _concentration(tokens: Tensor) -> Tensor:
    """Σ p² over buckets. [B, T] -> []"""
    bucket = (tokens.reshape(-1).long()) & (BUCKETS - 1)
    count = torch.zeros(BUCKETS, dtype=torch.float64, device=tokens.device)
    count.scatter_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
    return (count / tokens.numel()).square().sum()


def _beside(tokens: Tensor, targets: Tensor) -> Tensor | None:
    """Labels in the shape of their tokens, or of all tokens but the last of each row; None where they are of others."""
    rows, width = tokens.shape
    if targets.device != tokens.device:
        return None
    for columns in (width, width - 1):
        if targets.numel() == rows * columns:
            return targets.reshape(rows, columns)
    return None
