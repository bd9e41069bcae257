"""Which expert the tile of a finding belongs to, where the rows of a weight say so.

Shapes:     a finding, the sites, facts of the session -> the number of an expert
Thread:     detect worker

The weights of all experts of a parameter are one site: rows of experts one behind the other, as many of each. Of tokens, a
step says itself in which expert its first non-finite element lies (`nonfinite`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8watch_agent.experts import EXPERTS_FACT, decode_experts
from fp8watch_agent.roles import pattern
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.step_view import SiteTable


def context(found: Finding, table: SiteTable, facts: Mapping[str, Any]) -> dict[str, int]:
    """`expert` of a finding in a weight, nothing where there is none or it is known already.

    Args:
        found: with the site and the tile that it names.
        table: of the sites.
        facts: of the session that sent it.
    """
    if found.site is None or found.tile is None or "expert" in found.extra or not facts.get(EXPERTS_FACT):
        return {}
    row = int(table.rows(np.array([found.site], dtype=np.uint64))[0])
    if row < 0 or table.facts[row].operand != "weight":
        return {}
    site = table.facts[row]
    num = decode_experts(facts.get(EXPERTS_FACT)).get(pattern(site.module), 0)
    rows_each = site.shape[0] // num if num else 0
    if not 0 < site.tile[0] <= rows_each:
        return {}
    return {"expert": found.tile[0] * site.tile[0] // rows_each}
