"""What is said of sensitive-layer-quantized: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.remedies import Fix, Place


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
    names = p.extra.get("modules") or [p.module]
    return [
        Fix(
            "code",
            f"Leave it out: attach(model, filter_fn=lambda module, fqn: False if fqn in {tuple(names)!r} else None).",
        ),
        Fix("flag", "In Megatron: keep the first and last layers in BF16 with --first-last-layers-bf16."),
    ]
