"""What tests/quantize/test_conformance.py and others share."""

from __future__ import annotations

EPS = (0.0, 1e-12, 0.25)
