"""What tests/detect/test_rotated.py and others share."""

from __future__ import annotations

SCENARIOS = (
    "dead-layer",
    "delayed-clip",
    "frozen-scale",
    "stale-weight-scale",
    "gradient-underflow",
    "outlier-growth",
    "optimizer-divergence",
    "bad-batch",
    "silent-data-corruption",
    "inf-laundering",
    "chronic-quantization-noise",
    "scale-collapse",
    "attention-logit-bound",
)
