"""Recipes: how each operand of a Linear is quantised, from names, arguments, environment and foreign objects."""

from __future__ import annotations

from fp8watch.recipe.build import blockwise, current, delayed, mxfp8, nvfp4, observe, rowwise
from fp8watch.recipe.registry import RECIPES
from fp8watch.recipe.resolve import resolve_recipe
from fp8watch.recipe.spec import GEMMS, OPERANDS, ROW, AmaxHistory, OperandRecipe, Recipe

__all__ = [
    "GEMMS",
    "OPERANDS",
    "RECIPES",
    "ROW",
    "AmaxHistory",
    "OperandRecipe",
    "Recipe",
    "blockwise",
    "current",
    "delayed",
    "mxfp8",
    "nvfp4",
    "observe",
    "resolve_recipe",
    "rowwise",
]
