"""Facts that differ, as a finding: mode 10, recipe-mismatch.

Shapes:     changes of sites and sessions -> one finding
Thread:     detect worker
"""

from __future__ import annotations

from typing import Any

from fp8watch_server.detect.finding import Evidence, Finding, SiteFacts
from fp8watch_server.detect.sessions import Change


def mismatch(
    changes: list[Change], step: int, rank: int, sites: list[SiteFacts] | None = None, resumed: bool = False
) -> Finding:
    """The finding for facts that differ."""
    sites = sorted(sites or [], key=lambda f: f.order)
    first = sites[0] if sites else None
    return Finding(
        mode="recipe-mismatch",
        severity="warning",
        step=step,
        rank=rank,
        site=None if first is None else first.id,
        tile=None,
        element=None,
        evidence=tuple(Evidence(c.fact, _text(c.value), _text(c.baseline), "", step) for c in changes[:12]),
        verdict="fp8",
        rank_in_flow=0,
        extra={
            "sites": [f.id for f in sites[:256]],
            "num_sites": len(sites),
            "operands": sorted({f.operand for f in sites}),
            "changes": [(c.fact, _text(c.value), _text(c.baseline), c.against) for c in changes[:12]],
            "resumed": resumed,
        },
    )


def _text(value: Any) -> float | int | str | None:
    return value if isinstance(value, int | float | str) or value is None else str(value)
