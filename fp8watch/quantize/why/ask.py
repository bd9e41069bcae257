"""All hypotheses of a wrong quantiser, tried in order: settings first, then scales and codes, then another tensor.

Shapes:     Case -> guesses
Thread:     training, and autograd's

Asked once, where a fault was found. On a CPU the first that explains it ends the search; elsewhere nobody waits for the device,
so that all of them are computed and the first of them is taken where they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fp8watch.quantize.why.another_weight import another_weight
from fp8watch.quantize.why.case import Case, Guess
from fp8watch.quantize.why.epsilon import epsilon
from fp8watch.quantize.why.places import as_format, rolled, transposed
from fp8watch.quantize.why.scales import other_scales, stale
from fp8watch.quantize.why.settings import number_format, one_scale, scale_kind, tile
from fp8watch_agent.fault_names import TOLD_SHARE

Hypothesis = Callable[[Case], Iterator[Guess]]

OF_CODES: tuple[Hypothesis, ...] = (
    one_scale, epsilon, scale_kind, number_format, tile, stale, as_format, rolled, transposed, other_scales,
)  # fmt: skip


@torch.no_grad()
def ask(case: Case, *, is_weight: bool = False) -> list[Guess]:
    """What may explain a fault.

    Args:
        case: it.
        is_weight: the operand is a weight, of which older ones are near.

    Returns:
        On a CPU the one that holds, or nothing; on another device all, the first of which to hold is meant.
    """
    found: list[Guess] = []
    with torch.autocast(case.x.device.type, enabled=False):
        for hypothesis in (*OF_CODES, another_weight) if is_weight else OF_CODES:
            for guess in hypothesis(case):
                if not guess.share.is_cpu:
                    found.append(guess)
                elif float(guess.share) >= TOLD_SHARE:
                    return [guess]
    return found
