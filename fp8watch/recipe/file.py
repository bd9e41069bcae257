"""A recipe as a TOML file: what `fp8watch calibrate` writes and `attach(recipe="file.toml")` reads.

Thread:     training, once

    version = 1
    [recipe]                 # name, warmup_steps, high_precision_modules: shell patterns of modules that stay as they are
    [recipe.input]           # tile = [1, 128] | "row" | "tensor", format, power_2_scale, eps, scaling; or high_precision = true
    [recipe.weight]
    [recipe.grad_output]
    [recipe.history]         # of delayed scaling: amax_history_len, amax_compute_algo, margin
    [measured], [[site]]     # what the suggestion rests on; read by nobody
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp8watch.recipe.spec import OPERANDS, ROW, AmaxHistory, OperandRecipe, Recipe, in_order

VERSION = 1
NVFP4_ONLY = ("random_hadamard_transform", "stochastic_rounding")
_TILES: dict[str, tuple[int, int] | None] = {"row": ROW, "tensor": None}
_TOP = ("version", "recipe", "measured", "site")
_RECIPE = ("name", "warmup_steps", "observe_only", "high_precision_modules", "history", *OPERANDS)
_OPERAND = (*(f.name for f in fields(OperandRecipe)), "high_precision")
_HISTORY = tuple(f.name for f in fields(AmaxHistory))


def is_recipe_file(recipe: object) -> bool:
    """Whether `attach(recipe=...)` was given a file."""
    return isinstance(recipe, os.PathLike) or (isinstance(recipe, str) and recipe.endswith(".toml"))


def read_recipe_file(path: str | os.PathLike[str]) -> Recipe:
    """The recipe that a file holds.

    Raises:
        ValueError: it cannot be read or is none: file, key, value, rule.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"recipe file {name}: {e.strerror or e}; fp8watch calibrate -o {name} writes one") from e
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ValueError(f"recipe file {name}: TOML needs Python 3.11, or the package tomli: install it") from None
    try:
        return recipe_from(tomllib.loads(text))
    except (TypeError, ValueError) as e:  # TOMLDecodeError is a ValueError
        raise ValueError(f"recipe file {name}: {e}") from e


def recipe_from(data: Mapping[str, Any]) -> Recipe:
    """The recipe in a parsed file.

    Raises:
        ValueError, TypeError: an unknown key or a value that cannot be meant.
    """
    _known(data, _TOP, "the file")
    if data.get("version") != VERSION:
        raise ValueError(f"version={data.get('version')!r}: must be {VERSION}")
    table = _table(data.get("recipe"), "recipe")
    _known(table, _RECIPE, "[recipe]")
    made = {operand: _operand(table.get(operand), operand) for operand in OPERANDS}
    history = table.get("history")
    if history is not None:
        _known(_table(history, "recipe.history"), _HISTORY, "[recipe.history]")
    modules = table.get("high_precision_modules", [])
    if not isinstance(modules, list) or any(not isinstance(m, str) for m in modules):
        raise ValueError(f"high_precision_modules={modules!r}: must be a list of module names or shell patterns")
    return Recipe(
        str(table.get("name", "")),
        *in_order(made),
        observe_only=bool(table.get("observe_only", False)),
        warmup_steps=table.get("warmup_steps", 0),
        history=None if history is None else AmaxHistory(**history),
        high_precision_modules=tuple(modules),
    )


def _operand(given: Any, operand: str) -> OperandRecipe | None:
    where = f"[recipe.{operand}]"
    if given is None:
        raise ValueError(f"{where} is missing: an operand that stays as it is says high_precision = true")
    table = dict(_table(given, where))
    _known(table, _OPERAND, where)
    if table.pop("high_precision", False):
        return None
    tile = table.pop("tile", None)
    if isinstance(tile, list) and len(tile) == 2:
        return OperandRecipe((tile[0], tile[1]), **table)
    if tile not in _TILES:
        raise ValueError(f"{where} tile={tile!r}: must be two numbers such as [1, 128], 'row' or 'tensor'")
    return OperandRecipe(_TILES[tile], **table)


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r}: must be a table")
    return value


def _known(table: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}, which is unknown; known are {', '.join(names)}")


def recipe_toml(recipe: Recipe, comment: str = "") -> str:
    """The recipe as the text of a file; reading it gives an equal recipe, flags of a trainer apart."""
    lines = [*(f"# {line}" for line in comment.splitlines()), f"version = {VERSION}", "", "[recipe]"]
    lines += [f"name = {toml_value(recipe.name)}", f"warmup_steps = {recipe.warmup_steps}"]
    if recipe.observe_only:
        lines.append("observe_only = true")
    lines.append(f"high_precision_modules = {toml_value(list(recipe.high_precision_modules))}")
    for operand in OPERANDS:
        spec = recipe.operand(operand)
        lines += ["", f"[recipe.{operand}]"]
        if spec is None:
            lines.append("high_precision = true")
            continue
        tile = "tensor" if spec.tile is None else "row" if spec.tile == ROW else list(spec.tile)
        values = {"tile": tile, **{f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "tile"}}
        if spec.scaling != "nvfp4":
            values = {key: value for key, value in values.items() if key not in NVFP4_ONLY}
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    if recipe.history is not None:
        lines += ["", "[recipe.history]", *(f"{n} = {toml_value(getattr(recipe.history, n))}" for n in _HISTORY)]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A string, number, bool or list as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
