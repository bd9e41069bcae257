"""The arithmetic of batch facts: a hash, and shares of tokens and labels.

Shapes:     tokens, labels [B, T] -> one number each: a float or an int of a tensor on the CPU, 0-d on its device of any other
Thread:     training

A batch has a few thousand tokens, and there is no time for a dozen calls of torch, each of which costs more than what it
computes. On the CPU numpy computes the same from the same memory. Elsewhere nothing waits. What is here is the meaning:
where the C library has been loaded, it computes the same of integers in one call, see `fp8watch.kernels.cpu_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8watch.kernels.cpu_batch import rule
from fp8watch_agent.batch_names import BUCKETS, SHIFTS

HASHED_ELEMENTS = 1 << 16
"""At most so many of a tensor are hashed, evenly spread."""

COPIED_COLUMNS = 256

Number = Tensor | float
_GOLDEN = 0x1E3779B97F4A7C15  # odd, and of as many ones as zeros
_FIRST, _LAST = min(SHIFTS), max(SHIFTS)
RULE = rule(_GOLDEN, HASHED_ELEMENTS, COPIED_COLUMNS)
"""Of what is above, for the C library."""
_ODD = np.arange(1, 2 * HASHED_ELEMENTS, 2, dtype=np.int64)


def hash_integers(x: Tensor) -> Tensor | int:
    """As `hash_bits`, with all bits in use: tokens have few, and sums of few bits are soon the same.

    Args:
        x: integers [n], n at most HASHED_ELEMENTS.

    Returns:
        The sum modulo 2^64, read as two's complement.
    """
    if _on_host(x):
        wide = _host(x).astype(np.int64)
        wide *= _GOLDEN
        wide ^= wide >> 32
        wide *= _ODD[: len(wide)]
        return int(wide.sum())
    wide_x = x.long() * _GOLDEN
    return ((wide_x ^ (wide_x >> 32)) * _odd(x.device)[: len(wide_x)]).sum()


def concentration(tokens: Tensor, ignored: int | None = None) -> Number:
    """Σ p² over buckets; NaN of nothing.

    Args:
        tokens: integers of any shape.
        ignored: a value that does not count.
    """
    if _on_host(tokens):
        known = _host(tokens).ravel()
        known = known if ignored is None else known[known != ignored]
        in_bucket = np.bincount(known.astype(np.int64) & (BUCKETS - 1))
        return concentration_of(known.size, int(np.dot(in_bucket, in_bucket)))
    flat = tokens.reshape(-1).long()
    counts = torch.ones_like(flat, dtype=torch.float64) if ignored is None else (flat != ignored).double()
    count = torch.zeros(BUCKETS, dtype=torch.float64, device=tokens.device)
    count.scatter_add_(0, flat & (BUCKETS - 1), counts)
    return (count / counts.sum()).square().sum()


def concentration_of(num: int, squares: int) -> float:
    """From so many tokens, and the sum of the squares of the buckets' counts."""
    return squares / num**2 if num else math.nan


def copies(inputs: Sequence[Tensor]) -> Number:
    """Share of rows that are copies of another one: in all of these, as far as COPIED_COLUMNS evenly spread elements show.

    Args:
        inputs: integers or floats [B, ...], of one device.
    """
    rows = [_columns(x) for x in inputs]
    if _on_host(rows[0]):
        known = sum((_host(x).astype(np.int64) * _GOLDEN ^ i) @ _ODD[: x.shape[1]] for i, x in enumerate(rows))
        return 1.0 - len(np.unique(known)) / len(rows[0])
    hashed = sum(((x.long() * _GOLDEN ^ i) * _odd(x.device)[: x.shape[1]]).sum(1) for i, x in enumerate(rows))
    assert isinstance(hashed, Tensor)
    ordered = hashed.sort().values
    return (ordered[1:] == ordered[:-1]).sum().double() / len(ordered)


def _columns(x: Tensor) -> Tensor:
    """Rows of some elements, floats as their bits. [B, at most 2 · COPIED_COLUMNS]"""
    flat = x.detach().reshape(len(x), -1)
    flat = flat[:, :: max(1, flat.shape[1] // COPIED_COLUMNS)].contiguous()
    if x.is_floating_point():
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return flat


def mean(mask: Tensor) -> Number:
    """Of all elements."""
    if _on_host(mask) and mask.dtype is not torch.bfloat16:  # which numpy does not know
        return float(_host(mask).mean(dtype=np.float64))
    return mask.double().mean()


def scored(targets: Tensor, ignored: int) -> Number:
    """Share of the targets that are not `ignored`."""
    if _on_host(targets):
        return float(np.count_nonzero(_host(targets) != ignored) / targets.numel())
    return (targets != ignored).double().mean()


def fits_shifts(tokens: Tensor) -> bool:
    """Whether rows are long enough for each shift."""
    return tokens.shape[1] >= _LAST - _FIRST + 2


def shares_of_shifts(tokens: Tensor, labels: Tensor, ignored: int) -> dict[str, Number]:
    """Of each shift the share of the scored labels that are the token so many places further on; NaN where none is scored.

    Args:
        tokens, labels: [B, T], or labels [B, T − 1].
        ignored: the label that is not scored.
    """
    width = labels.shape[1] - (_LAST - _FIRST)
    if _on_host(tokens) and _on_host(labels):
        known, inner_x = _host(tokens), _host(labels)[:, -_FIRST : -_FIRST + width]
        scored_x = inner_x != ignored
        found = [np.count_nonzero(scored_x)]
        for place in range(len(SHIFTS)):
            same_x = (known[:, place : place + width] == inner_x) & scored_x
            found.append(np.count_nonzero(same_x))
        return shares_of_counts([int(n) for n in found])
    inner = labels[:, -_FIRST : -_FIRST + width]
    is_scored = inner != ignored
    shifted = tokens[:, : labels.shape[1]].unfold(1, width, 1)  # [B, shifts, width]
    same = ((shifted == inner[:, None]) & is_scored[:, None]).sum((0, 2))
    share = same.double() / is_scored.sum()
    return {name: share[place] for place, name in enumerate(SHIFTS.values())}


def shares_of_counts(counts: Sequence[int]) -> dict[str, Number]:
    """Of each shift, from the number of scored labels and for each shift of those that are the token there."""
    num, *same = counts
    return dict(zip(SHIFTS.values(), [n / num for n in same] if num else [math.nan] * len(same), strict=True))


def _on_host(x: Tensor) -> bool:
    return x.is_cpu


def _host(x: Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor on the CPU."""
    return x.detach().numpy()


@lru_cache(maxsize=8)
def _odd(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, 2 * HASHED_ELEMENTS, 2, dtype=torch.int64, device=device)
