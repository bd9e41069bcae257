"""One look at a tensor on the CPU: its largest magnitude tells at once whether all of it is finite.

Shapes:     any shape -> one number, or one slab row     Thread: training

Without the C library, and for what it does not read, there are torch's own functions; they take twice as long.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from fp8watch.kernels.cpu_compiler import Unavailable
from fp8watch.kernels.cpu_library import load

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADED_ELEMENTS = 1 << 19  # from here on torch shares the work among its threads


def _readable(x: Tensor) -> int | None:
    """The library's name of the dtype; None for what is better left to torch, and for what has no memory of its own: a
    subclass such as DTensor may answer data_ptr() with 0."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        return None
    alone = x.numel() < _THREADED_ELEMENTS or torch.get_num_threads() == 1
    return _DTYPES.get(x.dtype) if alone and x.is_cpu and x.is_contiguous() and not x.is_neg() else None


def largest_magnitude(x: Tensor) -> float:
    """max |x|: NaN where an element is NaN, else Inf where one is ±Inf.

    Args:
        x: any shape, floating, on the CPU, not empty.
    """
    dtype = _readable(x)
    if dtype is not None:
        try:
            bits = load().fp8watch_magnitude(x.data_ptr(), x.numel(), dtype)
            return float(struct.unpack("f", struct.pack("i", bits))[0])
        except Unavailable:  # no compiler here
            pass
    low, high = (float(end) for end in torch.aminmax(x))
    return max(abs(low), abs(high))  # of a tensor with NaN both ends are NaN


def look_into(x: Tensor, address: int, call_order: int, *, energy: bool) -> bool:
    """Merge a look at an output into the slab row at `address`, as `fp8watch.sketch.slab.Slab.accumulate_probe`.

    Args:
        x: any shape, floating, not empty.
        address: of a row of ROW in memory.
        call_order: index of the call in the step.
        energy: measure Σ x² as well.

    Returns:
        False where nothing was done: an element is not finite, or the library does not read this tensor.
    """
    dtype = _readable(x)
    if dtype is None:
        return False
    try:
        return not load().fp8watch_look(x.data_ptr(), x.numel(), dtype, energy, address, call_order)
    except Unavailable:
        return False
