"""Demo: a small language model trained in FP8 on real text, with a failure injected at a known step."""

from __future__ import annotations
