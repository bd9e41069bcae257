"""One run of the proving ground: which family, which change, which seed. Its id is its name everywhere."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from proving import planted
from proving.faults import FAULTS
from proving.training import Change, Training
from proving.traps import TRAPS

HEALTHY = "healthy"


@dataclass(frozen=True)
class Case:
    """A faulty run, a run with a trap, or (`change` = "healthy") the twin of all runs of its family and seed."""

    family: str
    change: str
    """Name of a fault or a trap, or "healthy"."""
    kind: str
    """One of "fault", "trap", "twin"."""
    severity: str
    """Of a fault; "" for others."""
    seed: int

    @property
    def id(self) -> str:
        """Also the run's identity at the collector."""
        return "-".join(part for part in (self.family, self.change, self.severity, str(self.seed)) if part)

    @property
    def twin(self) -> Case:
        """The same training, left alone."""
        return Case(self.family, HEALTHY, "twin", "", self.seed)

    def draw(self, training: Training) -> Change | None:
        """The change of this run, equal in every process of it; None where the training has no such place."""
        rng = np.random.default_rng(
            [self.seed, *(zlib.crc32(s.encode()) for s in (self.family, self.change, self.severity))]
        )
        if self.kind == "twin":
            return Change()
        if self.kind == "trap":
            return (TRAPS | planted.TRAPS)[self.change].draw(rng, training)
        return (FAULTS | planted.FAULTS)[self.change].draw(rng, training, self.severity)

    def as_dict(self) -> dict[str, Any]:
        """For a line of results."""
        return {"id": self.id, **asdict(self)}
