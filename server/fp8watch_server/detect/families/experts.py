"""Which expert the tile of a finding belongs to, where the rows of a weight say so.

Shapes:     a finding, the sites, facts of the session -> the number of an expert
Thread:     detect worker

The weights of all experts of a parameter are one site: rows of experts one behind the other, as many of each. Of tokens, a
step says itself in which expert its first non-finite element lies (`nonfinite`), and which of them had the turn in which its
codes or its product were found to be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8watch_agent.experts import EXPERTS_FACT, decode_experts
from fp8watch_agent.roles import pattern
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.step_view import SiteTable, StepView

MAX_INDEX = 1 << 31


def checked(view: StepView, name: str, site: SiteFacts) -> dict[str, int]:
    """`expert` whose turn it was when something of a site was found to be wrong; nothing where the step does not say so.

    Args:
        view: of the step.
        name: what was looked at: CHECKED_EXPERT or CHECKED_PRODUCT.
        site: of the record.
    """
    expert = view.logs().get(f"{name}{site.module}.{site.operand}.{site.direction}")
    return {"expert": int(expert)} if expert is not None and 0 <= expert < MAX_INDEX else {}


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
