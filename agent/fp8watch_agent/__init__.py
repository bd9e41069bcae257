"""fp8watch's agent: carries sketches from a training process to a collector. Imports no torch."""

from __future__ import annotations
