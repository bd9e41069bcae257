"""Which mode explains which: a root cause mutes what follows from it.

Upstream:   fp8watch_server.detect.finding   Downstream: fp8watch_server.detect.statistics, fp8watch_server.incidents.fold
Shapes:     slug -> slugs
Thread:     any; only data

Muted are findings of the same step, and those that come while the root's incident is open. What is muted is counted in
the root's history and sends no message.
"""

from __future__ import annotations

from collections.abc import Iterable

from .finding import Finding

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
    "optimizer-divergence": frozenset(_STATISTICAL | {"attention-logit-growth"}),
    "frozen-scale": frozenset({"delayed-clip", "chronic-quantization-noise", "gradient-underflow", "outlier-growth"}),
    "delayed-clip": frozenset({"chronic-quantization-noise", "outlier-growth", "gradient-underflow", "scale-collapse"}),
    "scale-collapse": frozenset({"chronic-quantization-noise", "gradient-underflow", "outlier-growth"}),
    "attention-logit-growth": frozenset({"outlier-growth", "gradient-underflow", "chronic-quantization-noise"}),
    "outlier-growth": frozenset({"chronic-quantization-noise"}),
    "gradient-underflow": frozenset({"chronic-quantization-noise", "dying-tile"}),
    "dead-layer": frozenset({"dying-tile", "gradient-underflow", "chronic-quantization-noise"}),
    "dying-tile": frozenset({"chronic-quantization-noise"}),
    "bad-batch": frozenset({"outlier-growth"}),
}


def explains(root: str, other: str) -> bool:
    """Whether an incident of mode `root` accounts for one of mode `other`."""
    return other in EXPLAINS.get(root, ())


def without_consequences(found: Iterable[Finding]) -> list[Finding]:
    """Findings of one step that no other of them explains."""
    found = list(found)
    modes = {f.mode for f in found}
    return [f for f in found if not any(m != f.mode and explains(m, f.mode) for m in modes)]
