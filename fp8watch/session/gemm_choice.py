"""How the GEMMs of Linears are computed: by codes, emulated, or not in FP8 at all.

Shapes:     device, recipe, asked -> what is done, and why     Thread: training, once

Emulation multiplies float32 values: on a GPU that takes longer than the model's own GEMMs. So where nobody asked for it
there, a GPU that cannot multiply codes leaves the model as it is and observes it, and attach says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fp8watch.kernels import scaled_mm
from fp8watch.layers.computed_weight import held_weight
from fp8watch.layers.scaled_linear import Formats
from fp8watch.numerics.formats import fp8_format
from fp8watch.recipe import Recipe
from fp8watch.recipe.build import observe
from fp8watch.selection.expert_precision import refused
from fp8watch.selection.module_filter import LeftOut

GEMMS = ("auto", "emulated", "scaled_mm")
"""What `attach(gemm=...)` takes."""


@dataclass(frozen=True)
class GemmChoice:
    """What is done with the GEMMs."""

    how: Literal["emulated", "scaled_mm", "observe"]
    recipe: Recipe  # the one that was asked for, or the same observed
    reason: str | None = None  # why nothing computes in FP8, where that was not asked for

    def facts(self, device: torch.device) -> dict[str, str]:
        """What a session says of it: how products of Linears are computed, and on what."""
        how = "observe" if self.recipe.observe_only else self.how
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return {"gemm": how, "device": on}


def choose_gemm(asked: str, recipe: Recipe, device: torch.device, num_linears: int = 1) -> GemmChoice:
    """Decide how GEMMs are computed.

    Args:
        asked: one of GEMMS. "auto": on a GPU codes are multiplied where that can be had, else the GEMMs stay as they
            are and are observed; elsewhere they are emulated.
        recipe: of the Linears.
        device: of the Linears.
        num_linears: without any there is nothing to decide.

    Raises:
        ValueError: an unknown name, or "scaled_mm" and why it cannot be had.
    """
    if asked not in GEMMS:
        raise ValueError(f"gemm={asked!r}: must be one of {', '.join(map(repr, GEMMS))}")
    if asked == "emulated":
        return GemmChoice("emulated", recipe)
    if asked == "auto" and (recipe.observe_only or device.type == "cpu" or not num_linears):
        return GemmChoice("emulated", recipe)
    reason = scaled_mm.probe(device) or _refused(recipe)
    if reason is None:
        return GemmChoice("scaled_mm", recipe)
    if asked == "scaled_mm":
        raise ValueError(f"gemm='scaled_mm' cannot be used: {reason}; gemm='emulated' runs everywhere")
    return GemmChoice("observe", observe(recipe), reason)


def _refused(recipe: Recipe) -> str | None:
    """Why the operands of a recipe cannot be multiplied as codes, or None."""
    if recipe.kind != "blockwise" or recipe.observe_only:
        return f"recipe {recipe.name!r} has no 1×128 and 128×128 scales to multiply; use recipe='blockwise'"
    if recipe.high_precision:
        return f"{' and '.join(recipe.high_precision)} in high precision; quantise all three"
    if recipe.warmup_steps:
        return "a warm-up in high precision is not part of it; set warmup_steps=0"
    if tuple(spec.tile for _, spec in recipe.quantised) != scaled_mm.TILES:
        return "its tiles are not 1×128 · 128×128 · 1×128, which is all that the product has"
    return None


def experts_refused(asked: str, by: GemmChoice, device: torch.device) -> str | None:
    """Why experts stay in high precision where Linears compute in FP8, or None.

    Args:
        asked: as for `choose_gemm`.
        by: what it chose.
        device: of the experts.
    """
    if by.how == "scaled_mm":
        return scaled_mm.NO_GROUPS
    if asked == "auto" and device.type != "cpu":
        return "float32 products are slower on a GPU; gemm='emulated' computes them"
    return refused(by.recipe)


def scaled_formats(linears: list[tuple[str, nn.Linear]], left_out: list[LeftOut], recipe: Recipe) -> Formats:
    """Dtypes of the codes of input, weight and grad_output that torch._scaled_mm multiplies. Linears that it does not take
    move to `left_out`."""
    a, b, c = (spec.format for _, spec in recipe.quantised)
    for fqn, module in list(linears):
        refused = scaled_mm.refuses(a, b, c, held_weight(module).dtype)
        if refused is not None:
            linears.remove((fqn, module))
            left_out.append(LeftOut(fqn, refused))
    return fp8_format(a).dtype, fp8_format(b).dtype, fp8_format(c).dtype
