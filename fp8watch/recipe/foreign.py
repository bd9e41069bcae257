"""Recipe objects of Transformer Engine, read without importing it: what its quantisers would hold is what counts.

Thread:     any

The objects are known by the names of their classes and base classes, and read attribute by attribute. Transformer
Engine's quantisers take power_2_scale and amax_epsilon from three attributes that are no fields of the dataclass:
its constructor ignores them in silence, and it ignores `use_f32_scales` and `use_power_2_scales` too (2.20). What is
computed here is what its quantisers would do; where the object or the environment declares something else, the recipe
says so. A constructor argument that was ignored leaves no trace in the object: only the printed values show that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8watch.recipe.build import BLOCK_TILES, delayed, mxfp8, operand_formats
from fp8watch.recipe.environment import (
    CURRENT_POWER_2_VARIABLE,
    FP32_SCALES_VARIABLE,
    NVFP4_QPARAMS,
    NVFP4_VARIABLES,
    QPARAMS,
    block_scaling,
    capability,
    environment,
    is_read,
    refuse_fp32_scales_on_blackwell,
    switch,
)
from fp8watch.recipe.framework import assignment
from fp8watch.recipe.registry import RECIPES
from fp8watch.recipe.spec import OPERANDS, OperandRecipe, Recipe, in_order

READ: dict[str, str] = {r.transformer_engine: r.name for r in RECIPES.values() if r.transformer_engine is not None}
"""Classes that are read, with their subclasses -> our recipe."""

REFUSED: dict[str, str] = {
    "MXFP4QATMXFP8BlockScaling": "projects weights to FP4 first",
    "MXFP4QATFloat8BlockScaling": "projects weights to FP4 first",
    "CustomRecipe": "makes its quantisers in a function of its own",
}
"""Classes of Transformer Engine that are known and cannot be computed here, with the reason."""

_IGNORED_PARAMETERS = ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")


def class_names(recipe: object) -> list[str]:
    """Names of the object's class and its bases, the most derived first."""
    return [c.__name__ for c in type(recipe).__mro__]


def is_foreign(recipe: object) -> bool:
    """Whether the object is, or derives from, a recipe class of Transformer Engine, one that is refused included."""
    return any(name in READ or name in REFUSED for name in class_names(recipe))


def read_foreign(recipe: Any, environ: Mapping[str, str] | None = None) -> Recipe:
    """A recipe object of Transformer Engine as a Recipe, with what it declares in vain.

    Raises:
        ValueError: it asks for something that is not computed here: class, attribute, value.
    """
    names = class_names(recipe)
    for name in names:
        if name in REFUSED:
            raise ValueError(
                f"recipe={names[0]}: {REFUSED[name]}, which is not computed here; use one of {', '.join(READ)}"
            )
    kind = next(READ[name] for name in names if name in READ)
    override = getattr(recipe, "backward_override", None)
    if override is not None:
        raise ValueError(
            f"{names[0]}(backward_override={override!r}): only None is computed here; unset NVTE_BACKWARD_OVERRIDE"
        )
    notes = [
        f"{names[0]}.{name}=True is declared; attention stays in high precision here"
        for name in ("fp8_dpa", "fp8_mha")
        if getattr(recipe, name, False)
    ]
    made = _READERS[kind](recipe, environment(environ), names[0], notes)
    fields = {o: made.operand(o) for o in OPERANDS}
    return Recipe(
        made.name, *in_order(fields), history=made.history, declared_not_effective=tuple(dict.fromkeys(notes))
    )


def _format(recipe: Any) -> str:
    fmt = getattr(recipe, "fp8_format", None)
    return str(getattr(fmt, "name", fmt))


def _parameters(recipe: Any, operand: str, cls: str, notes: list[str]) -> tuple[bool, float]:
    """power_2_scale and amax_epsilon as the operand's quantiser reads them."""
    params = getattr(recipe, QPARAMS[operand], None)
    if params is None:
        raise ValueError(
            f"{cls} has no {QPARAMS[operand]}: not a recipe of Transformer Engine 2.x; give a name or a Recipe"
        )
    notes += [
        f"{cls}.{QPARAMS[operand]}.{name}=True is declared; FP8 quantisers ignore it"
        for name in _IGNORED_PARAMETERS
        if getattr(params, name, False)
    ]
    return bool(params.power_2_scale), float(params.amax_epsilon)


