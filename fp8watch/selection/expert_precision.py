"""Which experts compute in FP8, and why the others stay in high precision.

Thread:     training, once

Experts in one 3-D parameter go by the rules that Linears go by: the recipe's own list, `filter_fn`, and sizes that kernels take.
All other parameters that a module multiplies with itself compute as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from fp8watch.recipe import ROW, Recipe
from fp8watch.selection.module_filter import KEPT, NARROWEST, FilterFn, LeftOut
from fp8watch.selection.own_parameters import OwnModule

FOR_LINEARS = "filter_fn reads what only a Linear has"


def refused(recipe: Recipe) -> str | None:
    """Why no experts compute by a recipe, or None."""
    if recipe.high_precision:
        return f"{' and '.join(recipe.high_precision)} in high precision: experts compute in FP8 in all three GEMMs or in none"
    for operand, spec in recipe.quantised:
        if spec.tile is None or spec.tile == ROW or spec.scaling in ("delayed", "nvfp4"):
            return f"recipe {recipe.kind}: its scales would be of the tokens of all experts together"
        if operand != "weight" and spec.tile[0] != 1:
            return f"{operand} in blocks of {spec.tile[0]} tokens, which would be of several experts"
    return None


def computing_experts(
    own: Iterable[OwnModule], recipe: Recipe, filter_fn: FilterFn | None, reason: str | None, left_out: list[LeftOut]
) -> frozenset[str]:
    """Names of the parameters of experts that compute in FP8; those that do not are added to `left_out`.

    Args:
        own: modules whose products with their own parameters are observed.
        recipe: that computes.
        filter_fn: as for attach; it is asked with the module and the name of the parameter's sites.
        reason: why none of them computes, if there is one.
        left_out: of attach.

    Raises:
        TypeError: `filter_fn` returned something else than a bool or None.
    """
    found: list[str] = []
    for module in own:
        for p in (p for p in module.parameters if p.num_experts):
            rows, columns = module.tensor(p).shape[-2:]
            kept = reason or _filtered(p.fqn, module.module, filter_fn)
            if kept is None and any(fnmatchcase(p.fqn, pattern) for pattern in recipe.high_precision_modules):
                kept = KEPT
            if kept is None and min(rows, columns) < NARROWEST:
                kept = f"{rows}×{columns}: narrower than {NARROWEST}"
            if kept is None:
                found.append(p.fqn)
            else:
                left_out.append(LeftOut(p.fqn, kept))
    return frozenset(found)


def _filtered(fqn: str, module: nn.Module, filter_fn: FilterFn | None) -> str | None:
    if filter_fn is None:
        return None
    try:
        wanted = filter_fn(module, fqn)
    except AttributeError:  # of a filter that was written when attach asked for Linears alone
        return FOR_LINEARS
    if not isinstance(wanted, bool | None):
        raise TypeError(f"filter_fn returned {wanted!r} for {fqn!r}: must return True, False or None (default)")
    return "filter_fn" if wanted is False else None
