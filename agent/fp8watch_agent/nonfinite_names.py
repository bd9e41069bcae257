"""Names of scalars by which a step says more of what is not finite than the record of a site can.

Shapes:     name -> one float64 a step
Thread:     any; data alone
"""

from __future__ import annotations

NONFINITE_GRADIENT = "nonfinite_gradient/"
"""Before the name of a parameter whose gradient was not finite: 1."""

NONFINITE_INPUT = "nonfinite_input/"
"""Before the name of a Linear that stays in high precision: elements of its input that were not finite, on a GPU 1 for any."""
