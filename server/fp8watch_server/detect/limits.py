"""One threshold: its row in the table, and the values of a run as a detector reads them.

Shapes:     limit.<name of a threshold> -> float
Thread:     any; only data
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SPEC = "failure catalogue"
TUNED = "recorded training, tuning split"


@dataclass(frozen=True)
class Threshold:
    """One number that a detector compares with."""

    name: str
    default: float
    unit: str  # steps | octaves | octaves/step | dB | share | ratio | s | logit | count
    low: float  # smallest and largest value that can be meant
    high: float
    source: str
    whole: bool = False


def threshold(name: str, default: float, unit: str, low: float, high: float, source: str) -> Threshold:
    """A row of the table: what is counted is whole."""
    return Threshold(name, default, unit, low, high, source, whole=unit in ("steps", "count"))


class Limits(Protocol):
    """The thresholds of one run, as attributes."""

    @property
    def disabled(self) -> frozenset[str]:
        """Modes that nobody asked for."""
        ...

    def __getattr__(self, name: str) -> float: ...
