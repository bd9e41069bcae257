"""Recorded trainings as batches, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fp8watch_agent.record import STEP, Site
from fp8watch_agent.wire import Batch, decode_batch
from fp8watch_server.detect.finding import SiteFacts, facts_of

TRACES = Path(__file__).parent / "traces"


class _Stored(msgspec.Struct):
    name: str
    sites: list[Site]
    bodies: list[bytes]
    onset: int
    mode: str
    module: str
    operand: str


@dataclass(frozen=True)
class Recorded:
    """One real training of 184 steps. `mode` is what must be said of it, "" for nothing."""

    name: str
    sites: list[Site]
    batches: list[Batch]
    onset: int
    mode: str
    module: str
    operand: str

    @property
    def facts(self) -> dict[int, SiteFacts]:
        return facts_of(self.sites)

    @property
    def num_steps(self) -> int:
        return sum(len(b.steps) for b in self.batches)

    @property
    def steps(self) -> np.ndarray:
        """[T] of STEP."""
        return np.concatenate([b.steps for b in self.batches]) if self.batches else np.zeros(0, STEP)

    def amax(self) -> np.ndarray:
        """amax_max [T, S], NaN where it was not measured."""
        ids = {s.id: j for j, s in enumerate(self.sites)}
        first = int(self.steps["step"][0])
        out = np.full((self.num_steps, len(ids)), np.nan)
        for b in self.batches:
            column = np.array([ids[int(i)] for i in b.site])
            out[b.step - first, column] = b.column("amax_max")
        return out


def traces(folder: Path = TRACES) -> Iterator[Recorded]:
    """All of them, by name."""
    for path in sorted(folder.glob("*.trace")):
        got = msgspec.msgpack.decode(path.read_bytes(), type=_Stored)
        yield Recorded(
            got.name, got.sites, [decode_batch(b) for b in got.bodies], got.onset, got.mode, got.module, got.operand
        )
