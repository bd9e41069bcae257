"""Rows of a map of layers: sites by module, and modules together where there are too many for a page.

Shapes:     sites [S] in data-flow order -> rows [R ≤ MAX_ROWS], each with the places of its sites
Thread:     any; pure functions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 120


@dataclass(frozen=True)
class Row:
    """One row of the map: a module, or modules with a common name prefix."""

    label: str
    sites: tuple[int, ...]  # row indices of the sites given
    num_modules: int


def _names(modules: Sequence[str], depth: int) -> list[str]:
    return list(dict.fromkeys(".".join(m.split(".")[:depth]) for m in modules))


def rows_of(sites: Sequence[Mapping[str, Any]], max_rows: int = MAX_ROWS) -> list[Row]:
    """Sites by module; when there are too many, by the deepest name prefix that fits; else by neighbours."""
    modules = list(dict.fromkeys(str(s["module"]) for s in sites))
    names = {m: m for m in modules}
    if len(modules) > max_rows:
        deepest = max(m.count(".") for m in modules)
        depth = next((d for d in range(deepest, 1, -1) if len(_names(modules, d)) <= max_rows), None)
        if depth is not None:
            names = {m: ".".join(m.split(".")[:depth]) for m in modules}
        else:
            width = -(-len(modules) // max_rows)
            for first in range(0, len(modules), width):
                part = modules[first : first + width]
                names.update(dict.fromkeys(part, part[0] if len(part) == 1 else f"{part[0]} … {part[-1]}"))
    groups: dict[str, list[int]] = {}
    for i, site in enumerate(sites):
        groups.setdefault(names[str(site["module"])], []).append(i)
    return [Row(label, tuple(i), len({sites[k]["module"] for k in i})) for label, i in groups.items()]
