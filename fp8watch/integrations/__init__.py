"""Observers of other libraries' FP8 computation. Each module imports its library lazily."""

from __future__ import annotations
