"""A recipe is registered once: its name, its builder and what others call it are the same everywhere."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import fp8watch
from fp8watch import recipe as recipes
from fp8watch.recipe import RECIPES, foreign, registry, resolve_recipe
from fp8watch.recipe.spec import Recipe
from fp8watch_agent import settings


@pytest.mark.parametrize("name", RECIPES)
def test_a_registered_recipe_is_public_under_its_name(name: str) -> None:
    registered = RECIPES[name]
    assert registered.name == name
    assert getattr(fp8watch, name) is registered.build
    made = resolve_recipe(name, environ={}, argv=[])
    assert made == registered.build()
    assert made.name == name


def test_public_recipes_are_typed_and_registered() -> None:
    builders = {
        n for n in fp8watch.__all__ if inspect.isfunction(f := getattr(fp8watch, n)) and "recipe" in f.__module__
    }
    assert builders <= set(RECIPES)
    source = ast.parse(Path(fp8watch.__file__).read_text())
    typed = {a.name for n in ast.walk(source) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert {n for n in fp8watch.__all__ if n != "__version__"} <= typed, "import it under TYPE_CHECKING"
    assert builders <= set(recipes.__all__)


def test_the_agent_accepts_the_registered_names() -> None:
    assert tuple(RECIPES) == settings.RECIPES, "name the recipe in fp8watch_agent/settings.py: RECIPES"


def test_every_counterpart_of_transformer_engine_has_a_reader() -> None:
    assert set(foreign.READ.values()) == set(foreign._READERS)


def test_a_recipe_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RECIPES", dict(RECIPES))
    monkeypatch.setattr("fp8watch.recipe.RECIPES", registry.RECIPES)
    monkeypatch.setattr("fp8watch.recipe.resolve.RECIPES", registry.RECIPES)

    @registry.register_recipe(variables=("WIDE",))
    def wide(*, environ: dict[str, str] | None = None) -> Recipe:
        plain = recipes.blockwise(fp8_format="E5M2", environ={})
        return Recipe("wide" + (environ or {}).get("WIDE", ""), plain.input, plain.weight, plain.grad_output)

    assert resolve_recipe("wide", environ={"WIDE": "r"}, argv=[]).name == "wider"
    assert fp8watch.wide is wide
    assert "wide" not in RECIPES


@pytest.mark.parametrize("other", [{"megatron": "blockwise"}, {"transformer_engine": "Float8BlockScaling"}])
def test_a_value_of_others_belongs_to_one_recipe(other: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="blockwise has it; one recipe each, a variant leaves it out"):
        registry.register_recipe(**other)
