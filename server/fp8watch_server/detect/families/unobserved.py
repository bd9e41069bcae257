"""GEMMs that nobody observes, between the last site before a broken value and the site where it was first seen.

Shapes:     a finding, the sites in order, facts of the session -> names
Thread:     detect worker

A session names the weights that it does not take (experts as 3-D parameters, fused projections, convolutions, Linears that
were left out), layers put together as patterns. What runs between two sites runs inside the innermost module that holds
both, so what lies outside of that module is not suspected. A value that breaks first in backward may come from anywhere
between the last forward operand and there, the output head included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.sessions import NOT_TAKEN_FACT, SILENT_FACT
from fp8watch_server.detect.step_view import GRAD_OUTPUT, SiteTable

MAX_NAMED = 4
_ITEM = re.compile(r"([^;()]+?) \((?:[^()]|\([^()]*\))*\)(?:; |$)")


def with_unobserved(found: Finding, table: SiteTable, facts: Mapping[str, Any]) -> Finding:
    """The finding with the names of GEMMs that may have made its value unseen, as `extra["unobserved"]`."""
    if found.mode != "nan-in-activation" or found.site is None or found.extra.get("weight_born"):
        return found
    names = [n for fact in (NOT_TAKEN_FACT, SILENT_FACT, "left_out") for n in _items(str(facts.get(fact) or ""))]
    row = int(table.rows(np.array([found.site], dtype=np.uint64))[0])
    if not names or row < 0:
        return found
    inside = _innermost(table, row)
    seen = {f.module for f in table.facts if not f.is_probe}  # left out of the FP8 path, and observed all the same
    suspects = [name for name in names if name not in seen and _lies_in(name, inside)]
    return replace(found, extra={**found.extra, "unobserved": suspects[:MAX_NAMED]}) if suspects else found


def _items(text: str) -> Iterator[str]:
    """Names, up to the first item that cannot be read: a search that begins again at each character has no end."""
    at = 0
    while (m := _ITEM.match(text, at)) is not None:
        yield m[1]
        at = m.end()


def _innermost(table: SiteTable, row: int) -> list[str]:
    """Path of the innermost module that holds a site and the one that ran before it; the root where that is not known."""
    earlier = np.flatnonzero((table.order < table.order[row]) & (table.module != table.module[row]))
    if not len(earlier):
        return []
    before = int(earlier[np.argmax(table.order[earlier])])
    if (table.role[before] == GRAD_OUTPUT) != (table.role[row] == GRAD_OUTPUT):
        return []
    here, there = table.facts[row].module.split("."), table.facts[before].module.split(".")
    common = 0
    while common < min(len(here), len(there)) and here[common] == there[common]:
        common += 1
    if common == len(there):  # what came before is over: its own parts are not in between
        common -= 1
    return here[:common]


def _lies_in(name: str, path: list[str]) -> bool:
    parts = name.split(".")
    return len(parts) >= len(path) and all(
        a == b or (a == "*" and b.isdigit()) for a, b in zip(parts, path, strict=False)
    )
