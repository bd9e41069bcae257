"""A few bytes of each of many tensors, by one call of the C library where something has loaded it.

Shapes:     addresses of T pieces of B bytes -> [T · B] bytes, or whether they are those that were read before
Thread:     training

What it means is `fp8watch.session.standing_elements`. Behind the GEMMs of a step nothing is in a processor's caches: there
torch takes longer to look at T tensors than to copy what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, byref, c_char, c_uint64
from functools import cache

import numpy as np

from fp8watch.kernels import cpu_library


class Pieces:
    """Where they lie; who asks answers for the memory being there.

    Args:
        addresses: of the first byte of each.
        num_bytes: of each.
    """

    def __init__(self, addresses: Sequence[int], num_bytes: int) -> None:
        self._addresses = np.array(addresses, np.uint64)
        self._table = self._addresses.ctypes.data, len(addresses), num_bytes

    def read(self, into: int) -> bool:
        """Copy them to an address, one behind another; False where there is no library."""
        library = cpu_library.library
        if library is None:
            return False
        library.fp8watch_gather(*self._table, into)
        return True

    def first_other(self, kept: int) -> int | None:
        """Number of the first that has other bytes than lie at an address, T where none has; None where there is no library."""
        library = cpu_library.library
        if library is None:
            return None
        found: int = library.fp8watch_first_other(*self._table, kept)
        return found


def piece(address: int, num_bytes: int) -> bytes | None:
    """A copy of what lies at an address; None where there is no library. Of `ctypes.string_at` audit hooks would be told."""
    library = cpu_library.library
    if library is None:
        return None
    into = _bytes(num_bytes)()
    library.fp8watch_gather(byref(c_uint64(address)), 1, num_bytes, into)
    return into.raw


@cache
def _bytes(num: int) -> type[Array[c_char]]:
    """The type of so many: ctypes makes it anew where nobody holds it."""
    return c_char * num
