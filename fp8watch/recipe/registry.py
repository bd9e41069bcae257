"""The recipes by name: what `attach(recipe=...)`, FP8WATCH_RECIPE and a trainer's object may ask for.

A recipe is registered where it is built, by the decorator `register_recipe` on its builder, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fp8watch.recipe.spec import Recipe

Builder = TypeVar("Builder", bound=Callable[..., Recipe])


@dataclass(frozen=True)
class RegisteredRecipe:
    """One recipe: how it is built, what it reads of the environment, and what others call it."""

    name: str
    build: Callable[..., Recipe]  # callable without arguments
    variables: tuple[str, ...]
    transformer_engine: str | None
    megatron: str | None

    def from_environment(self, environ: Mapping[str, str]) -> Recipe:
        """The recipe as it is without arguments, in that environment."""
        takes = "environ" in inspect.signature(self.build).parameters
        return self.build(environ=environ) if takes else self.build()


RECIPES: dict[str, RegisteredRecipe] = {}
"""Names that `attach(recipe=...)` and FP8WATCH_RECIPE take."""


def register_recipe(
    *, variables: tuple[str, ...] = (), transformer_engine: str | None = None, megatron: str | None = None
) -> Callable[[Builder], Builder]:
    """Register a builder under its own name.

    Args:
        variables: of the environment that it reads; it then has a keyword argument `environ`.
        transformer_engine: name of the class of `transformer_engine.common.recipe` with the same arithmetic.
        megatron: value of `--fp8-recipe` with the same arithmetic.

    Raises:
        ValueError: another recipe has that class or value already; a variant of it leaves it out.
    """
    for other in RECIPES.values():
        for name, mine, theirs in (
            ("transformer_engine", transformer_engine, other.transformer_engine),
            ("megatron", megatron, other.megatron),
        ):
            if mine is not None and mine == theirs:
                raise ValueError(f"{name}={mine!r}: {other.name} has it; one recipe each, a variant leaves it out")

    def register(build: Builder) -> Builder:
        made: Any = build
        RECIPES[made.__name__] = RegisteredRecipe(made.__name__, build, variables, transformer_engine, megatron)
        return build

    return register
