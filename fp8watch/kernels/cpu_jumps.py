"""Rows of a step held against bands, by the C library where something has loaded it: `fp8watch.session.jumps` means it.

Shapes:     rows [sites] of ROW -> score [sites]     Thread: training

At the end of a step nothing is in a processor's caches, and each of the forty operations of numpy that this takes loads
code of its own: one call takes a tenth of the time. It is the same arithmetic, to the last bit but for the logarithm.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch.kernels import cpu_library
from fp8watch_agent.record import ROW

_RULE = struct.Struct("4f")  # struct band_rule in jumps.h
ANY_BROKEN, IS_WRONG, ANY_ABSENT = 1, 2, 4


class BandMemory:
    """Where the bands of n numbers lie: arrays that are never made anew.

    Args:
        floors: float32, what is allowed at least.
        middle, spread, count: float32 of the same shape.
        rule: steps until a number is judged, steps of the window, spreads that are allowed and that are learned.
    """

    def __init__(
        self,
        floors: npt.NDArray[np.float32],
        middle: npt.NDArray[np.float32],
        spread: npt.NDArray[np.float32],
        count: npt.NDArray[np.float32],
        rule: tuple[float, float, float, float],
    ) -> None:
        self._held = floors, middle, spread, count, rule
        self._rule = np.frombuffer(_RULE.pack(*rule), dtype=np.float32)
        self._floors, *self._state = (_at(a) for a in self._held[:4])
        self._rule_at = _at(self._rule)

    def __reduce__(self) -> Any:
        """A copy has its own arrays, and their addresses."""
        return BandMemory, self._held

    def see_rows(
        self,
        rows: npt.NDArray[np.void],
        broken: npt.NDArray[np.bool_],
        ends: tuple[float, float],
        feet: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32] | None:
        """As `RowJumps.see`; None where there is no library, or rows lie apart."""
        library = cpu_library.library
        if library is None or not _whole(rows):
            return None
        score = np.empty(len(rows), np.float32)
        library.fp8watch_row_jumps(
            _at(rows), len(rows), _at(broken), *ends, _at(feet), self._floors, self._rule_at, *self._state, _at(score)
        )
        return score


def glance(rows: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.bool_], int] | None:
    """Which rows are broken, and bits of `ANY_BROKEN`, `IS_WRONG` and `ANY_ABSENT`; None where there is no library, or rows
    lie apart."""
    library = cpu_library.library
    if library is None or not _whole(rows):
        return None
    broken = np.empty(len(rows), np.bool_)
    return broken, library.fp8watch_glance(_at(rows), len(rows), _at(broken))


def _whole(rows: npt.NDArray[np.void]) -> bool:
    return rows.dtype == ROW and rows.strides == (ROW.itemsize,)


def _at(array: npt.NDArray[Any]) -> int:
    address: int = array.ctypes.data  # what __array_interface__ says of structured arrays takes long
    return address
