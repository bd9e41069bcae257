"""The plan is the same everywhere, names its runs once, and a run can be asked for again."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from proving import families, plan, run, split
from proving.case import Case
from proving.faults import FAULTS
from proving.nest import Running
from proving.training import SEVERITIES, Trap
from proving.traps import TRAPS

HALVES = {
    "DEV_FAMILIES": ("llama", "gpt"),
    "HELD_OUT_FAMILIES": ("delayed", "moe"),
    "FRESH_FAMILIES": ("muon",),
    "UNSEEN_FAMILIES": ("world",),
    "SEALED_FAMILIES": ("ranker",),
    "VEILED_FAMILIES": ("graph",),
    "VEILED_BESIDE": (),
    "CONCEALED_FAMILIES": ("flow",),
    "CONCEALED_BESIDE": (),
}


@cache
def probe(family: str, seed: int) -> object:
    """Weights do not matter to the plan: one seed of each family serves."""
    return families.build(family, 1)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    for name, half in HALVES.items():
        monkeypatch.setattr(plan, name, half)
    return plan.cases(probe)  # type: ignore[arg-type]


def test_the_plan_is_equal_each_time_and_names_its_runs_once(cases: list[Case]) -> None:
    assert cases == plan.cases(probe)  # type: ignore[arg-type]
    assert len({case.id for case in cases}) == len(cases)
    per_fault = {name: [c for c in cases if c.change == name] for name in FAULTS}
    assert max(len(found) for found in per_fault.values()) <= 2 * plan.FAMILIES_PER_FAULT
    assert {c.severity for c in cases if c.kind == "fault"} == set(SEVERITIES)


def test_a_twin_comes_once_and_before_whoever_needs_it(cases: list[Case]) -> None:
    every = plan.with_twins(cases)
    assert len(set(every)) == len(every)
    for i, case in enumerate(every):
        assert case.kind == "twin" or case.twin in every[:i]


def test_all_first_families_come_before_the_second(cases: list[Case]) -> None:
    """A run that is stopped has seen as many faults as it could."""
    seen: dict[tuple[str, str], int] = {}
    turns = []
    for case in cases:
        key = (case.change, next(half for half, names in HALVES.items() if case.family in names))
        seen[key] = seen.get(key, -1) + 1
        turns.append(seen[key])
    assert turns == sorted(turns)


def test_a_change_is_drawn_equally_in_every_process_of_a_run_and_differs_between_seeds() -> None:
    training = probe("llama", 1)
    drawn = [Case("llama", "outlier-channel", "fault", "severe", seed).draw(copy.copy(training)) for seed in (1, 1, 2)]  # type: ignore[arg-type]
    first, again, other = (None if d is None else (d.step, d.drawn) for d in drawn)  # type: ignore[union-attr]
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", sorted(TRAPS))
def test_every_trap_has_a_place_in_some_family_and_its_own_moment(name: str) -> None:
    found = [TRAPS[name].draw(np.random.default_rng(seed), probe(f, 1)) for f in ("llama", "moe") for seed in range(4)]  # type: ignore[arg-type]
    made = [t for t in found if isinstance(t, Trap)]
    if name in ("tiny-gradients", "samples-mixed"):
        assert not made  # classifiers and signals alone
        return
    assert made
    assert all(t.step <= probe("llama", 1).onset[1] for t in made)  # type: ignore[attr-defined]


def test_every_family_and_every_generator_has_a_half() -> None:
    plan.check()
    for cls in FAULTS.values():
        split.split_of("llama", cls.generator)


def test_parts_share_the_runs_among_them() -> None:
    arguments = ["--only", "llama", "--fault", "restart"]
    whole = run.chosen(run.parse(arguments))
    parts = [run.chosen(run.parse([*arguments, "--part", f"{i}/3"])) for i in (1, 2, 3)]
    assert sorted(c.id for part in parts for c in part) == sorted(c.id for c in whole)
    assert {c.kind for c in whole} == {"twin", "trap"}


def test_a_family_whose_package_is_missing_says_so_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "missing", lambda name: ["transformers"] if name == "t5" else [])
    with pytest.raises(SystemExit, match="family t5 needs transformers"):
        run.warm(["gpt", "t5"])


def test_a_process_that_leaves_no_outcome_is_broken_and_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proving.nest.leg_in_child", lambda *a: (_ for _ in ()).throw(MemoryError("planted")))
    ran = Running(Case("llama", "healthy", "twin", "", 1), 1, tmp_path / "run", None)
    ran.start_leg()
    while not ran.ended():
        pass
    assert "MemoryError: planted" in ran.outcomes[-1]["broken"]
