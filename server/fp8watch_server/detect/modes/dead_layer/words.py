"""What is said of dead-layer: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import evidence, since
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    tokens = f.extra.get("tokens")
    got = " It got no tokens." if tokens == 0 else f" It got {tokens} tokens." if tokens is not None else ""
    module = s.module if s else "A layer"
    if evidence(f, "amax_max") is None:
        return (
            f"{module} is dead",
            f"{module} no longer does anything{since(f)}; by how much it fell was not measured.{got}",
        )
    return (
        f"{module} is dead: input and gradient collapsed",
        f"The input of {module} and its gradient are both more than three octaves under what they were{since(f)}: the layer "
        f"adds nothing and learns nothing.{got}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    first = (
        "Look at the router: load-balancing loss, capacity factor, expert bias."
        if p.extra.get("tokens") == 0
        else (f"Look at requires_grad of {p.module} and of what feeds it, and at the gate before it.")
    )
    return [
        Fix("code", first),
        Fix("code", "If it is frozen or pruned on purpose, silence dead-layer for this module."),
    ]
