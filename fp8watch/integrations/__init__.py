"""What other libraries compute in FP8, observed from outside. Each module imports its library only when it is asked for."""

from __future__ import annotations
