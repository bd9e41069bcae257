"""Recipes: how each operand of a Linear is quantised, from arguments and environment, frozen and fingerprinted.

The environment variables are Transformer Engine's own, so that one launch script means the same on both paths.
They are read when a recipe is built; the effective values are what the fingerprint covers.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .formats import FORMATS, fp8_format

OPERANDS = ("input", "weight", "grad_output")

EPS_VARIABLES: dict[str, str] = {
    "input": "FP8_QUANT_FWD_INP_AMAX_EPS",
    "weight": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS",
    "grad_output": "FP8_QUANT_BWD_GRAD_AMAX_EPS",
}
POWER_2_VARIABLES: dict[str, str] = {
    "input": "NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2",
    "weight": "NVTE_FP8_BLOCK_SCALING_FWD_WEIGHT_POWER2",
    "grad_output": "NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2",
}
FP32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"

KNOWN_RECIPES = ("blockwise", "observe", "delayed", "current", "mxfp8")
AVAILABLE_RECIPES = ("blockwise", "observe")


@dataclass(frozen=True)
class OperandRecipe:
    """How one operand is quantised.

    `tile` is (1, 128) along the contraction axis, or (128, 128). `eps` clamps the tile's amax from below.
    """

    tile: tuple[int, int]
    format: str = "E4M3"
    power_2_scale: bool = True
    eps: float = 0.0

    def __post_init__(self) -> None:
        if self.tile not in ((1, 128), (128, 128)):
            raise ValueError(f"tile={self.tile}: blockwise recipes quantise in tiles (1, 128) or blocks (128, 128)")
        fp8_format(self.format)
        if not math.isfinite(self.eps) or self.eps < 0:
            raise ValueError(f"eps={self.eps}: must be finite and 0 or more; 1e-12 is recommended")


@dataclass(frozen=True)
class Recipe:
    """A recipe for the three GEMMs of a Linear.

    With `observe_only` the GEMMs stay as they are and operands are quantised on the side, for statistics.
    """

    name: str = "blockwise"
    input: OperandRecipe = field(default_factory=lambda: OperandRecipe((1, 128)))
    weight: OperandRecipe = field(default_factory=lambda: OperandRecipe((128, 128)))
    grad_output: OperandRecipe = field(default_factory=lambda: OperandRecipe((1, 128)))
    observe_only: bool = False

    def operand(self, name: str) -> OperandRecipe:
        """The recipe of `input`, `weight` or `grad_output`."""
        got: OperandRecipe = getattr(self, name)
        return got

    def facts(self) -> dict[str, str | int | float | bool]:
        """The effective configuration as flat facts, for the session and the pages."""
        out: dict[str, str | int | float | bool] = {"recipe": self.name, "observe_only": self.observe_only}
        for name in OPERANDS:
            for key, value in asdict(self.operand(name)).items():
                out[f"{name}.{key}"] = "x".join(map(str, value)) if key == "tile" else value
        return out

    def fingerprint(self) -> str:
        """12 hex digits over the effective configuration: equal fingerprints quantise alike."""
        text = ";".join(f"{k}={v!r}" for k, v in sorted(self.facts().items()))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _switch(environ: Mapping[str, str], variable: str) -> bool | None:
    value = environ.get(variable)
    if value is None:
        return None
    if value not in ("0", "1"):
        raise ValueError(f"{variable}={value!r}: must be '0' or '1'; unset it for the default")
    return value == "1"


def _eps(environ: Mapping[str, str], variable: str) -> float:
    value = environ.get(variable, "0")
    rule = "must be a finite number, 0 or more (1e-12 is recommended)"
    try:
        eps = float(value)
    except ValueError:
        raise ValueError(f"{variable}={value!r}: {rule}") from None
    if not math.isfinite(eps) or eps < 0:
        raise ValueError(f"{variable}={value!r}: {rule}")
    return eps


def blockwise(
    *, fp8_format_name: str = "E4M3", observe_only: bool = False, environ: Mapping[str, str] | None = None
) -> Recipe:
    """Transformer Engine's `Float8BlockScaling`: 1×128 tiles for input and grad_output, 128×128 blocks for weight.

    Args:
        fp8_format_name: "E4M3" everywhere, or "HYBRID": E5M2 for grad_output.
        observe_only: leave the GEMMs as they are.
        environ: instead of `os.environ`.

    Raises:
        ValueError: for an environment variable that cannot be meant.
    """
    env = os.environ if environ is None else environ
    if fp8_format_name not in (*FORMATS, "HYBRID"):
        raise ValueError(f"fp8_format={fp8_format_name!r}: must be 'E4M3', 'E5M2' or 'HYBRID'")
    fp32_scales = _switch(env, FP32_SCALES_VARIABLE) or False
    made: dict[str, OperandRecipe] = {}
    for name in OPERANDS:
        forced = _switch(env, POWER_2_VARIABLES[name])
        fmt = fp8_format_name
        if fmt == "HYBRID":
            fmt = "E5M2" if name == "grad_output" else "E4M3"
        made[name] = OperandRecipe(
            tile=(128, 128) if name == "weight" else (1, 128),
            format=fmt,
            power_2_scale=(not fp32_scales) if forced is None else forced,
            eps=_eps(env, EPS_VARIABLES[name]),
        )
    return Recipe(name="observe" if observe_only else "blockwise", observe_only=observe_only, **made)


def resolve_recipe(recipe: object, *, environ: Mapping[str, str] | None = None) -> Recipe:
    """What `attach(recipe=...)` was given, as a Recipe.

    Args:
        recipe: None (then FP8WATCH_RECIPE, else "blockwise"), a name, or a Recipe.

    Raises:
        ValueError: an unknown name, or a known one that this version does not compute.
        TypeError: anything else.
    """
    env = os.environ if environ is None else environ
    if recipe is None:
        recipe = env.get("FP8WATCH_RECIPE") or "blockwise"
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe={recipe!r}: must be a name ({', '.join(map(repr, AVAILABLE_RECIPES))}) or a fp8watch.Recipe; "
            "recipe objects of other libraries are not read yet"
        )
    if recipe not in AVAILABLE_RECIPES:
        why = "is not computed by this version yet" if recipe in KNOWN_RECIPES else "is unknown"
        raise ValueError(f"recipe={recipe!r} {why}; use one of {', '.join(map(repr, AVAILABLE_RECIPES))}")
    return blockwise(observe_only=recipe == "observe", environ=env)
