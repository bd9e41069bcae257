"""Kernels: one file a backend, looked up by name in `registry`."""

from __future__ import annotations

from fp8watch.kernels.backend import Backend
from fp8watch.kernels.registry import BACKEND_NAMES, available, resolve

__all__ = ["BACKEND_NAMES", "Backend", "available", "resolve"]
