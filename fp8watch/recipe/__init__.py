"""Recipes: how each operand of a Linear is quantised, from names, arguments, environment and foreign objects."""

from __future__ import annotations

from .build import blockwise, current, delayed, mxfp8, observe
from .resolve import resolve_recipe
from .spec import OPERANDS, RECIPES, AmaxHistory, OperandRecipe, Recipe

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
