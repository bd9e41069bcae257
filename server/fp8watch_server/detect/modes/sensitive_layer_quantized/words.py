"""What is said of sensitive-layer-quantized: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.switches import leave_out


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    modules = f.extra.get("modules", [])
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    return (
        f"{modules[0] if modules else 'A module'}{more} computes in FP8: {f.extra.get('what', 'a sensitive layer')}",
        f"{', '.join(modules)} {'is' if len(modules) == 1 else 'are'} on the FP8 path. Heads, embeddings, routers and norms stay in high "
        "precision by common practice: their errors reach every token or every expert.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    return leave_out(p, tuple(p.extra.get("modules") or [p.module]))
