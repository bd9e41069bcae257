"""A hash over every bit of a weight: replicas that should be equal are compared by it, in the collector.

Shapes:     weight [N, K] -> 0-d int64     Thread: training

    hash = Σ bits(i)·(2i + 1) mod 2^64 over all elements i, row by row

A flipped bit b of element i moves the sum by ±2^b·(2i + 1). An odd number has an inverse modulo 2^64, so this is never
0: every single flip is seen. Taken where the GEMM reads its weight, so that a sharded one is hashed as it was gathered.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fp8watch.kernels.cpu import hash_of

CHUNK = 1 << 16  # in int64 it stays in the cache of a core
DEVICE_CHUNK = 1 << 18  # elsewhere the launches count
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _chunk(device: torch.device) -> int:
    return CHUNK if device.type == "cpu" else DEVICE_CHUNK


@lru_cache(maxsize=8)
def _odd(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, 2 * _chunk(device), 2, dtype=torch.int64, device=device)


@torch.no_grad()
def hash_bits(x: Tensor) -> Tensor:
    """The hash of a tensor's bits, on its device and without waiting for it.

    Args:
        x: any shape, elements of 1, 2, 4 or 8 bytes.

    Returns:
        0-d int64: the sum, read as two's complement.

    Raises:
        KeyError: elements of another size, such as complex128.
    """
    size = x.element_size()
    if (known := hash_of(x) if size in _INTEGERS else None) is not None:
        return torch.tensor(known, dtype=torch.int64, device=x.device)
    bits = x.detach().contiguous().view(-1).view(_INTEGERS[size])
    odd, chunk = _odd(x.device), _chunk(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), chunk):  # in pieces: the whole in int64 would be two to four times the weight
        part = bits[start : start + chunk].to(torch.int64)
        total += (part * odd[: part.numel()]).sum() + part.sum() * (2 * start)
    return total
