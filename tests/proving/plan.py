"""Which runs there are: every fault in some families, every trap in some, and the twin of each (family, seed).

Families are drawn for a fault by its name, so the plan is the same everywhere and grows without being reshuffled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from proving import planted
from proving.case import Case
from proving.families import families
from proving.faults import FAULTS
from proving.split import DEV_FAMILIES, HELD_OUT_FAMILIES, split_of
from proving.training import SEVERITIES, Training
from proving.traps import TRAPS

FAMILIES_PER_FAULT = 3
"""In each half of the families."""

FAMILIES_PER_TRAP = 2
SEEDS = 3
"""Weights and hyperparameters of a family."""


def _shuffled(names: Iterable[str], *key: str) -> list[str]:
    rng = np.random.default_rng([zlib.crc32(k.encode()) for k in key])
    return [str(name) for name in rng.permutation(sorted(names))]


def _seed(*key: str) -> int:
    return 1 + zlib.crc32("/".join(key).encode()) % SEEDS


def generator_of(case: Case) -> str | None:
    """Of a fault; None for others."""
    return (FAULTS | planted.FAULTS)[case.change].generator if case.kind == "fault" else None


def case_split(case: Case) -> str:
    """dev, held-out or crossed."""
    return split_of(case.family, generator_of(case))


def cases(probe: Callable[[str, int], Training]) -> list[Case]:
    """All runs with a change, the twins apart.

    A fault runs in the first `FAMILIES_PER_FAULT` drawn families of each half that have such a place; medium, severe and
    mild take turns. All first families come before the second ones: a part of the plan has all faults.

    Args:
        probe: (family, seed) -> a training to draw from.
    """
    out: list[tuple[int, Case]] = []
    for half in (DEV_FAMILIES, HELD_OUT_FAMILIES):
        for fault in sorted(FAULTS):
            found: list[Case] = []
            for family in _shuffled(half, fault):
                severity = SEVERITIES[(zlib.crc32(fault.encode()) + 1 + len(found)) % len(SEVERITIES)]
                case = Case(family, fault, "fault", severity, _seed(fault, family))
                if len(found) < FAMILIES_PER_FAULT and case.draw(probe(family, case.seed)) is not None:
                    found.append(case)
            out += enumerate(found)
        for trap in sorted(TRAPS):
            found = []
            for family in _shuffled(half, trap):
                case = Case(family, trap, "trap", "", _seed(trap, family))
                if len(found) < FAMILIES_PER_TRAP and case.draw(probe(family, case.seed)) is not None:
                    found.append(case)
            out += enumerate(found)
    return [case for _, case in sorted(out, key=lambda pair: pair[0])]


def with_twins(changed: Iterable[Case]) -> list[Case]:
    """These, and before the first one of a family and seed its twin."""
    return list(dict.fromkeys(case for c in changed for case in (c.twin, c)))


def named() -> list[tuple[Case, str]]:
    """The small set of every change: runs of families that need torch alone, and the mode that each was called by."""
    found = json.loads((Path(__file__).parent / "named.json").read_text())
    return [(Case.of(line), line["mode"]) for line in found]


def check() -> None:
    """Each family is in one half."""
    for name in families():
        split_of(name)
