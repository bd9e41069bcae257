"""A small language model trained in FP8 on real text, broken on purpose at a step that is said beforehand."""

from __future__ import annotations
