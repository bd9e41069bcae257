"""Another amax epsilon than the recipe's is in effect: tiles whose amax lies below one value have the same scale.

Shapes:     Case -> guesses
Thread:     training, and autograd's

scale = FP8_MAX / max(amax, eps'), so tiles below eps' have the smallest scale_inv that there is, eps' / FP8_MAX. Where scale_inv
is read, it says which. Else the smallest number that is read where something is wrong is one, two or three of the format's
smallest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8watch.quantize.why.case import Case, Guess
from fp8watch_agent.fault_names import EPS, SHARE

_MULTIPLES = (1, 2, 3)
_SAME = 2.0**-12


def epsilon(case: Case) -> Iterator[Guess]:
    """An eps that is larger than the recipe's."""
    if case.spec.scaling != "current" or case.scale is not None:
        return
    for floor in _least_inverse(case):
        scale = torch.minimum(case.right_scale, 1.0 / floor)
        expected = case.quantised(scale) / scale
        floored = case.wrong & (case.right_scale * floor > 1)
        seen = (floored & (case.read != 0)).any()  # where nothing is left, any larger eps would do as well
        lost = case.judged & (case.x_mk != 0)
        share = case.explained(expected, everywhere=True) * seen
        if case.inverse is not None:  # an eps is one of all tiles
            beside = ((case.inverse * scale - 1).abs() <= _SAME) & case.judged
            share = torch.minimum(share, beside.sum() / case.judged.sum().clamp_min(1))
        yield Guess(
            EPS,
            {
                SHARE: share,
                "eps": floor * case.fmt.max_finite,
                "zeroed": (lost & (case.read == 0)).sum() / lost.sum().clamp_min(1),
                "below": (case.judged & (case.right_scale * floor > 1)).sum() / case.judged.sum().clamp_min(1),
            },
        )


def _least_inverse(case: Case) -> Iterator[Tensor]:
    """What scale_inv may be where amax lies below eps: [] each."""
    if case.inverse is not None:
        yield case.inverse.where(case.wrong, torch.inf).amin()
        return
    least = case.read.abs().where(case.wrong & (case.read != 0), torch.inf).amin() / case.fmt.min_subnormal
    for multiple in _MULTIPLES:
        yield least / multiple
