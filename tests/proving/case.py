"""One run of the proving ground: which family, which change, which seed. Its id is its name everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from proving import planted
from proving.faults import FAULTS
from proving.training import Change, Prepared, Training
from proving.traps import TRAPS
from proving.trends import TRENDS

HEALTHY = "healthy"


@dataclass(frozen=True)
class Case:
    """A faulty run, a run with a trap or a trend, or (`change` = "healthy") the twin of all runs of its family and seed."""

    family: str
    change: str
    """Name of a fault, a trap or a trend, or "healthy"."""
    kind: str
    """One of "fault", "trap", "trend", "twin"."""
    severity: str
    """Of a fault; of a trend "arrives" or "levels-off"; "" for others."""
    seed: int
    setup: str = ""
    """Of a twin: the fault whose preparations it shares, another recipe for one. Their twin without would be another training."""

    @property
    def id(self) -> str:
        """Also the run's identity at the collector."""
        parts = (self.family, self.change, self.setup, self.severity, str(self.seed))
        return "-".join(part for part in parts if part)

    @property
    def twin(self) -> Case:
        """The same training, left alone."""
        if self.kind == "fault" and getattr((FAULTS | planted.FAULTS).get(self.change), "prepares", False):
            return Case(self.family, HEALTHY, "twin", self.severity, self.seed, self.change)
        return Case(self.family, HEALTHY, "twin", "", self.seed)

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Case:
        """Of a line of results."""
        return cls(**{f.name: line.get(f.name, f.default) for f in fields(cls)})

    def draw(self, training: Training) -> Change | None:
        """The change of this run, equal in every process of it; None where the training has no such place."""
        names = (self.family, self.setup or self.change, self.severity)
        rng = np.random.default_rng([self.seed, *(zlib.crc32(s.encode()) for s in names)])
        if self.setup:
            fault = (FAULTS | planted.FAULTS)[self.setup].draw(rng, training, self.severity)
            return None if fault is None else Prepared(fault)
        if self.kind == "twin":
            return Change()
        if self.kind == "trend":
            return TRENDS[self.change].draw(rng, training, self.severity)
        if self.kind == "trap":
            return (TRAPS | planted.TRAPS)[self.change].draw(rng, training)
        return (FAULTS | planted.FAULTS)[self.change].draw(rng, training, self.severity)

    def as_dict(self) -> dict[str, Any]:
        """For a line of results."""
        return {"id": self.id, **asdict(self)}
