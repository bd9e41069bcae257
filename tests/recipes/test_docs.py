"""docs/recipes.md says what the code does."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from fp8watch import recipe as recipes
from fp8watch.quantize.site_quantizer import places
from fp8watch.recipe.environment import (
    CURRENT_POWER_2_VARIABLE,
    EPS_VARIABLES,
    FP32_SCALES_VARIABLE,
    NVFP4_VARIABLES,
    POWER_2_VARIABLES,
)
from fp8watch.recipe.resolve import resolve_recipe
from fp8watch.recipe.trainer import FLAGS
from fp8watch_agent.settings import RECIPES

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def table(header):
    """Cells of the rows of the table with that header."""
    lines = PAGE[PAGE.index(header) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_recipes_is_the_code():
    rows = table("| recipe | tile of input |")
    assert [r[0] for r in rows] == list(recipes.RECIPES) == list(RECIPES)
    for name, *cells in rows:
        made = resolve_recipe(name, environ={}, argv=[])
        specs = [made.operand(o) for o in recipes.OPERANDS]
        (scale, *_) = [f"{s.scaling}, {'power of two' if s.power_2_scale else 'FP32'}" for s in specs if s is not None]
        facts = made.facts()
        assert cells == [
            *(facts.get(f"{o}.tile", "–") for o in recipes.OPERANDS),
            ", ".join("–" if s is None else s.format for s in specs),
            scale,
            str(len(places(made))),
        ]


def test_the_table_of_arguments_is_the_code():
    shared = {"warmup_steps", "observe_only", "high_precision", "environ", "device_capability"}
    listed = [(name, argument, ast.literal_eval(default)) for name, argument, default in table("| recipe | argument |")]
    wanted = [
        (name, argument, parameter.default)
        for name, registered in recipes.RECIPES.items()
        for argument, parameter in inspect.signature(registered.build).parameters.items()
        if name != "observe" and argument not in shared
    ]
    assert listed == wanted
    assert "`warmup_steps` (0), `observe_only` (False) and `high_precision` (no operand)" in PAGE


def test_every_variable_and_flag_is_on_the_page():
    blockwise = {*EPS_VARIABLES.values(), *POWER_2_VARIABLES.values(), FP32_SCALES_VARIABLE}
    listed = {variable: of for variable, of, _ in table("| variable | of |")}
    assert listed == {v: name for name, registered in recipes.RECIPES.items() for v in registered.variables}
    assert set(listed) == {*blockwise, CURRENT_POWER_2_VARIABLE, *NVFP4_VARIABLES.values()}
    for flag in FLAGS.values():
        assert f"`{flag}`" in PAGE


def test_names_on_the_page_exist():
    import fp8watch

    for name in re.findall(r"`fp8watch\.(\w+)(?:\(\.\.\.\))?`", PAGE):
        assert name == "kernels" or getattr(fp8watch, name)
