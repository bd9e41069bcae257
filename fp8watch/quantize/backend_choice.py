"""Which backend quantises what a recipe says: that of the registry, but for NVFP4, which the reference alone has.

Thread:     training, once
"""

from __future__ import annotations

import torch

from fp8watch.kernels import reference
from fp8watch.kernels.backend import Backend
from fp8watch.kernels.registry import resolve
from fp8watch.recipe import Recipe

NO_KERNEL = "it has no kernel for NVFP4; backend=None or 'reference' takes torch operations on the operand's device"


def backend_of(recipe: Recipe, asked: str | None, device: torch.device) -> Backend:
    """The backend of a recipe's quantisers.

    Args:
        recipe: of the operands.
        asked: a name, or None.
        device: of the operands.

    Raises:
        ValueError: as `fp8watch.kernels.resolve`, or the backend that was asked for has no kernel for the recipe.
    """
    if asked == "triton" and any(spec.scaling == "nvfp4" for _, spec in recipe.quantised):
        raise ValueError(f"backend='triton' with recipe {recipe.name!r}: {NO_KERNEL}")
    return resolve(reference.NAME if asked is None and recipe.kind == "nvfp4" else asked, device)


def told_backend(recipe: Recipe, backend: Backend) -> str:
    """Name of the backend whose arithmetic the quantisers of a recipe are; `backend`: what `backend_of` gave."""
    return reference.NAME if recipe.kind == "nvfp4" else backend.NAME
