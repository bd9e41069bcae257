"""A training fleet that exists only as its sketches: for tests, for benchmarks, for trying a collector out."""

from __future__ import annotations
