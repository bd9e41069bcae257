"""A trainer's own FP8 flags: what Megatron parsed, else what stands on the command line.

Thread:     any

They decide nothing here. They go into the facts and the fingerprint, and flags that do not fit together are said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fp8watch.recipe.registry import RECIPES

FLAGS: dict[str, str] = {
    "fp8_format": "--fp8-format",
    "fp8_recipe": "--fp8-recipe",
    "fp8_param_gather": "--fp8-param-gather",
}
"""Name in facts -> flag."""

_MEGATRON = ("megatron.training.global_vars", "megatron.training", "megatron.global_vars", "megatron")
_ATTRIBUTES = {  # Megatron stores --fp8-format as args.fp8
    "fp8_format": ("fp8", "fp8_format"),
    "fp8_recipe": ("fp8_recipe",),
    "fp8_param_gather": ("fp8_param_gather", "fp8_param"),
}
MEGATRON_DEFAULT_RECIPE = "delayed"
_OURS = {r.megatron: r.name for r in RECIPES.values() if r.megatron is not None}
"""Megatron's name -> ours."""


def trainer_flags(
    argv: Sequence[str] | None = None, modules: Mapping[str, Any] | None = None
) -> tuple[tuple[str, str], ...]:
    """The flags that were given, as (name, value) in the order of FLAGS.

    Args:
        argv: instead of `sys.argv`.
        modules: instead of `sys.modules`.
    """
    modules = sys.modules if modules is None else modules
    got = _from_megatron(modules)
    if got is None:
        got = _from_argv(sys.argv[1:] if argv is None else argv)
    return tuple((name, got[name]) for name in FLAGS if name in got)


def _from_megatron(modules: Mapping[str, Any]) -> dict[str, str] | None:
    """None: Megatron is not loaded, or has not parsed its arguments yet."""
    for name in _MEGATRON:
        get_args = getattr(modules.get(name), "get_args", None)
        if get_args is None:
            continue
        try:
            args = get_args()
        except Exception:  # noqa: BLE001 - it asserts that its arguments were parsed; a trainer's own error is not ours
            continue
        got: dict[str, str] = {}
        for flag, attributes in _ATTRIBUTES.items():
            value = next((v for a in attributes if (v := getattr(args, a, None)) is not None), None)
            if value is not None and value is not False:
                got[flag] = "1" if value is True else str(getattr(value, "value", value))
        return got if "fp8_format" in got else {}  # without it Megatron computes nothing in FP8
    return None


def _from_argv(argv: Sequence[str]) -> dict[str, str]:
    got: dict[str, str] = {}
    for i, word in enumerate(argv):
        flag, given, value = word.partition("=")
        for name, spelled in FLAGS.items():
            if flag != spelled:
                continue
            if name == "fp8_param_gather":
                got[name] = "1"
            elif given:
                got[name] = value
            elif i + 1 < len(argv) and not argv[i + 1].startswith("-"):
                got[name] = argv[i + 1]
    return got


def misfits(flags: Sequence[tuple[str, str]], kind: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the flags say that cannot be meant together, and what they say that is not computed here.

    Args:
        flags: as `trainer_flags` gives them.
        kind: the arithmetic of the recipe that is used here; None: the trainer's own modules compute.

    Returns:
        Configuration warnings, and declared-but-not-effective notes.
    """
    got = dict(flags)
    fmt, recipe = got.get("fp8_format"), got.get("fp8_recipe")
    warnings: list[str] = []
    if (fmt == "e4m3") != (recipe == "blockwise") and recipe != "mxfp8":  # E4M3 is the MX recipe's own format too
        said = f"--fp8-recipe {recipe}" if recipe is not None else f"no --fp8-recipe ({MEGATRON_DEFAULT_RECIPE})"
        form = f"--fp8-format {fmt}" if fmt is not None else "no --fp8-format"
        warnings.append(
            f"{form} with {said}: e4m3 and blockwise belong together; give --fp8-format e4m3 --fp8-recipe blockwise, or neither"
        )
    notes: list[str] = []
    if kind is None:
        return tuple(warnings), ()
    if recipe is not None and _OURS.get(recipe, recipe) != kind:
        notes.append(f"--fp8-recipe {recipe} is declared, the Linears taken over here use {kind}")
    if "fp8_param_gather" in got:
        notes.append("--fp8-param-gather is declared, the Linears taken over here quantise high-precision weights")
    return tuple(warnings), tuple(notes)
