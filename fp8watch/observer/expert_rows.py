"""Which expert the rows of an operand belong to: noted call by call on the device, asked on the host where something broke.

Shapes:     first rows [E] of the experts in an operand of a call, (row of the slab, call) -> expert     Thread: training

Experts share one site for each parameter, operand and direction. The first non-finite element has a row and a call; the
rows of that call say whose it is. Nothing is read back where it is noted: first rows leave with the slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.expert_layout import Even, Layout, Sorted, Whole
from fp8watch.observer.expert_turns import ExpertTurns
from fp8watch.observer.expert_vectors import ExpertVectors
from fp8watch_agent.experts import NONFINITE_EXPERT, NONFINITE_EXPERT_ROW

MAX_CALLS = 8192
"""Calls remembered in one step: one whose steps never end must not fill the memory."""
MAX_NAMED = 4


class Calls(NamedTuple):
    """What one step noted, on its way to the host."""

    layouts: Mapping[tuple[int, int], Layout]  # (row of the slab, call)
    places: Mapping[int, tuple[int, int]]  # id of first_rows -> where they are in what `tensor` holds
    tensor: Tensor | None  # int64: first rows of all sorted calls, one behind the other


@dataclass
class ExpertRows:
    """The experts of one attach.

    Args:
        num_experts: row of the slab -> how many; rows that are not here have none.
    """

    num_experts: dict[int, int] = field(default_factory=dict)
    _layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)
    turns: ExpertTurns = field(default_factory=ExpertTurns)
    vectors: ExpertVectors = field(init=False)
    _layout: Layout | None = None  # of what is measured now

    def __post_init__(self) -> None:
        self.vectors = ExpertVectors(self.num_experts)

    @contextmanager
    def measuring(self, layout: Layout) -> Iterator[None]:
        """What is measured inside has its rows like this."""
        self._layout = layout
        try:
            yield
        finally:
            self._layout = None

    def see(self, row: int, stats: TileStats) -> None:
        """Take one call of a row into its vector over experts, in the steps in which it has its turn."""
        if self._layout is not None and row in self.vectors.turn:
            self.vectors.add(row, stats, self._layout)

    def note(self, row: int, calls: range, layout: Layout) -> None:
        """Remember whose the rows of an operand are, in the calls that measured it."""
        if row in self.num_experts and len(self._layouts) < MAX_CALLS:
            for call in calls:
                self._layouts[row, call] = layout

    def take(self) -> Calls | None:
        """What the step noted; None where it noted nothing."""
        if not self._layouts:
            return None
        layouts, self._layouts = self._layouts, {}
        places: dict[int, tuple[int, int]] = {}
        found: list[Tensor] = []
        start = 0
        for layout in layouts.values():
            if isinstance(layout, Sorted) and id(layout.first_rows) not in places:
                end = start + len(layout.first_rows)
                places[id(layout.first_rows)] = start, end
                found.append(layout.first_rows)
                start = end
        return Calls(layouts, places, torch.cat(found) if found else None)


def expert_of(calls: Calls, first_rows: np.ndarray, row: int, element: tuple[int, int, int]) -> tuple[int, int] | None:
    """Expert and row of the expert of a non-finite element; None where it is not known.

    Args:
        calls: of the step.
        first_rows: what `calls.tensor` came to on the host.
        row: of the slab.
        element: row, column and call of it, as in the record.
    """
    layout = calls.layouts.get((row, element[2]))
    if layout is None or element[0] < 0:
        return None
    if isinstance(layout, Whole):
        return layout.expert, element[0]
    if isinstance(layout, Even):
        return divmod(element[0], layout.rows_each)
    start, end = calls.places[id(layout.first_rows)]
    mine = first_rows[start:end]
    expert = int(np.searchsorted(mine, element[0], side="right")) - 1
    return (expert, element[0] - int(mine[expert])) if expert >= 0 else None


def named_experts(calls: Calls, first_rows: np.ndarray, rows: np.ndarray, names: Mapping[int, str]) -> dict[str, float]:
    """Scalars of the step that say in which expert the first non-finite element of a site lies, and in which of its rows;
    nothing where all are finite.

    Args:
        calls: of the step.
        first_rows: what `calls.tensor` came to on the host.
        rows: of the slab, of ROW.
        names: row of the slab -> "module.operand.direction" of sites of experts.
    """
    out: dict[str, float] = {}
    broken = [row for row in names if rows["first_nonfinite"][row][0] >= 0]
    broken.sort(key=lambda row: int(rows["first_nonfinite"][row][2]))
    for row in broken[:MAX_NAMED]:
        at = rows["first_nonfinite"][row]
        found = expert_of(calls, first_rows, row, (int(at[0]), int(at[1]), int(at[2])))
        if found is not None:
            out[NONFINITE_EXPERT + names[row]], out[NONFINITE_EXPERT_ROW + names[row]] = map(float, found)
    return out
