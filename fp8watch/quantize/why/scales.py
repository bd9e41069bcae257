"""Codes are right and the scales beside them are not: which scales they are instead.

Shapes:     Case -> guesses
Thread:     training, and autograd's

Where codes are read, scale_inv lies beside them. Where values are, each tile is its right values times one factor, which is
what its scale_inv is off by.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from fp8watch.numerics.formats import E4M3, E5M2
from fp8watch.quantize.why.case import EDGE, Case, Guess
from fp8watch_agent.fault_names import (
    SCALES_AS_BYTES,
    SCALES_FACTOR,
    SCALES_INVERSE,
    SCALES_PERMUTED,
    SCALES_ROLLED,
    SCALES_ROUNDED,
    SCALES_STALE,
    SHARE,
)

_SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16, 32, -32)
_LEAST_DISTINCT = 4
"""Scales that differ: of fewer a permutation says nothing."""
_E8M0_BIAS = 127.0


def stale(case: Case) -> Iterator[Guess]:
    """Scales of the step before: beside codes of this one, of codes that were made with them, or both."""
    if case.before is None:
        return
    tile = case.reads.tile
    expected = tuple(-(-n // t) for n, t in zip(case.x.shape, tile, strict=True))
    if tuple(case.before.shape) != expected:
        return
    old = case.of_tiles(case.before.to(torch.float32), tile)
    cast = case.quantised(1.0 / old)
    for what, would_be in ((0.0, case.right_code * old), (1.0, cast * case.right_inverse), (2.0, cast * old)):
        yield Guess(SCALES_STALE, {SHARE: case.explained(would_be), "what": what})


def other_scales(case: Case) -> Iterator[Guess]:
    """Scales that others are: a factor, rounded, inverse, bytes read otherwise, those of other tiles."""
    tile = case.side
    if case.spec.scaling == "mx" or tile != (-1, -1):
        yield from _of_tiles(case)
    else:
        yield from _of_one(case)


def _of_one(case: Case) -> Iterator[Guess]:
    read, code = case.read.where(case.wrong, 0.0), case.right_code.where(case.wrong, 0.0)
    inverse = (read * code).sum() / code.square().sum()
    right = case.right_inverse.reshape(-1)[:1].sum()
    yield from _known(case, inverse.expand(case.x_mk.shape), right.expand(case.x_mk.shape), inverse / right)


def _of_tiles(case: Case) -> Iterator[Guess]:
    found = case.inverse if case.inverse is not None else _by_least_squares(case)
    of_wrong = (found / case.right_inverse).where(case.wrong & found.isfinite(), torch.nan)
    yield from _known(case, found, case.right_inverse, of_wrong.flatten().nanmedian())
    yield from _elsewhere(case)


def _by_least_squares(case: Case) -> Tensor:
    """scale_inv of each element, as what is read of its tile says it."""
    products = case.read.where(case.judged, 0.0) * case.right_code.where(case.judged, 0.0)
    energy = case.right_code.where(case.judged, 0.0).square()
    return _sum_of_tiles(case, products) / _sum_of_tiles(case, energy)


def _sum_of_tiles(case: Case, values: Tensor) -> Tensor:
    (bm, bk), (m, k) = case.reads.tile, values.shape
    bm, bk = min(bm, m), min(bk, k)
    padded = torch.nn.functional.pad(values, (0, -k % bk, 0, -m % bm))
    tiles = padded.view(padded.shape[0] // bm, bm, padded.shape[1] // bk, bk).sum((1, 3))
    return tiles.repeat_interleave(bm, 0).repeat_interleave(bk, 1)[:m, :k]


def _known(case: Case, found: Tensor, right: Tensor, factor: Tensor) -> Iterator[Guess]:
    """Scales that are a function of the right ones."""
    exponent = torch.log2(right)
    code = case.right_code
    times = case.explained(code * right * factor) * (factor > 0)  # zeros are no codes with a factor
    yield Guess(SCALES_FACTOR, {SHARE: times, "factor": factor})
    down, up = torch.exp2(exponent.floor()), torch.exp2(exponent.ceil())
    for way, rounded in ((-1.0, down), (1.0, up)):
        yield Guess(SCALES_ROUNDED, {SHARE: case.explained(code * rounded), "way": way})
    yield Guess(SCALES_INVERSE, {SHARE: case.explained(code / right)})
    byte = (exponent.floor() + _E8M0_BIAS).clamp(0, 254)
    of_byte = [byte, exponent.floor(), *(_as_fp8(byte, fmt.dtype) for fmt in (E4M3, E5M2))]
    for number, wrong in enumerate(of_byte):
        yield Guess(SCALES_AS_BYTES, {SHARE: case.explained(code * wrong), "as": float(number)})


def _as_fp8(byte: Tensor, dtype: torch.dtype) -> Tensor:
    return byte.to(torch.uint8).view(dtype).to(torch.float32)


def _elsewhere(case: Case) -> Iterator[Guess]:
    """Scales that other tiles ought to have."""
    (bm, bk), whole = case.reads.tile, case.whole
    if not whole or max(bm, bk) > EDGE:  # in a window the others are not known
        return
    right = case.right_inverse[::bm, ::bk]
    for axis, by in product((1, 0), _SHIFTS):
        if abs(by) < right.shape[axis]:
            moved = case.of_tiles(right.roll(by, axis), (bm, bk))
            yield Guess(
                SCALES_ROLLED,
                {SHARE: case.explained(case.right_code * moved), "axis": float(axis), "by": float(by)},
            )
    for by in _SHIFTS:
        if abs(by) < right.numel():
            moved = case.of_tiles(right.flatten().roll(by).view(right.shape), (bm, bk))
            yield Guess(SCALES_ROLLED, {SHARE: case.explained(case.right_code * moved), "axis": -1.0, "by": float(by)})
    found = (case.inverse if case.inverse is not None else _by_least_squares(case))[::bm, ::bk]
    in_order, theirs = found.flatten().sort().values, right.flatten().sort().values
    are_theirs = (in_order - theirs).abs() <= theirs * 2.0**-10
    distinct = (theirs.diff() > theirs[:-1] * 2.0**-10).sum() + 1
    expected = case.right_code * case.of_tiles(found, (bm, bk))
    share = case.explained(expected) * are_theirs.to(torch.float32).mean() * (distinct >= _LEAST_DISTINCT)
    moved = ((found - right).abs() > right * 2.0**-10).sum()
    yield Guess(SCALES_PERMUTED, {SHARE: share, "moved": moved, "scales": float(right.numel())})
