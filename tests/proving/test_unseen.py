"""The unseen set: its families train and go on from a checkpoint, its healthy events do what their texts say, and its runs are planned apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from proving import families, loop, plan, split, tiny
from proving.case import Case
from proving.families import build
from proving.faults import FAULTS, generators
from proving.loop import Seams, load, saved, train_step
from proving.training import SEVERITIES, Change, Training
from proving.traps import TRAPS

UNSEEN = sorted(name for name, cls in FAULTS.items() if cls.generator in split.UNSEEN_GENERATORS)
FROM_THE_START = ("batch-ramped", "unfrozen-late")
"""Healthy events whose training is another one before the step too."""


def _built(family: str, seed: int = 1) -> Training:
    if absent := families.missing(family):
        pytest.skip(f"{family} needs {', '.join(absent)}")
    torch.manual_seed(seed)
    return build(family, seed)


def _steps(t: Training, first: int, last: int, change: Change | None = None) -> list[float]:
    seams = Seams(Change() if change is None else change)
    return [train_step(t, t.model, step, seams, None)[0] for step in range(first, last)]


class TestFamilies:
    @pytest.mark.parametrize("family", split.UNSEEN_FAMILIES)
    def test_the_loss_falls(self, family: str) -> None:
        loss = _steps(_built(family), 0, 20)
        assert np.mean(loss[-3:]) < 0.9 * np.mean(loss[:2])
        assert all(math.isfinite(v) for v in loss)

    @pytest.mark.parametrize("family", split.UNSEEN_FAMILIES)
    def test_a_checkpoint_goes_on_where_it_was(self, family: str) -> None:
        straight = _steps(_built(family), 0, 4)
        t = _built(family)
        first = _steps(t, 0, 2)
        again = _built(family)
        assert load(again, saved(t, None, 2)) == 2
        assert first + _steps(again, 2, 4) == straight

    @pytest.mark.parametrize("family", split.UNSEEN_FAMILIES)
    def test_every_role_is_of_modules_that_exist(self, family: str) -> None:
        t = _built(family)
        roles = {name: of for name, of in t.notes.items() if isinstance(of, list)}
        assert {"blocks", "linears", "embedding", "head", "mlp.up", "mlp.down", "norm", "attention"} <= set(roles)
        assert {name for of in roles.values() for name in of} <= set(dict(t.model.named_modules()))

    def test_a_recording_is_as_long_as_its_letters_and_silent_behind_them(self) -> None:
        batch = _built("speech").batch(0)
        behind = torch.arange(batch["frames"].shape[1]) >= batch["lengths"][:, None]
        assert float(batch["frames"][behind].abs().max()) == 0
        assert (batch["labels"] > 0).all()
        assert (batch["labels"][:, 1:] != batch["labels"][:, :-1]).all()
        assert (batch["lengths"] // 2 >= batch["labels"].shape[1]).all()

    def test_a_push_moves_a_body(self) -> None:
        batch = _built("world").batch(0)
        rows, times, _ = batch["frames"].shape
        assert batch["actions"].shape == (rows, times, 2)
        assert float((batch["frames"][:, 1:] - batch["frames"][:, :-1]).square().sum(-1).mean()) > 1


class TestSplit:
    def test_unseen_is_an_unseen_change_in_a_family_that_chose_nothing(self) -> None:
        assert {split.split_of(f, "epilogues") for f in ("gemma", "bert", "ssm")} == {"unseen"}
        assert {split.split_of(f, trap="batch-ramped") for f in ("world", "muon", "vit")} == {"unseen"}
        assert split.split_of("speech") == "unseen"
        assert split.split_of("llama", "epilogues") == split.split_of("llama", trap="batch-ramped") == "crossed"
        assert split.split_of("gemma", "stores") == split.split_of("gemma", "codes") == "crossed"
        assert split.split_of("gemma", trap="packing-begins") == "crossed"
        assert split.split_of("bert", "stores") == split.split_of("ssm", "stores") == "fresh"

    def test_the_lists_name_what_there_is_and_nothing_else(self) -> None:
        assert set(split.UNSEEN_GENERATORS) <= set(generators())
        assert set(split.UNSEEN_TRAPS) <= set(TRAPS)
        assert set(split.UNSEEN_FAMILIES) <= set(families.families())
        assert len(UNSEEN) >= 16
        older = split.DEV_FAMILIES + split.HELD_OUT_FAMILIES + split.FRESH_FAMILIES
        assert not set(split.UNSEEN_FAMILIES) & set(older)

    def test_a_twin_that_shares_unseen_preparations_is_unseen(self) -> None:
        case = Case("bert", "amax-after-the-cast", "fault", "medium", 1)
        assert plan.case_split(case.twin) == "unseen"
        assert plan.case_split(Case("bert", "healthy", "twin", "", 1)) == "fresh"

    def test_unseen_runs_are_planned_beside_the_older_ones_and_change_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probes = {name: _built(name) for name in ("llama", "resume", "muon", "speech", "world")}
        monkeypatch.setattr(plan, "DEV_FAMILIES", ("llama",))
        monkeypatch.setattr(plan, "HELD_OUT_FAMILIES", ("resume",))
        monkeypatch.setattr(plan, "FRESH_FAMILIES", ("muon",))
        monkeypatch.setattr(plan, "UNSEEN_FAMILIES", ())
        monkeypatch.setattr(plan, "SEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "SEALED_PER_FAULT", (0, 0))
        monkeypatch.setattr(plan, "VEILED_FAMILIES", ())
        monkeypatch.setattr(plan, "VEILED_BESIDE", ())
        monkeypatch.setattr(plan, "CONCEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "CONCEALED_BESIDE", ())
        without = plan.cases(lambda family, seed: probes[family])
        monkeypatch.setattr(plan, "UNSEEN_FAMILIES", ("speech", "world"))
        cases = plan.cases(lambda family, seed: probes[family])
        unseen = [c for c in cases if plan.newer(c.change) == "unseen"]
        assert [c for c in cases if c not in unseen] == [c for c in without if plan.newer(c.change) != "unseen"]
        assert {plan.case_split(c) for c in unseen} == {"unseen"}
        assert {c.severity for c in unseen if c.kind == "fault"} == set(SEVERITIES)
        assert {c.family for c in unseen} == {"speech", "world", "resume", "muon"}
        per_fault = {name: [c for c in unseen if c.change == name] for name in (*UNSEEN, *split.UNSEEN_TRAPS)}
        most = sum(plan.UNSEEN_PER_FAULT)
        assert all(len(of) <= most and len({c.id for c in of}) == len(of) for of in per_fault.values())
        assert len(per_fault["average-left-in-place"]) == most


class TestHealthyEvents:
    @pytest.mark.parametrize("name", split.UNSEEN_TRAPS)
    def test_nothing_is_changed_before_and_something_after(self, name: str) -> None:
        def trained(change: Change | None) -> list[tuple[float, float]]:
            torch.manual_seed(0)
            t = tiny.language()
            change = Change() if change is None else change
            change.started(t)
            change.before_attach(t)
            seams = Seams(change)
            try:
                return [loop.train_step(t, t.model, step, seams, None) for step in range(8)]
            finally:
                change.undo()

        trap = TRAPS[name].draw(np.random.default_rng(1), tiny.language())
        assert trap is not None
        got, usual = trained(trap), trained(None)
        if name not in FROM_THE_START:
            assert got[: trap.step] == usual[: trap.step]
        assert got[trap.step :] != usual[trap.step :]
        assert all(math.isfinite(loss) for loss, _ in got)

    def test_a_cooldown_ends_at_nothing(self) -> None:
        t = tiny.language()
        trap = TRAPS["cooldown-to-zero"].draw(np.random.default_rng(0), t)
        assert trap is not None
        usual = t.schedule
        trap.before_attach(t)
        assert usual is not None
        assert t.schedule is not None
        rates = [t.schedule(step) for step in range(trap.step + 60)]
        assert rates[: trap.step] == [usual(step) for step in range(trap.step)]
        assert 0 < rates[trap.step] < usual(trap.step)
        assert rates[-1] == 0

    def test_batches_double_twice(self) -> None:
        t = tiny.language()
        trap = TRAPS["batch-ramped"].draw(np.random.default_rng(0), t)
        assert trap is not None
        trap.first, trap.step = 3, 6  # type: ignore[attr-defined]
        rows = [len(trap.on_batch(t, step, {"x": torch.zeros(16)})["x"]) for step in range(8)]
        assert rows == [4, 4, 4, 8, 8, 8, 16, 16]

    def test_what_is_let_go_was_frozen_and_is_trained(self) -> None:
        t = tiny.language()
        trap = TRAPS["unfrozen-late"].draw(np.random.default_rng(0), t)
        assert trap is not None
        weight = t.model.get_submodule("layers.0.attention.wq").weight
        first = weight.detach().clone()
        trap.started(t)
        _steps(t, 0, trap.step, trap)
        assert torch.equal(weight, first)
        _steps(t, trap.step, trap.step + 1, trap)
        assert not torch.equal(weight, first)

    def test_little_is_scored_and_never_nothing(self) -> None:
        t = tiny.language()
        trap = TRAPS["little-scored"].draw(np.random.default_rng(0), t)
        assert trap is not None
        trap.chance = 1.0  # type: ignore[attr-defined]
        for step in range(trap.step, trap.step + 20):
            before, after = (b["labels"] != -100 for b in (t.batch(step), trap.on_batch(t, step, t.batch(step))))
            assert 0 < int(after.sum()) < 0.5 * int(before.sum())
            assert not (after & ~before).any()
