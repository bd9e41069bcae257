"""Observers of other libraries' FP8 computation, and adapters of trainers. Nothing here is imported with fp8watch; an
adapter imports its library when it is imported itself."""

from __future__ import annotations