def _block(recipe: Any, environ: Mapping[str, str], cls: str, notes: list[str]) -> Recipe:
    said, formats = block_scaling(environ), operand_formats(_format(recipe))
    dims = [getattr(recipe, f"{name}_block_scaling_dim", d) for name, d in (("x", 1), ("w", 2), ("grad", 1))]
    made: dict[str, OperandRecipe] = {}
    for operand, dim in zip(OPERANDS, dims, strict=True):
        if dim not in BLOCK_TILES:
            raise ValueError(f"{cls}: block dimension {dim!r} of {operand} must be 1 (1×128) or 2 (128×128)")
        power_2, eps = _parameters(recipe, operand, cls, notes)
        variable = said[operand]
        wanted = variable.power_2_scale if variable.power_2_variable else power_2, variable.eps or eps
        for name, declared, has in (
            (variable.power_2_variable, variable.power_2_scale, power_2),
            (variable.eps_variable, variable.eps, eps),
        ):
            if name is not None and declared != has:
                attribute = "power_2_scale" if isinstance(declared, bool) else "amax_epsilon"
                before = "set the variable before Transformer Engine is imported, or " if is_read(name) else ""
                notes.append(
                    f"{name}={environ[name]} is declared, {cls}.{QPARAMS[operand]}.{attribute}={has} is what its "
                    f"quantisers read; {before}assign {assignment(QPARAMS[operand], *wanted)}"
                )
        if not power_2:
            refuse_fp32_scales_on_blackwell(f"{cls}.{QPARAMS[operand]}.power_2_scale={power_2}", capability())
        made[operand] = OperandRecipe(BLOCK_TILES[dim], formats[operand], power_2, eps)
    rounded = [o for o in OPERANDS if made[o].power_2_scale]
    if getattr(recipe, "use_f32_scales", False) and rounded:
        notes.append(
            f"{cls}(use_f32_scales=True) is declared, the quantisers of {', '.join(rounded)} read power_2_scale=True from "
            f"{', '.join(QPARAMS[o] for o in rounded)}; assign those attributes, or set "
            f"{FP32_SCALES_VARIABLE}=1 before the import"
        )
    return Recipe("blockwise", *in_order(made))


def _current(recipe: Any, environ: Mapping[str, str], cls: str, notes: list[str]) -> Recipe:
    formats = operand_formats(_format(recipe))
    made: dict[str, OperandRecipe] = {}
    for operand in OPERANDS:
        power_2, eps = _parameters(recipe, operand, cls, notes)
        variable = switch(environ, CURRENT_POWER_2_VARIABLE)
        if variable is not None and variable != power_2:
            notes.append(
                f"{CURRENT_POWER_2_VARIABLE}={environ[CURRENT_POWER_2_VARIABLE]} is declared, "
                f"{cls}.{QPARAMS[operand]}.power_2_scale={power_2} is what its quantisers read"
            )
        made[operand] = OperandRecipe(None, formats[operand], power_2, eps)
    declared = getattr(recipe, "use_power_2_scales", None)
    others = [o for o in OPERANDS if declared is not None and made[o].power_2_scale != bool(declared)]
    if others:
        notes.append(
            f"{cls}(use_power_2_scales={declared}) is declared, the quantisers of {', '.join(others)} read "
            f"power_2_scale={not declared} from {', '.join(QPARAMS[o] for o in others)}; assign those attributes"
        )
    return Recipe("current", *in_order(made))


def _delayed(recipe: Any, environ: Mapping[str, str], cls: str, notes: list[str]) -> Recipe:
    if (interval := getattr(recipe, "interval", 1)) not in (1, -1, None):
        notes.append(
            f"{cls}.interval={interval} is declared; its quantisers do not read it, scales roll with each pass"
        )
    if callable(recipe.amax_compute_algo) or getattr(recipe, "scaling_factor_compute_algo", None) is not None:
        which = "amax_compute_algo" if callable(recipe.amax_compute_algo) else "scaling_factor_compute_algo"
        raise ValueError(f"{cls}({which}=<function>): only 'max' and 'most_recent' are computed here")
    if getattr(recipe, "reduce_amax", True) and _world_size() > 1:
        notes.append(f"{cls}.reduce_amax=True is declared; here each rank keeps the amax of its own operands")
    return delayed(
        fp8_format=_format(recipe),
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        margin=recipe.margin,
    )


def _mx(recipe: Any, environ: Mapping[str, str], cls: str, notes: list[str]) -> Recipe:
    if getattr(recipe, "enable_2d_quantization", False):
        raise ValueError(f"{cls}(enable_2d_quantization=True): weights in 32×32 blocks are not computed here")
    if getattr(recipe, "margin", 0):
        notes.append(f"{cls}.margin={recipe.margin} is declared; MX quantisers ignore it")
    return mxfp8(fp8_format=_format(recipe))


def _nvfp4(recipe: Any, environ: Mapping[str, str], cls: str, notes: list[str]) -> Recipe:
    for name, right in (("nvfp4_4over6", "none"), ("row_scaled_activation", False)):
        if (value := getattr(recipe, name, right)) != right:
            raise ValueError(f"{cls}({name}={value!r}): only {right!r} is computed here")
    made: dict[str, OperandRecipe] = {}
    for operand, name in NVFP4_QPARAMS.items():
        params: Any = getattr(recipe, name, None)
        if params is None:
            raise ValueError(f"{cls} has no {name}: not a recipe of Transformer Engine 2.x; give a name or a Recipe")
        square = bool(params.fp4_2d_quantization)
        made[operand] = OperandRecipe(
            (16, 16) if square else (1, 16),
            "E2M1",
            power_2_scale=False,
            scaling="nvfp4",
            random_hadamard_transform=bool(params.random_hadamard_transform),
            stochastic_rounding=bool(params.stochastic_rounding),
        )
    for field, variable in NVFP4_VARIABLES.items():
        said, has = switch(environ, variable), getattr(recipe, field, None)
        if said is not None and has is not None and said != bool(has):
            notes.append(f"{variable}={environ[variable]} is declared, {cls}.{field}={has} made its quantisers")
    return Recipe("nvfp4", *in_order(made))


_READERS: dict[str, Callable[[Any, Mapping[str, str], str, list[str]], Recipe]] = {
    "blockwise": _block,
    "current": _current,
    "delayed": _delayed,
    "mxfp8": _mx,
    "nvfp4": _nvfp4,
}
"""Our recipe -> how its counterpart in Transformer Engine is read."""


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
