"""Codes are right and lie elsewhere, or are read as another format: rolled, transposed, bytes of E4M3 read as E5M2.

Shapes:     Case -> guesses
Thread:     training, and autograd's

How far they are rolled is where the correlation of one row (or column) with the right one is largest: it is tried, not believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fp8watch.numerics.formats import FORMATS
from fp8watch.quantize.why.case import Case, Guess
from fp8watch_agent.fault_names import CODES_AS_FORMAT, CODES_ROLLED, CODES_TRANSPOSED, SHARE


def as_format(case: Case) -> Iterator[Guess]:
    """Bytes of one format read as the other."""
    right = case.right_code.nan_to_num(0.0).to(case.fmt.dtype).view(torch.uint8)
    for fmt in FORMATS.values():
        if fmt.name == case.spec.format:
            continue
        read = right.view(fmt.dtype).to(torch.float32)
        yield Guess(CODES_AS_FORMAT, {SHARE: case.explained(read * case.right_inverse), "written": 0.0})
        # the operand was cast to the other format, with its scale, and is read as the recipe's
        if case.scale is None:
            from_other = case.scale_of(case.amax(case.side), replace(case.spec, format=fmt.name))
            written = case.quantised(from_other, fmt).nan_to_num(0.0).to(fmt.dtype).view(torch.uint8)
            read = written.view(case.fmt.dtype).to(torch.float32)
            yield Guess(CODES_AS_FORMAT, {SHARE: case.explained(read / from_other), "written": 1.0})


def rolled(case: Case) -> Iterator[Guess]:
    """Codes so many columns or rows further, each beside the scale of where it lies; and values."""
    read, right = _in_codes(case), case.right_code.where(case.judged, 0.0)
    for axis in (1, 0):
        if axis == 0 and not case.whole:
            continue
        line = case.wrong.sum(axis).argmax().reshape(1)  # the row, or the column, with most that is wrong
        theirs, ours = (t.index_select(1 - axis, line).flatten() for t in (read, right))
        size = len(ours)
        at = torch.fft.irfft(torch.fft.rfft(theirs) * torch.fft.rfft(ours).conj(), n=size).argmax()
        back = (torch.arange(size, device=at.device) - at).remainder(size)
        by = at.where(at <= size // 2, at - size)
        for values in (right * case.right_inverse, right):
            moved = values.index_select(axis, back)
            expected = moved if values is not right else moved * case.right_inverse
            yield Guess(CODES_ROLLED, {SHARE: case.explained(expected), "axis": float(axis), "by": by})


def transposed(case: Case) -> Iterator[Guess]:
    """Codes, or values, written row by row and read column by column, or the other way round."""
    m, k = case.x.shape
    if not case.whole or min(m, k) < 2:
        return
    for way, place in ((0.0, _written_transposed), (1.0, _read_transposed)):
        for expected in (place(case.right_code) * case.right_inverse, place(case.right)):
            yield Guess(CODES_TRANSPOSED, {SHARE: case.explained(expected), "way": way})


def _written_transposed(t: Tensor) -> Tensor:
    return t.t().reshape(t.shape)


def _read_transposed(t: Tensor) -> Tensor:
    return t.reshape(t.shape[1], t.shape[0]).t()


def _in_codes(case: Case) -> Tensor:
    """What is read as numbers of the format, with the right scale; 0 where it is not finite."""
    read = case.read * case.right_scale if case.codes is None else case.codes.to(torch.float32)
    return read.where(case.judged & read.isfinite(), 0.0)
