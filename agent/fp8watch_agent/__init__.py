"""fp8watch's agent: carries sketches from a training process to a collector. No torch in here."""

from __future__ import annotations
