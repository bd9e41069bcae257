"""Who may come in: the command that makes tokens."""

from __future__ import annotations
