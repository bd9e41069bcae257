"""Detection: sketches in, findings out. Pure: no database, no clock, no network."""

from __future__ import annotations
