"""fp8watch: numerical-stability diagnostics for FP8 training."""

from __future__ import annotations
