"""Heads, embeddings, routers and norms that compute in FP8: mode 18, sensitive-layer-quantized.

Shapes:     sites that were registered, facts of their session -> at most one finding
Thread:     detect worker
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fp8watch_agent.roles import EMBEDDING, NORM, OUTPUT_HEAD, ROLES_FACT, ROUTER, TIED, decode_roles, pattern, role_of
from fp8watch_server.detect.finding import Evidence, Finding, SiteFacts
from fp8watch_server.detect.sessions import MAX_NAMED

SENSITIVE = {OUTPUT_HEAD: "the output head", EMBEDDING: "an embedding", ROUTER: "a router", NORM: "a norm"}
SENSITIVE[TIED] = SENSITIVE[OUTPUT_HEAD]


def sensitive(
    sites: Iterable[SiteFacts], step: int, rank: int, facts: Mapping[str, Any] | None = None
) -> Finding | None:
    """Mode 18: a head, embedding, router or norm among the modules that compute in FP8; by what the session says of the
    module, else by its name."""
    hit: list[tuple[SiteFacts, str]] = []
    told = decode_roles((facts or {}).get(ROLES_FACT))
    for site in sites:
        if site.is_probe or site.recipe == "observe" or site.operand not in ("input", "weight"):
            continue
        what = SENSITIVE.get(told.get(pattern(site.module)) or role_of(site.module) or "")
        if what is not None:
            hit.append((site, what))
    if not hit:
        return None
    hit.sort(key=lambda h: (h[0].order, h[0].operand))
    modules = list(dict.fromkeys(f.module for f, _ in hit))
    first, what = hit[0]
    return Finding(
        mode="sensitive-layer-quantized",
        severity="warning",
        step=step,
        rank=rank,
        site=first.id,
        tile=None,
        element=None,
        evidence=(
            Evidence("module", first.module, "high precision", "", step),
            Evidence("sensitive_modules", len(modules), 0, "modules", step),
        ),
        verdict="fp8",
        rank_in_flow=first.order,
        extra={
            "sites": [f.id for f, _ in hit][:256],
            "num_sites": len(hit),
            "operands": sorted({f.operand for f, _ in hit}),
            "what": what,
            "modules": modules[:MAX_NAMED],
        },
    )
