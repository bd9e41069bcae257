"""Which runs there are: every fault in some families, every trap in some, and the twin of each (family, seed).

Fresh, unseen, sealed, veiled and concealed faults and traps are in families of their own and in older ones that chose nothing for them, all others in both
older halves.
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
from proving.split import (
    CONCEALED_FAMILIES,
    CONCEALED_GENERATORS,
    CONCEALED_TRAPS,
    DEV_FAMILIES,
    FRESH_FAMILIES,
    FRESH_GENERATORS,
    FRESH_TRAPS,
    HELD_OUT_FAMILIES,
    SEALED_FAMILIES,
    SEALED_GENERATORS,
    SEALED_TRAPS,
    UNSEEN_FAMILIES,
    UNSEEN_GENERATORS,
    UNSEEN_TRAPS,
    VEILED_FAMILIES,
    VEILED_GENERATORS,
    VEILED_TRAPS,
    split_of,
)
from proving.training import SEVERITIES, Training
from proving.traps import TRAPS

FAMILIES_PER_FAULT = 3
"""In each half of the families."""

FAMILIES_PER_TRAP = 2
FRESH_PER_FAULT, FRESH_PER_TRAP = (3, 1), (2, 1)
"""Of a fresh one: in the fresh families, and in the held-out ones."""
UNSEEN_PER_FAULT, UNSEEN_PER_TRAP = (2, 1), (2, 0)
"""Of an unseen one: in the unseen families, other seeds of them where few have a place, and in the fresh and held-out ones."""
SEALED_PER_FAULT, SEALED_PER_TRAP = (2, 1), (2, 0)
"""Of a sealed one: in the sealed families, likewise, and in the unseen, fresh and held-out ones."""
VEILED_PER_FAULT, VEILED_PER_TRAP = (2, 1), (2, 1)
"""Of a veiled one: in the veiled families, likewise, and beside them."""
VEILED_BESIDE = ("gemma", "perceiver", "ssm")
"""An unseen family, a sealed one and a held-out one, of three recipes: few, so that few twins are needed."""
CONCEALED_PER_FAULT, CONCEALED_PER_TRAP = (2, 1), (2, 1)
"""Of a concealed one: in the concealed families, likewise, and beside them."""
CONCEALED_BESIDE = ("graph", "preference", "vit")
"""A veiled family, a sealed one and a held-out one."""

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
    """dev, held-out, crossed, fresh, unseen, sealed, veiled or concealed. A twin that shares a newer fault's preparations is as new as that."""
    generator = generator_of(case)
    if case.setup and newer(case.setup):
        generator = FAULTS[case.setup].generator
    return split_of(case.family, generator, case.change if case.kind == "trap" else None)


def newer(change: str) -> str | None:
    """Of which newer set a fault or a trap is: "fresh", "unseen", "sealed", "veiled", "concealed", or None for those of the two older halves."""
    generator = FAULTS[change].generator if change in FAULTS else None
    for name, generators, traps in (
        ("fresh", FRESH_GENERATORS, FRESH_TRAPS),
        ("unseen", UNSEEN_GENERATORS, UNSEEN_TRAPS),
        ("sealed", SEALED_GENERATORS, SEALED_TRAPS),
        ("veiled", VEILED_GENERATORS, VEILED_TRAPS),
        ("concealed", CONCEALED_GENERATORS, CONCEALED_TRAPS),
    ):
        if generator in generators or change in traps:
            return name
    return None


