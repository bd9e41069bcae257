"""How torchao's Float8Linear casts its operands, read from its configuration.

Thread:     any

Source: torchao.float8, version 0.18: `Float8LinearConfig` has a `CastConfig` for each operand of each GEMM, and
`amax_to_scale` computes FP8_MAX / max(amax, 1e-12), rounded down to a power of two where the configuration says so. The
configuration is known by its attributes; torchao is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8watch.recipe.spec import TILES, OperandRecipe, Recipe

EPS = 1e-12
"""Smallest amax that a scale is computed from; a constant of torchao's, not a setting."""

ROW = (1, -1)

_USES = {  # (operand, columnwise) -> attribute
    (0, False): "cast_config_input",
    (0, True): "cast_config_input_for_grad_weight",
    (1, False): "cast_config_weight",
    (1, True): "cast_config_weight_for_grad_input",
    (2, False): "cast_config_grad_output",
    (2, True): "cast_config_grad_output_for_grad_weight",
}
_GEMMS = ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight")
FAST = 2.0**-6
"""What fast accumulation may lose: a 14-bit accumulator over K = 16384."""

ROUNDED = 2.0**-8
"""A product that is rounded to bfloat16 on its way, as those of scales a row are."""


@dataclass(frozen=True)
class TorchaoCasts:
    """What a Float8LinearConfig says."""

    recipe: Recipe  # to observe it by: of each operand its first cast
    casts: tuple[
        tuple[tuple[int, bool], OperandRecipe], ...
    ]  # (operand, columnwise) -> how; high precision is left out
    slack: tuple[float, float, float]  # of fprop, dgrad, wgrad: relative errors that it asks for


def is_cast_config(config: object) -> bool:
    """Whether an object is a Float8LinearConfig, by its attributes."""
    return all(hasattr(config, name) for name in _USES.values())


def read_torchao(config: Any) -> TorchaoCasts | str:
    """A Float8LinearConfig as a recipe to observe by, or why it cannot be one."""
    power_2 = bool(getattr(config, "round_scales_to_power_of_2", False))
    casts: dict[tuple[int, bool], OperandRecipe] = {}
    for place, attribute in _USES.items():
        cast = getattr(config, attribute)
        if _name(cast.scaling_type) == "disabled":
            continue
        granularity, dtype = _name(cast.scaling_granularity), str(cast.target_dtype)
        fmt = {"torch.float8_e4m3fn": "E4M3", "torch.float8_e5m2": "E5M2"}.get(dtype)
        if fmt is None or granularity not in ("tensorwise", "axiswise"):
            return f"{attribute} is {granularity}, {dtype}: not known here"
        tile = None if granularity == "tensorwise" else ROW
        if tile not in TILES:
            return f"{attribute} has one scale a row: not observed by this version"
        casts[place] = OperandRecipe(tile, fmt, power_2, EPS)
    if any((operand, False) not in casts for operand in range(3)):
        return "an operand stays in high precision"
    a, b, c = (casts[operand, False] for operand in range(3))
    recipe = Recipe("observe", a, b, c, observe_only=True)
    fast = [bool(getattr(getattr(config, name, None), "use_fast_accum", False)) for name in _GEMMS]
    fprop, dgrad, wgrad = (FAST if is_fast else ROUNDED for is_fast in fast)
    return TorchaoCasts(recipe, tuple(casts.items()), (fprop, dgrad, wgrad))


def _name(choice: Any) -> str:
    """Value of an enumeration of torchao's."""
    return str(getattr(choice, "value", choice))
