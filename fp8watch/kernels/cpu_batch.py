"""Facts of a batch by the C library where something has loaded it: `fp8watch.observer.batch_arithmetic` means them.

Shapes:     integers of at most two dimensions, on the CPU -> a few numbers     Thread: training

Once a step, behind the GEMMs of the model, nothing is in a processor's caches, and each of the thirty operations of numpy
that this takes loads code of its own: one call takes a tenth of the time. It is the same arithmetic, to the last bit.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8watch.kernels import cpu_library
from fp8watch_agent.batch_names import SHIFTS

BYTES = {torch.int64: 8, torch.int32: 4, torch.int16: 2, torch.uint8: 1}
"""Of one number, of each dtype that is read here."""
_MAX_INPUTS = 16
_ROWS = 4096  # BATCH_ROWS in batch.h
_INTEGERS = [struct.Struct(f"{6 * n}q").pack for n in range(_MAX_INPUTS + 1)]  # struct integers, as many as there are
_RULE = struct.Struct("3q")  # struct batch_rule
_found_of = struct.Struct("3qd").unpack  # struct batch_found
_Found, _Counted, _Shifted = ctypes.c_int64 * 4, ctypes.c_int64 * 2, ctypes.c_int64 * (1 + len(SHIFTS))


def rule(golden: int, hashed_elements: int, copied_columns: int) -> bytes:
    """What the library is told of the arithmetic: the factor of each number, and how much of a tensor and of a row is read."""
    return _RULE.pack(golden, hashed_elements, copied_columns)


def look_at_batch(
    inputs: Sequence[Tensor], rule: bytes, num_rows: int, tokens: int, token_rows: int, mask: int
) -> tuple[int, int, int, float] | None:
    """Look at what one forward pass was given, in one call.

    Args:
        inputs: plain tensors of dtypes in BYTES.
        num_rows: those that have so many rows are held against each other, row by row; 0: none.
        tokens, token_rows: which of them is concentrated, and how many of its rows are read; 0: none.
        mask: which of them is added up; -1: none.

    Returns:
        The sum of the hashes, read as two's complement; how many rows differ; Σ count² over the buckets of the tokens; the sum
        of the mask. What was not asked for is 0. None where there is no library, or it does not read one of them.
    """
    library = cpu_library.library
    if library is None or len(inputs) > _MAX_INPUTS or num_rows > _ROWS:
        return None
    flat: list[int] = []
    for x in inputs:
        if not x.is_cpu:
            return None
        shape = x.shape
        if len(shape) == 2:
            flat += (x.data_ptr(), BYTES[x.dtype], *shape, *x.stride())
        elif len(shape) == 1:
            flat += (x.data_ptr(), BYTES[x.dtype], shape[0], 1, x.stride(0), 1)
        elif not shape:
            flat += (x.data_ptr(), BYTES[x.dtype], 1, 1, 1, 1)
        else:
            return None
    found = _Found()
    num = len(inputs)
    if library.fp8watch_batch(_INTEGERS[num](*flat), num, rule, num_rows, tokens, token_rows, mask, found):
        return None
    return _found_of(found)


def count_scored(targets: Tensor, ignored: int, *, concentrated: bool) -> tuple[int, int] | None:
    """Count the targets that are scored, and of those, where asked for, Σ count² over their buckets.

    Args:
        targets: a plain tensor of a dtype in BYTES; of more than two dimensions only in one piece.

    Returns:
        Both numbers; the second one 0 where not asked for. None where there is no library, or it does not read them.
    """
    library = cpu_library.library
    if library is None or not targets.is_cpu:
        return None
    if targets.is_contiguous():
        layout: tuple[int, ...] = 1, targets.numel(), 0, 1
    elif (ndim := targets.ndim) <= 2:
        layout = (*targets.shape, *targets.stride()) if ndim == 2 else (1, targets.shape[0], 0, targets.stride(0))
    else:
        return None
    found = _Counted()
    one = _INTEGERS[1](targets.data_ptr(), BYTES[targets.dtype], *layout)
    if library.fp8watch_scored(one, ignored, concentrated, found):
        return None
    num, squares = found
    return num, squares


def count_shifts(tokens: Tensor, labels: Tensor, columns: int, num_rows: int, ignored: int) -> list[int] | None:
    """Count labels that are scored, and for each shift those of them that are the token there.

    Args:
        tokens: [B, T], a plain tensor of a dtype in BYTES.
        labels: B · columns of them, in one piece, in one line or [B, columns].
        columns: T or T − 1, and enough for each shift.
        num_rows: of these the first ones are read; at most B.

    Returns:
        The number that is scored, then one for each of SHIFTS. None where there is no library, or it does not read them.
    """
    library = cpu_library.library
    if library is None or not (tokens.is_cpu and labels.is_cpu):
        return None
    if labels.is_contiguous():
        strides: tuple[int, ...] = columns, 1
    elif labels.ndim == 2 and labels.shape[1] == columns:
        strides = labels.stride()
    elif labels.ndim == 1:
        step = labels.stride(0)
        strides = columns * step, step
    else:
        return None
    rows, width = tokens.shape
    both = _INTEGERS[2](
        tokens.data_ptr(), BYTES[tokens.dtype], rows, width, *tokens.stride(),
        labels.data_ptr(), BYTES[labels.dtype], rows, columns, *strides,
    )  # fmt: skip
    found = _Shifted()
    return None if library.fp8watch_shifts(both, num_rows, ignored, found) else found[:]