def cases(probe: Callable[[str, int], Training]) -> list[Case]:
    """All runs with a change, the twins apart.

    A fault runs in the first `FAMILIES_PER_FAULT` drawn families of each half that have such a place; medium, severe and
    mild take turns. All first families come before the second ones: a part of the plan has all faults.

    Args:
        probe: (family, seed) -> a training to draw from.
    """
    out: list[tuple[int, Case]] = []
    for half in (DEV_FAMILIES, HELD_OUT_FAMILIES):
        for fault in sorted(name for name in FAULTS if newer(name) is None):
            found: list[Case] = []
            for family in _shuffled(half, fault):
                severity = SEVERITIES[(zlib.crc32(fault.encode()) + 1 + len(found)) % len(SEVERITIES)]
                case = Case(family, fault, "fault", severity, _seed(fault, family))
                if len(found) < FAMILIES_PER_FAULT and case.draw(probe(family, case.seed)) is not None:
                    found.append(case)
            out += enumerate(found)
        for trap in sorted(name for name in TRAPS if newer(name) is None):
            found = []
            for family in _shuffled(half, trap):
                case = Case(family, trap, "trap", "", _seed(trap, family))
                if len(found) < FAMILIES_PER_TRAP and case.draw(probe(family, case.seed)) is not None:
                    found.append(case)
            out += enumerate(found)
    for change in sorted(name for name in (*FAULTS, *TRAPS) if newer(name) == "fresh"):
        per = FRESH_PER_FAULT if change in FAULTS else FRESH_PER_TRAP
        for half, num in zip((FRESH_FAMILIES, HELD_OUT_FAMILIES), per, strict=True):
            out += enumerate(_placed(change, half, num, int(half == HELD_OUT_FAMILIES), 1, probe))
    for change in sorted(name for name in (*FAULTS, *TRAPS) if newer(name) == "unseen"):
        per = UNSEEN_PER_FAULT if change in FAULTS else UNSEEN_PER_TRAP
        out += enumerate(_placed(change, UNSEEN_FAMILIES, per[0], 0, SEEDS, probe))
        out += enumerate(_placed(change, FRESH_FAMILIES + HELD_OUT_FAMILIES, per[1], per[0], 1, probe))
    for change in sorted(name for name in (*FAULTS, *TRAPS) if newer(name) == "sealed"):
        per = SEALED_PER_FAULT if change in FAULTS else SEALED_PER_TRAP
        older = UNSEEN_FAMILIES + FRESH_FAMILIES + HELD_OUT_FAMILIES
        out += enumerate(_placed(change, SEALED_FAMILIES, per[0], 0, SEEDS, probe))
        out += enumerate(_placed(change, older, per[1], per[0], 1, probe))
    for change in sorted(name for name in (*FAULTS, *TRAPS) if newer(name) == "veiled"):
        per = VEILED_PER_FAULT if change in FAULTS else VEILED_PER_TRAP
        out += enumerate(_placed(change, VEILED_FAMILIES, per[0], 0, SEEDS, probe))
        out += enumerate(_placed(change, VEILED_BESIDE, per[1], per[0], 1, probe))
    for change in sorted(name for name in (*FAULTS, *TRAPS) if newer(name) == "concealed"):
        per = CONCEALED_PER_FAULT if change in FAULTS else CONCEALED_PER_TRAP
        out += enumerate(_placed(change, CONCEALED_FAMILIES, per[0], 0, SEEDS, probe))
        out += enumerate(_placed(change, CONCEALED_BESIDE, per[1], per[0], 1, probe))
    return [case for _, case in sorted(out, key=lambda pair: pair[0])]


def _placed(
    change: str, half: tuple[str, ...], num: int, turn: int, seeds: int, probe: Callable[[str, int], Training]
) -> list[Case]:
    """A newer fault or trap in the first families that have a place for it, then in those again with other seeds.

    Args:
        turn: with which severity it begins; they take turns, those without a place apart.
        seeds: how many of a family, at most.
    """
    found: list[Case] = []
    for more in range(seeds):
        for family in _shuffled(half, change):
            if len(found) == num:
                return found
            seed = 1 + (_seed(change, family) - 1 + more) % SEEDS
            first = zlib.crc32(change.encode()) + len(found) + turn
            severities = [SEVERITIES[(first + i) % len(SEVERITIES)] for i in range(len(SEVERITIES))]
            cases = [Case(family, change, "fault", s, seed) for s in severities]
            if change in TRAPS:
                cases = [Case(family, change, "trap", "", seed)]
            placed = [c for c in cases if c.draw(probe(family, seed)) is not None]
            found += placed[:1]
    return found


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
