"""How far gradients that arrived are from those that were given, several at once: a device is asked for as little as one would take.

Shapes:     samples [N, K] float32 of N gradients, and of their weights -> three numbers for each, [N] float64
Thread:     training; nothing waits for a device
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_APART = 1e-3
ROUNDINGS = 2.0
"""A gradient is off by no more than so many eps of its dtype: it is added up, unscaled and clipped in it."""
NORMAL_ELEMENTS = 1024
"""Fewer do not tell normal noise from anything else."""
NORMAL_KURTOSIS, NORMAL_ALIKE = 0.5, 0.15
"""How far from 3, and correlation of squares with those of the gradient: three deviations of chance and more. Products of activations and
gradients differ in size from row to row and from column to column."""


class Pair(NamedTuple):
    """Of one parameter: some elements of its gradient as it arrived and as it was given, and of itself."""

    name: str
    got: Tensor
    expected: Tensor
    weight: Tensor | None
    dtype: torch.dtype  # of the gradient


def alike(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Those that are judged together: of one shape, dtype and device."""
    groups: dict[object, list[Pair]] = {}
    for pair in pairs:
        weight = pair.weight if pair.weight is not None and pair.weight.shape == pair.got.shape else None
        of = pair._replace(weight=weight)
        groups.setdefault((of.got.shape, of.dtype, of.got.device, weight is None), []).append(of)
    return list(groups.values())


def gradients_apart(pairs: list[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """How far each is from a positive multiple of what it was to be, as a share of its norm; which share of its elements is 0 though they
    were given as something else, if these are the smallest of them; and whether the difference is distributed as normal noise is. The
    first is 0 where it is rounding, where values were clipped, or where all that differs is 0 because its weight is; −1 where nothing
    can be said. [N] each"""
    dtype = pairs[0].dtype
    got, expected = (torch.stack(x).view(len(pairs), -1) for x in ([p.got for p in pairs], [p.expected for p in pairs]))
    both = (got.isfinite() & expected.isfinite()).all(1)
    of_got, of_expected = got.double(), expected.double()
    energy, size = of_expected.square().sum(1), of_got.norm(dim=1)
    wrong = of_got - ((of_got * of_expected).sum(1).clamp_min(0.0) / energy)[:, None] * of_expected
    apart = torch.where(size > 0, wrong.norm(dim=1) / size, torch.where(energy > 0, 1.0, -1.0))
    apart = torch.where((size > 0) & (energy == 0), 1.0, apart)
    given, sizes = expected != 0, expected.abs()
    lost = (got == 0) & given
    smallest = sizes.where(lost, 0.0).amax(1) <= sizes.where(given & ~lost, math.inf).amin(1)
    flushed = lost.sum(1) / given.sum(1).clamp_min(1) * smallest
    # one by one: what differs has one magnitude, the largest that there is, and was larger
    limit = got.abs().amax(1, keepdim=True)
    other = (got - expected).abs() > 4 * torch.finfo(dtype).eps * sizes
    clipped = (~other | ((got.abs() >= limit) & (sizes > limit) & (got * expected > 0))).all(1)
    rounding = apart <= max(LEAST_APART, ROUNDINGS * torch.finfo(dtype).eps)
    apart = torch.where(rounding | clipped, apart.clamp(max=0.0), apart)
    normal = _is_normal(wrong, of_expected) * ~lost.any(1)
    apart = torch.where(both & (apart < math.inf), apart, -1.0)
    weights = [p.weight for p in pairs if p.weight is not None]
    if weights:
        apart = torch.where(_is_pruned(got, expected, torch.stack(weights).view(len(pairs), -1), dtype), 0.0, apart)
    return apart, flushed.double(), normal


def _is_pruned(got: Tensor, expected: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether all that differs is 0 where the weight is 0 too, and no other weight is: a mask of pruned elements. [N] bool"""
    gone = (got == 0) & (expected != 0)
    of_got, kept = got.double(), expected.double() * ~gone
    factor = (of_got * kept).sum(1) / kept.square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)  # 0 of nothing
    limit = max(LEAST_APART, ROUNDINGS * torch.finfo(dtype).eps)
    same = (of_got - factor[:, None] * kept).norm(dim=1) <= limit * of_got.norm(dim=1)
    pruned: Tensor = gone.any(1) & (((weight == 0) == gone) | (expected == 0)).all(1) & same
    return pruned


def _is_normal(wrong: Tensor, expected: Tensor) -> Tensor:
    """Whether a difference is distributed as normal noise, and is as large where the gradient is small. [N] float64"""
    of_wrong, of_expected = wrong.square(), expected.square()
    kurtosis = of_wrong.square().mean(1) / of_wrong.mean(1).square()
    a, b = (of - of.mean(1, keepdim=True) for of in (of_wrong, of_expected))
    as_large = (a * b).sum(1).abs() <= NORMAL_ALIKE * a.norm(dim=1) * b.norm(dim=1)
    return ((kurtosis - 3.0).abs() <= NORMAL_KURTOSIS).logical_and(as_large).double()
