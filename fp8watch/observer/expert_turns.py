"""Which expert is looked at where a module of experts has its turn: another one in each turn.

Shapes:     first row of a parameter -> number of an expert; row of the slab -> the expert that was looked at
Thread:     training, and autograd's

Experts share one site, and a turn looks at as much as that of a Linear: at one of them. Turns of a module are counted here,
because those of all modules together may share a divisor with the number of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fp8watch_agent.experts import CHECKED_EXPERT, CHECKED_PRODUCT
from fp8watch_agent.record import QUANTISER_FAULTS, Measured

LEAST_ERROR = 1e-3
"""Of a product, relative to its RMS: what is less is nobody's fault, and its expert is not told."""


@dataclass
class ExpertTurns:
    """The turns of one attach."""

    operands: dict[int, int] = field(default_factory=dict)  # row -> expert whose codes were looked at in this step
    products: dict[int, int] = field(default_factory=dict)  # row -> expert whose product was
    _turns: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # first row -> phase of its turn, and how many before

    def expert(self, first: int, phase: int, num_experts: int) -> int:
        """The expert whose turn it is.

        Args:
            first: row at which the sites of the parameter begin; its module has its turn.
            phase: of the turn, see `Canary.phase`.
            num_experts: of the parameter, at least 1.
        """
        of, before = self._turns.get(first, (phase, 0))
        if of != phase:
            before += 1
        self._turns[first] = phase, before
        return before % num_experts

    def take(self) -> tuple[dict[int, int], dict[int, int]]:
        """What the step looked at: operands and products, row -> expert."""
        taken = self.operands, self.products
        self.operands, self.products = {}, {}
        return taken


def named_turns(
    operands: Mapping[int, int], products: Mapping[int, int], rows: npt.NDArray[np.void], names: Mapping[int, str]
) -> dict[str, float]:
    """Scalars of the step that say of which expert the codes or the product were found to be wrong; nothing where none was.

    Args:
        operands: row -> expert.
        products: likewise.
        rows: of the slab, of ROW.
        names: row -> "module.operand.direction" of sites of experts.
    """
    out: dict[str, float] = {}
    for row, expert in operands.items():
        if rows["measured"][row] & Measured.QUANTISER and any(rows[name][row] > 0 for name in QUANTISER_FAULTS):
            out[CHECKED_EXPERT + names[row]] = float(expert)
    for row, expert in products.items():
        found = rows[row]
        if found["measured"] & Measured.GEMM and (
            found["output_num_nonfinite"] > 0 or not abs(found["gemm_error"]) <= LEAST_ERROR
        ):
            out[CHECKED_PRODUCT + names[row]] = float(expert)
    return out
