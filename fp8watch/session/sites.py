"""What a row of the slab stands for, as the collector is told of it: once, when its operand was first seen.

Shapes:     one row -> one Site     Thread: training
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8watch.integrations.transformer_engine import TeObserver
from fp8watch.observer.foreign import EVIDENCE
from fp8watch.observer.site_rows import SiteRows
from fp8watch.recipe import Recipe
from fp8watch_agent.record import PROBE, Site

INPUT, OUTPUT = "input", "output"
"""`operand` of what a Linear in high precision is given, and of what a probed module returns."""
ROOT = "the model"
"""What a module is called that was given to attach as the model itself: torch has no name for it, and a collector takes none without."""


@dataclass
class SlabSite:
    """What a row of the slab stands for; shape and order are known after the first step."""

    fqn: str
    operand: str
    direction: str
    gemm: str
    site_id: int
    width: int = 0  # in_features of its Linear
    as_it_is: bool = False  # its GEMM computes as before, whatever the recipe is
    is_own: bool = False  # of a parameter that its module multiplies with itself
    probed: bool = False  # looked at where no quantiser is

    @property
    def module(self) -> str:
        """Its module as people are told of it."""
        return self.fqn or ROOT


def operand_name(table: Sequence[SlabSite], row: int) -> str:
    """Module and operand of a row, such as "layers.0.fc1.input"."""
    return f"{table[row].module}.{table[row].operand}"


def site_name(s: SlabSite) -> str:
    """Module, operand and direction, such as "layers.0.fc1.input.rowwise"."""
    return f"{s.module}.{s.operand}.{s.direction}"


def describe(row: int, s: SlabSite, order: int, rows: SiteRows, te: TeObserver | None, recipe: Recipe) -> Site:
    """The site of a row whose operand has been seen. One of Transformer Engine is what its tensors say, whatever our
    recipe is; a probe has no recipe: its tile is the tensor as it came first."""
    shape = rows.shapes[row]
    if s.probed:
        return Site(
            id=s.site_id, module=s.module, operand=s.operand, direction=s.direction, gemm=s.gemm, order=order, shape=shape,
            tile=shape, format="", power_2_scale=False, eps=0.0, recipe=PROBE, backend="torch",
            evidence={"all": "exact"},
        )  # fmt: skip
    if row >= len(rows.quantizers):
        assert te is not None
        facts = te.numerics[row]
        return Site(
            id=s.site_id, module=s.module, operand=s.operand, direction=s.direction, gemm=s.gemm, order=order, shape=shape,
            tile=facts.tile, format=facts.format, power_2_scale=facts.power_2_scale, eps=facts.eps,
            recipe=facts.recipe, backend=te.backend, evidence=facts.evidence,
        )  # fmt: skip
    quantizer = rows.quantizers[row]
    spec = quantizer.spec
    foreign = rows.foreign.get(row - row % len(rows.rows))
    return Site(
        id=s.site_id, module=s.module, operand=s.operand, direction=s.direction, gemm=s.gemm, order=order, shape=shape,
        tile=quantizer.tile_for(shape), format=spec.format, power_2_scale=spec.power_2_scale, eps=spec.eps,
        recipe=recipe.site_recipe(s.operand, observe=s.as_it_is) if foreign is None else foreign.site_recipe(recipe, s.operand),
        backend=quantizer.computed_by if foreign is None else foreign.backend,
        evidence={"all": "exact"} if foreign is None else EVIDENCE,
    )  # fmt: skip


def silent_modules(table: Sequence[SlabSite], arrived: Set[int], unobserved: Set[int]) -> list[str]:
    """Modules of which no site was measured; those that attach was told to leave alone are not asked."""
    seen = {table[row].fqn for row in arrived}
    asked = dict.fromkeys(s.fqn for row, s in enumerate(table) if row not in unobserved)
    return [fqn for fqn in asked if fqn not in seen]


def and_more(num: int) -> str:
    """What ends a list of which so many are not shown."""
    return f" and {num} more" if num > 0 else ""


def unobserved_rows(table: Sequence[SlabSite], wanted: Sequence[str] | None) -> frozenset[int]:
    """Rows that no pattern of `attach(sites=...)` names; none where there are no patterns.

    Raises:
        TypeError: not a sequence of patterns.
        ValueError: a pattern that no site has.
    """
    if wanted is None:
        return frozenset()
    if isinstance(wanted, str) or not all(isinstance(p, str) and p for p in wanted):
        raise TypeError(f"sites={wanted!r}: must be a list of patterns, such as ['layers.0.*', '*.grad_output.*']")
    unused, rows = set(wanted), set()
    for row, s in enumerate(table):
        names = s.module, f"{s.module}.{s.operand}", site_name(s)
        hits = {p for p in wanted if any(fnmatchcase(name, p) for name in names)}
        unused -= hits
        if not hits:
            rows.add(row)
    if unused and table:
        raise ValueError(
            f"sites={list(wanted)!r}: no site is called {sorted(unused)[0]!r}; give patterns of 'module', "
            f"'module.operand' or 'module.operand.direction', such as {table[0].module!r}"
        )
    return frozenset(rows)


def first_rows(table: Sequence[SlabSite], modules: Iterable[str]) -> set[int]:
    """The first row of each of these modules.

    Raises:
        ValueError: a name that is not watched.
    """
    first = {site.module: row for row, site in reversed(list(enumerate(table))) if not site.probed}
    names = [name or ROOT for name in modules]  # torch names the model itself ""
    for name in names:
        if name not in first:
            raise ValueError(f"{name!r} is not watched; watched are {', '.join(sorted(first)) or 'none'}")
    return {first[name] for name in names}
