"""What an update moved that does not go against the moment, or the gradient, of its element.

Shapes:     SAMPLE elements each of R weights: as they were, what moved them, what it was to go against -> two [] tensors
Thread:     training, before an optimizer steps; nothing waits for a device
"""

from __future__ import annotations

import torch
from torch import Tensor

ASTRAY_SHARE, OTHERS_ASTRAY = 0.04, 0.01
MIN_MOVED = 64
"""Elements of a sample; of fewer nothing is said."""
STILL = 2 * torch.finfo(torch.float32).eps
"""Of a weight: it moves by no more where it is decayed, rounded, and moved by nothing."""


def beside_decay(was: Tensor, moved: Tensor, decays: Tensor, against: Tensor) -> Tensor:
    """What moved but for decay and its rounding. [R, SAMPLE]

    Elements that nothing pulls show by how much a weight decays, whatever its optimizer makes of that number: rows of a table that no
    token names, half of a vocabulary in one process, move by nothing else.

    Args:
        was: float32 [R, SAMPLE], before the update.
        moved: what it was moved by.
        decays: [R] by which share decay is to shrink each in this step.
        against: moments, or gradients.
    """
    idle = (against == 0) * was
    found = (moved * idle).sum(1, keepdim=True) / idle.square().sum(1, keepdim=True).clamp(min=1e-30)
    rest = moved - torch.where(against == 0, found, -decays[:, None]) * was
    return rest * ((moved != 0) & (rest.abs() > STILL * was.abs()))


def astray(places: list[int], moved: Tensor, against: Tensor) -> tuple[Tensor, Tensor] | None:
    """What moved with its moment and not against it, of the one weight of which that is much, as a share of what moved; and its place
    among the R. 0 where none is one; None where there are fewer than two to hold against each other.

    Args:
        places: of those whose elements move against it alone.
        moved: without decay, [R, SAMPLE].
        against: moments, or gradients.
    """
    if len(places) < 2:
        return None
    at = torch.tensor(places, device="cpu").to(moved.device, non_blocking=True)
    size = moved[at].abs()
    wrong = (size * (moved[at].sign() != -against[at].sign())).sum(1)
    share = torch.where((size > 0).sum(1) >= MIN_MOVED, wrong / size.sum(1).clamp(min=1e-30), torch.nan)
    ordered = share.nan_to_num(1.0).sort(descending=True).values  # one of which nothing is known speaks for none
    others = ordered[1:].median() if len(places) > 2 else ordered[1]
    most = share.nan_to_num(0.0).max()
    first = at.index_select(0, share.nan_to_num(0.0).argmax().view(1))[0]
    return torch.where((most > ASTRAY_SHARE) & (others < OTHERS_ASTRAY), most, 0.0), first
