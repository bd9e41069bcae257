"""Names under which a session tells of experts: which modules have them, and in which one a step broke.

Experts share one site for each parameter, operand and direction, so a record does not say which of them it is about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fp8watch_agent.roles import pattern

EXPERTS_FACT = "experts"
"""Fact of a session: "layers.*.experts.down_proj (8); …", modules and how many experts each has, layers put together."""

NONFINITE_EXPERT = "nonfinite_expert/"
"""Before "module.operand.direction": scalar of a step whose first non-finite element of that site lies in this expert."""

NONFINITE_EXPERT_ROW = "nonfinite_expert_row/"
"""... and in this row of the expert: for a weight of its own matrix, else of its tokens."""

CHECKED_EXPERT = "checked_expert/"
"""Before "module.operand.direction": scalar of a step in which what a GEMM reads of that operand was found to be wrong in this
expert, the one that had its turn."""

CHECKED_PRODUCT = "checked_product/"
"""... and of which the output of the GEMM that reads it is not what its operands give."""

MAX_FACT_CHARS = 4000


def encode_experts(modules: Mapping[str, int]) -> str:
    """Module -> number of experts as one session fact, layers merged; what does not fit is left out."""
    out = ""
    for item in dict.fromkeys(f"{pattern(fqn)} ({num})" for fqn, num in modules.items()):
        if len(out) + len(item) > MAX_FACT_CHARS:
            break
        out += f"{'; ' if out else ''}{item}"
    return out


def decode_experts(fact: object) -> dict[str, int]:
    """Inverse of `encode_experts`: pattern -> number of experts."""
    if not isinstance(fact, str):
        return {}
    return {name: int(num) for name, num in re.findall(r"([^;()]+?) \((\d{1,9})\)(?:; |$)", fact)}
