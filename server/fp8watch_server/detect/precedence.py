"""Which mode explains which: a root cause mutes what follows from it.

Upstream:   fp8watch_server.detect.finding   Downstream: fp8watch_server.detect.statistics, fp8watch_server.incidents.fold
Shapes:     slug -> slugs
Thread:     any; only data

Muted are findings of the same step, and those that come while the root's incident is open. What is muted is counted in
the root's history and sends no message. A cause comes before its consequence: what began earlier is explained by
nothing that began later (`latest`), whatever their modes.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8watch_server.detect.finding import EXACT_MODES, LEAP, Finding

_NONFINITE = {"nan-in-loss", "nan-in-activation", "inf-laundering", "zero-tile-eps", "kernel-output-fault"}
_STATISTICAL = {
    "outlier-growth",
    "gradient-underflow",
    "chronic-quantization-noise",
    "dying-tile",
    "dead-layer",
    "bad-batch",
    "scale-collapse",
    "delayed-clip",
    "frozen-scale",
}

EXPLAINS: dict[str, frozenset[str]] = {
    **{mode: frozenset(_STATISTICAL | {"optimizer-divergence", "silent-data-corruption"}) for mode in _NONFINITE},
    "stale-weight-scale": frozenset(
        {"chronic-quantization-noise", "outlier-growth", "bad-batch", "optimizer-divergence"}
    ),
    "scale-rounding": frozenset({"chronic-quantization-noise", "gradient-underflow", "delayed-clip", "bad-batch"}),
    "recipe-mismatch": frozenset(
        {"chronic-quantization-noise", "gradient-underflow", "delayed-clip", "outlier-growth"}
    ),
    "cross-rank-disagreement": frozenset(
        {
            "delayed-clip",
            "frozen-scale",
            "chronic-quantization-noise",
            "gradient-underflow",
            "scale-collapse",
            "bad-batch",
        }
    ),
    "silent-data-corruption": frozenset(_STATISTICAL | {"optimizer-divergence"}),
    "optimizer-divergence": frozenset(_STATISTICAL | {"attention-logit-growth", "nan-in-loss", "nan-in-activation"}),
    "frozen-scale": frozenset({"delayed-clip", "chronic-quantization-noise", "gradient-underflow", "outlier-growth"}),
    "delayed-clip": frozenset({"chronic-quantization-noise", "outlier-growth", "gradient-underflow", "scale-collapse"}),
    "scale-collapse": frozenset({"chronic-quantization-noise", "gradient-underflow", "outlier-growth"}),
    "attention-logit-growth": frozenset({"outlier-growth", "gradient-underflow", "chronic-quantization-noise"}),
    "outlier-growth": frozenset({"chronic-quantization-noise"}),
    LEAP: frozenset({"chronic-quantization-noise", "bad-batch", "gradient-underflow", "dead-layer"}),
    "gradient-underflow": frozenset({"chronic-quantization-noise", "dying-tile"}),
    "dead-layer": frozenset({"dying-tile", "gradient-underflow", "chronic-quantization-noise"}),
    "dying-tile": frozenset({"chronic-quantization-noise"}),
    "bad-batch": frozenset({"outlier-growth"}),
}


WINDOW_STEPS = 6
"""Observed steps by which the onset of a slow mode is uncertain."""


def explains(root: str, other: str) -> bool:
    """Whether an incident of kind `root` accounts for one of kind `other`."""
    if other == LEAP:  # no batch makes one site leap by six octaves: what leaped made the loss jump
        return root != "bad-batch" and "outlier-growth" in EXPLAINS.get(root, ())
    return other in EXPLAINS.get(root, ())


def latest(kind: str, onset: int, window: int) -> int:
    """The step after which something of this kind, first seen at `onset`, cannot have begun."""
    return onset + (0 if kind in EXACT_MODES else window)


def without_consequences(found: Iterable[Finding], window: int = WINDOW_STEPS) -> list[Finding]:
    """Findings of one step that no other of them explains."""
    found = list(found)
    return [
        f
        for f in found
        if not any(
            root is not f and explains(root.kind, f.kind) and root.earliest(window) <= latest(f.kind, f.onset, window)
            for root in found
        )
    ]
