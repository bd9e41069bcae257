"""Synthetic training fleet, simulated by its sketches: for tests, benchmarks and trying out a collector."""

from __future__ import annotations
