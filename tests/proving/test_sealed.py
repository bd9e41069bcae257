"""The sealed set: its families train and go on from a checkpoint, its healthy events do what their texts say, and its runs are planned apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from proving import families, plan, split, tiny
from proving.case import Case
from proving.families import build
from proving.faults import FAULTS, generators
from proving.loop import Seams, load, saved, train_step
from proving.training import SEVERITIES, Change, Training
from proving.traps import TRAPS

SEALED = sorted(name for name, cls in FAULTS.items() if cls.generator in split.SEALED_GENERATORS)
STEPS = {"ranker": 60}
"""In which the loss has fallen, where 24 do not do."""


def _built(family: str, seed: int = 1) -> Training:
    if absent := families.missing(family):
        pytest.skip(f"{family} needs {', '.join(absent)}")
    torch.manual_seed(seed)
    return build(family, seed)


def _steps(t: Training, first: int, last: int, change: Change | None = None) -> list[tuple[float, float]]:
    seams = Seams(Change() if change is None else change)
    return [train_step(t, t.model, step, seams, None) for step in range(first, last)]


def _trap(name: str, seed: int = 0) -> tuple[Training, Any]:
    torch.manual_seed(0)
    t = tiny.language()
    trap = TRAPS[name].draw(np.random.default_rng(seed), t)
    assert trap is not None
    return t, trap


class TestFamilies:
    @pytest.mark.parametrize("family", split.SEALED_FAMILIES)
    def test_the_loss_falls(self, family: str) -> None:
        loss = [loss for loss, _ in _steps(_built(family), 0, STEPS.get(family, 24))]
        assert np.mean(loss[-8:]) < 0.9 * np.mean(loss[:2])
        assert all(math.isfinite(v) for v in loss)

    @pytest.mark.parametrize("family", split.SEALED_FAMILIES)
    def test_a_checkpoint_goes_on_where_it_was(self, family: str) -> None:
        straight = _steps(_built(family), 0, 4)
        t = _built(family)
        first = _steps(t, 0, 2)
        again = _built(family)
        assert load(again, saved(t, None, 2)) == 2
        assert first + _steps(again, 2, 4) == straight

    @pytest.mark.parametrize("family", split.SEALED_FAMILIES)
    def test_every_role_is_of_modules_that_exist(self, family: str) -> None:
        t = _built(family)
        roles = {name: of for name, of in t.notes.items() if isinstance(of, list)}
        attention = set() if family == "ranker" else {"attention", "attention.q", "attention.k", "attention.v"}
        assert {"blocks", "linears", "embedding", "head", "mlp.up", "mlp.down", "norm"} | attention <= set(roles)
        assert {name for of in roles.values() for name in of} <= set(dict(t.model.named_modules()))

    @pytest.mark.parametrize("family", split.SEALED_FAMILIES)
    def test_a_batch_is_the_same_each_time_and_another_for_another_number_or_seed(self, family: str) -> None:
        t, other = _built(family), _built(family, 2)
        for name, value in t.batch(3).items():
            assert torch.equal(value, t.batch(3)[name])
            assert not torch.equal(value, t.batch(4)[name])
            assert not torch.equal(value, other.batch(3)[name])

    def test_the_reference_stays_and_the_better_text_is_preferred(self) -> None:
        t = _built("preference")
        preference: Any = t.loss
        before = [p.clone() for p in preference.reference.parameters()]
        _steps(t, 0, 24)
        assert all(torch.equal(p, was) for p, was in zip(preference.reference.parameters(), before, strict=True))
        assert t.log is not None
        assert t.log(t, 24)["accuracy"] > 0.5
        assert t.log(t, 24)["margin"] > 0

    def test_pairs_have_one_prompt_and_differ_behind_it(self) -> None:
        batch = _built("preference").batch(0)
        differs = batch["chosen"] != batch["rejected"]
        assert not differs[:, :12].any()
        assert 0.1 < float(differs[:, 12:].float().mean()) < 0.7

    def test_few_rows_of_a_table_make_up_most_of_what_is_clicked_on(self) -> None:
        batch = _built("ranker").batch(0)
        assert float((batch["rows"] < 32).float().mean()) > 0.4
        assert int(batch["rows"].max()) > 1000
        assert 0.05 < float(batch["clicks"].mean()) < 0.7

    def test_a_set_has_no_order(self) -> None:
        t = _built("perceiver")
        batch = t.batch(0)
        shuffled = batch["points"][:, torch.randperm(batch["points"].shape[1])]
        got, right = (t.model(points, batch["places"]) for points in (shuffled, batch["points"]))
        assert torch.allclose(got, right, atol=1e-5)


class TestSplit:
    def test_sealed_is_a_sealed_change_in_a_family_that_chose_nothing(self) -> None:
        assert {split.split_of(f, "gathers") for f in ("ranker", "gemma", "bert", "ssm")} == {"sealed"}
        assert {split.split_of(f, trap="short-last-batch") for f in ("perceiver", "world", "muon")} == {"sealed"}
        assert split.split_of("preference") == "sealed"
        assert split.split_of("llama", "gathers") == split.split_of("llama", trap="short-last-batch") == "crossed"
        assert {split.split_of("ranker", g) for g in ("epilogues", "stores", "codes", "scales")} == {"crossed"}
        assert split.split_of("ranker", trap="batch-ramped") == "crossed"
        assert split.split_of("gemma", "epilogues") == split.split_of("ssm", "epilogues") == "unseen"

    def test_the_lists_name_what_there_is_and_nothing_else(self) -> None:
        assert set(split.SEALED_GENERATORS) <= set(generators())
        assert set(split.SEALED_TRAPS) <= set(TRAPS)
        assert set(split.SEALED_FAMILIES) <= set(families.families())
        assert len(SEALED) == 18
        older = split.DEV_FAMILIES + split.HELD_OUT_FAMILIES + split.FRESH_FAMILIES + split.UNSEEN_FAMILIES
        assert not set(split.SEALED_FAMILIES) & set(older)

    def test_a_twin_that_shares_sealed_preparations_is_sealed(self) -> None:
        case = Case("bert", "history-slot-shared", "fault", "medium", 1)
        assert plan.case_split(case.twin) == "sealed"
        assert plan.case_split(Case("bert", "healthy", "twin", "", 1)) == "fresh"

    def test_sealed_runs_are_planned_beside_the_older_ones_and_change_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probes = {name: _built(name) for name in ("resume", "muon", "speech", "perceiver", "ranker")}
        monkeypatch.setattr(plan, "DEV_FAMILIES", ())
        monkeypatch.setattr(plan, "HELD_OUT_FAMILIES", ("resume",))
        monkeypatch.setattr(plan, "FRESH_FAMILIES", ("muon",))
        monkeypatch.setattr(plan, "UNSEEN_FAMILIES", ("speech",))
        monkeypatch.setattr(plan, "SEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "VEILED_FAMILIES", ())
        monkeypatch.setattr(plan, "VEILED_BESIDE", ())
        monkeypatch.setattr(plan, "CONCEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "CONCEALED_BESIDE", ())
        without = plan.cases(lambda family, seed: probes[family])
        monkeypatch.setattr(plan, "SEALED_FAMILIES", ("perceiver", "ranker"))
        cases = plan.cases(lambda family, seed: probes[family])
        sealed = [c for c in cases if plan.newer(c.change) == "sealed"]
        assert [c for c in cases if c not in sealed] == [c for c in without if plan.newer(c.change) != "sealed"]
        assert {plan.case_split(c) for c in sealed} == {"sealed"}
        assert {c.severity for c in sealed if c.kind == "fault"} == set(SEVERITIES)
        assert {c.family for c in sealed} == {"perceiver", "ranker", "speech", "resume", "muon"}
        per_change = {name: [c for c in sealed if c.change == name] for name in (*SEALED, *split.SEALED_TRAPS)}
        assert all(len({c.id for c in of}) == len(of) <= sum(plan.SEALED_PER_FAULT) for of in per_change.values())
        assert len(per_change["tile-of-bad-core"]) == sum(plan.SEALED_PER_FAULT)
        assert len(per_change["short-last-batch"]) == sum(plan.SEALED_PER_TRAP)


class TestHealthyEvents:
    @pytest.mark.parametrize("name", split.SEALED_TRAPS)
    def test_nothing_is_changed_before_and_something_after_and_it_is_harmless(self, name: str) -> None:
        def trained(change: Change | None) -> list[tuple[float, float]]:
            torch.manual_seed(0)
            t = tiny.language()
            try:
                return _steps(t, 0, 12, change)
            finally:
                if change is not None:
                    change.undo()

        _, trap = _trap(name, 1)
        got, usual = trained(trap), trained(None)
        assert got[: trap.step] == usual[: trap.step]
        assert got[trap.step :] != usual[trap.step :]
        assert all(math.isfinite(loss) for loss, _ in got)
        assert np.mean([loss for loss, _ in got[-3:]]) < 1.15 * np.mean([loss for loss, _ in usual[-3:]])

    def test_a_penalty_is_a_small_part_of_the_loss_and_pulls_at_every_matrix(self) -> None:
        t, trap = _trap("penalty-in-the-loss")
        loss = t.loss(t.model, t.batch(0))
        got = trap.on_loss(t, trap.step, loss)
        assert float(got.detach()) == pytest.approx((1 + trap.share) * float(loss.detach()), rel=1e-3)
        (got - loss).backward()
        matrices = [p for p in t.model.parameters() if p.ndim >= 2]
        assert all(p.grad is not None and torch.allclose(p.grad, 2 * trap.weight * p, atol=1e-8) for p in matrices)

    def test_more_and_more_of_the_smallest_weights_are_zero_and_stay_so(self) -> None:
        t, trap = _trap("pruned-gradually")
        trap.every, shares = 1, []
        weight: Any = t.model.get_submodule("layers.0.attention.wq").weight
        for step in range(trap.step, trap.step + 12):
            trap.after_update(t, step)
            shares.append(float((weight == 0).float().mean()))
        assert shares == sorted(shares)
        assert shares[0] > 0.1
        assert shares[-1] == pytest.approx(trap.most, abs=0.01)
        with torch.no_grad():
            weight.add_(1.0)
        trap.after_update(t, trap.step + 12)
        assert float((weight == 0).float().mean()) == pytest.approx(trap.most, abs=0.01)

    def test_rows_that_were_seen_least_begin_anew_and_those_that_were_never_seen_stay(self) -> None:
        t, trap = _trap("rows-given-to-others")
        trap.share = 0.5
        table: Any = t.model.get_submodule("tok_embeddings").weight
        table.grad = torch.zeros_like(table)
        for step, row in ((trap.step - 2, 3), (trap.step - 1, 5), (trap.step, 5)):
            table.grad.zero_()[row] = 1.0
            was = table.detach().clone()
            trap.after_update(t, step)
            assert (table != was).any(1).nonzero().flatten().tolist() == ([3] if step == trap.step else [])

    def test_the_decay_of_the_moments_is_another_from_the_step_on(self) -> None:
        t, trap = _trap("moments-decay-otherwise")
        usual = t.optimizer.param_groups[0]["betas"]
        for step in range(trap.step + 2):
            trap.before_step(t, step)
            assert {g["betas"] for g in t.optimizer.param_groups} == {trap.betas if step >= trap.step else usual}

    def test_an_epoch_ends_with_a_few_rows(self) -> None:
        t, trap = _trap("short-last-batch")
        rows = [len(trap.on_batch(t, step, t.batch(0))["labels"]) for step in range(trap.step + 2 * trap.every + 1)]
        assert [step for step, n in enumerate(rows) if n != 4] == [trap.step + i * trap.every for i in range(3)]
        assert rows[trap.step] == trap.rows < 4
