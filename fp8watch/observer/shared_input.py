"""An input that several Linears read, such as that of q, k and v: measured once, merged into the rows of each.

Shapes:     one operand -> its TileStats, again     Thread: training

Statistics are a function of the values and of how they are quantised. The values are the same where the caller hands in
the same tensor object, in the same memory and of the same version, which every write through autograd's tensors counts up.
A write that hides from autograd (`x.data.mul_(2)` between two Linears) is not seen. Only the input that was measured last
is known, and only until the step ends; it is not kept alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8watch.numerics.tile_stats import TileStats


def _state(x: Tensor) -> tuple[Any, ...]:
    return x._version, x.data_ptr(), x.shape, x.stride(), x.dtype


@dataclass
class SharedInput:
    """What was measured last in the running step."""

    _source: weakref.ref[Tensor] | None = None
    _state: tuple[Any, ...] = ()
    _kind: int = -1
    _heavy: bool = False
    _results: tuple[TileStats, ...] = ()

    def find(self, source: Tensor, kind: int, *, heavy: bool) -> tuple[TileStats, ...] | None:
        """The statistics of the input, where it was measured just now in the same way; one a row."""
        if self._source is None or self._source() is not source or self._kind != kind or self._heavy != heavy:
            return None
        return self._results if self._state == _state(source) else None

    def keep(self, source: Tensor, kind: int, results: tuple[TileStats, ...], *, heavy: bool) -> None:
        """Remember what was measured of an input.

        Args:
            source: the tensor object that the Linear was called with.
            kind: how it is quantised, see `OperandRows.kind`.
            results: one a row.
            heavy: with all statistics.
        """
        self._source, self._state, self._kind = weakref.ref(source), _state(source), kind
        self._heavy, self._results = heavy, results
