"""Recipes: how each operand of a Linear is quantised, from names, arguments, environment and foreign objects."""

from __future__ import annotations

from fp8watch.recipe.build import blockwise, current, delayed, mxfp8, observe
from fp8watch.recipe.registry import RECIPES
from fp8watch.recipe.resolve import resolve_recipe
from fp8watch.recipe.spec import OPERANDS, AmaxHistory, OperandRecipe, Recipe

__all__ = [
    "OPERANDS",
    "RECIPES",
    "AmaxHistory",
    "OperandRecipe",
    "Recipe",
    "blockwise",
    "current",
    "delayed",
    "mxfp8",
    "observe",
    "resolve_recipe",
]
