"""What is known of a Linear that computes in FP8 by a forward of its own.

Thread:     any; read-only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8watch.recipe import OperandRecipe, Recipe

EVIDENCE = {
    "counts": "exact", "cast": "derived", "amax": "exact", "scale": "derived", "ratio": "derived",
    "energies": "derived", "moments": "exact", "depth": "exact",
}  # fmt: skip
"""Evidence of each group of fields of its sites: the operand is seen, and what depends on its cast is of the recipe that it
is observed by. In the module's turn codes that can be seen are held against the operand."""


@dataclass(frozen=True)
class Foreign:
    """One module, or several that compute alike."""

    backend: str  # of its sites
    formats: tuple[str, str, str] | None  # of input, weight, grad_output; None: its products are held against nothing
    recipe: Recipe | None = None  # to observe it by; None: it does not tell
    reason: str = ""  # why it does not
    casts: Mapping[tuple[int, bool], OperandRecipe] = field(default_factory=dict)
    """(operand, columnwise) -> how it is cast; what is not there is multiplied in high precision, or not known."""
    slack: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of fprop, dgrad, wgrad: relative errors that it asks for
    tied: bool = False  # its weight is read by another module too

    def site_recipe(self, observed: Recipe, operand: str) -> str:
        """What a site is registered with: its own recipe where that is the one it is observed by, else "observe"."""
        spec = observed.operand(operand)
        own = spec is not None and self.recipe is not None and self.recipe.operand(operand) == spec
        return spec.kind if own and spec is not None else "observe"
