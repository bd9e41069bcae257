"""What `attach(recipe=...)` was given, as one Recipe with a trainer's flags in it.

Thread:     training, once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fp8watch.recipe.environment import capability, environment, refuse_fp32_scales_on_blackwell
from fp8watch.recipe.file import is_recipe_file, read_recipe_file
from fp8watch.recipe.foreign import READ, is_foreign, read_foreign
from fp8watch.recipe.registry import RECIPES
from fp8watch.recipe.spec import Recipe
from fp8watch.recipe.trainer import misfits, trainer_flags


def resolve_recipe(
    recipe: object,
    *,
    environ: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    as_it_is: bool = False,
) -> Recipe:
    """What `attach(recipe=...)` was given, as a Recipe.

    Args:
        recipe: None (then FP8WATCH_RECIPE, else "blockwise"), one of RECIPES, a Recipe, the path of a
            recipe file (`fp8watch.recipe.file`), or a recipe object of Transformer Engine: Float8BlockScaling, Float8CurrentScaling,
            DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling.
        environ: instead of `os.environ`.
        argv: the trainer's arguments, instead of `sys.argv`.
        as_it_is: the model computes in FP8 by its trainer: its flags are those of the model.

    Raises:
        ValueError: an unknown name, or settings that cannot be meant or are not computed here.
        TypeError: anything else.
    """
    env = environment(environ)
    if recipe is None:
        recipe = env.get("FP8WATCH_RECIPE") or "blockwise"
    if is_recipe_file(recipe):
        recipe = read_recipe_file(recipe)  # type: ignore[arg-type]
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"recipe={recipe!r} is unknown; use one of {', '.join(map(repr, RECIPES))}")
        made = RECIPES[recipe].from_environment(env)
    elif isinstance(recipe, Recipe):
        made = recipe
        for operand, spec in made.quantised:
            if spec.kind == "blockwise" and not spec.power_2_scale:
                refuse_fp32_scales_on_blackwell(f"Recipe.{operand}.power_2_scale=False", capability())
    elif is_foreign(recipe):
        made = read_foreign(recipe, env)
    else:
        raise TypeError(
            f"recipe={recipe!r}: must be a name ({', '.join(map(repr, RECIPES))}), a recipe file, a fp8watch.Recipe, or one of "
            f"Transformer Engine's {', '.join(READ)}"
        )
    flags = made.flags or trainer_flags(argv)
    warnings, notes = misfits(flags, None if as_it_is else made.kind)
    return replace(
        made,
        flags=flags,
        warnings=tuple(dict.fromkeys((*made.warnings, *warnings))),
        declared_not_effective=tuple(dict.fromkeys((*made.declared_not_effective, *notes))),
    )
