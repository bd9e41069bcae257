"""A copy of a weight that was not written after its last updates: codes of another weight, near this one.

Shapes:     Case -> at most one guess
Thread:     training, and autograd's

What is read is then itself something that the recipe quantises to itself, to the last bit; every tile points where its
weight does; and no element is further off than updates move it. Bytes that nobody wrote are, and so is noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fp8watch.quantize.why.case import Case, Guess
from fp8watch_agent.fault_names import COPY_STALE, SHARE

_NEAR = 0.3
"""Of the size of a weight, or of the RMS of all of them: further off no element of an old copy lies."""
_NEARLY_ALL = 0.995
_BROAD = 0.02
"""Share of elements that are wrong: an update moves all of them, a stray write few."""


def another_weight(case: Case) -> Iterator[Guess]:
    """An older weight."""
    if case.scale is not None:
        return
    again = _requantised(case)
    same = case.same(again)
    x, read = (t.where(case.judged, 0.0) for t in (case.x_mk, case.read))
    rms = x.square().mean().sqrt()
    off = (read - case.right.where(case.judged, 0.0)).abs()
    near = off <= _NEAR * torch.maximum(x.abs(), rms)
    num = case.judged.sum().clamp_min(1)
    is_near = (near & case.judged).sum() / num >= _NEARLY_ALL
    broad = case.num_wrong / num >= _BROAD
    share = (same & case.wrong).sum() / case.num_wrong.clamp_min(1) * (is_near & broad)
    distance = off.mean() / x.abs().mean()  # rounding moves few codes by a whole step: unbiased in the mean
    numbers: dict[str, torch.Tensor | float] = {SHARE: share.to(torch.float32), "distance": distance}
    if case.update is not None:
        numbers["updates"] = distance / case.update
    yield Guess(COPY_STALE, numbers)


def _requantised(case: Case) -> torch.Tensor:
    """What is read, quantised by the recipe."""
    values = case.read.nan_to_num(0.0)
    of_read = Case(values, case.reads._replace(data=values, scale_inv=None), case.spec, torch.zeros_like(case.at))
    if case.side[0] < 0 or case.side[1] < 0:  # tiles that the window cuts have the amax of the operand's
        scale = case.scale_of(_line_amax(case, values))
    else:
        scale = of_read.scale_of(of_read.amax(case.side))
    return of_read.quantised(scale) / scale


def _line_amax(case: Case, values: torch.Tensor) -> torch.Tensor:
    """Of what is read of the rows, the columns, or all of the operand, of which the window has a part."""
    of = Case(case.reads.data.detach(), case.reads, case.spec, case.at)
    if case.reads.scale_inv is not None:
        full = case.reads.data.detach().to(torch.float32)
        rows, columns = (torch.arange(n, device=full.device) for n in full.shape)
        (bm, bk), scale_inv = case.reads.tile, case.reads.scale_inv.detach()
        full = full * scale_inv.index_select(0, rows // bm).index_select(1, columns // bk)
        of = Case(full, case.reads, case.spec, case.at)
    return of.amax(case.side).expand(values.shape)
