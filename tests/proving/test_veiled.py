"""The veiled set: its families train and go on from a checkpoint, its healthy events do what their texts say, and its runs are planned apart."""

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

VEILED = sorted(name for name, cls in FAULTS.items() if cls.generator in split.VEILED_GENERATORS)


def _built(family: str, seed: int = 1) -> Training:
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
    @pytest.mark.parametrize("family", split.VEILED_FAMILIES)
    def test_the_loss_falls(self, family: str) -> None:
        loss = [loss for loss, _ in _steps(_built(family), 0, 32)]
        assert np.mean(loss[-8:]) < 0.7 * np.mean(loss[:2])
        assert all(math.isfinite(v) for v in loss)

    @pytest.mark.parametrize("family", split.VEILED_FAMILIES)
    def test_a_checkpoint_goes_on_where_it_was(self, family: str) -> None:
        straight = _steps(_built(family), 0, 4)
        t = _built(family)
        first = _steps(t, 0, 2)
        again = _built(family)
        assert load(again, saved(t, None, 2)) == 2
        assert first + _steps(again, 2, 4) == straight

    @pytest.mark.parametrize("family", split.VEILED_FAMILIES)
    def test_every_role_is_of_modules_that_exist(self, family: str) -> None:
        t = _built(family)
        roles = {name: of for name, of in t.notes.items() if isinstance(of, list)}
        own = {"attention", "attention.qkv", "attention.out"} if family == "codec" else {"head"}
        assert {"blocks", "linears", "embedding", "mlp.up", "mlp.down", "norm"} | own <= set(roles)
        assert {name for of in roles.values() for name in of} <= set(dict(t.model.named_modules()))
        assert len(roles["linears"]) >= 5

    @pytest.mark.parametrize("family", split.VEILED_FAMILIES)
    def test_a_batch_is_the_same_each_time_and_another_for_another_number_or_seed(self, family: str) -> None:
        t, other = _built(family), _built(family, 2)
        for name, value in t.batch(3).items():
            assert torch.equal(value, t.batch(3)[name])
            assert not torch.equal(value, t.batch(4)[name])
            assert not torch.equal(value, other.batch(3)[name])

    def test_an_energy_is_that_of_the_molecule_however_it_is_turned_and_numbered(self) -> None:
        t = _built("graph")
        batch = t.batch(0)
        turn, _ = torch.linalg.qr(torch.randn(3, 3))
        order = torch.randperm(batch["kinds"].shape[1])
        right = t.model(batch["kinds"], batch["places"])
        got = t.model(batch["kinds"][:, order], (batch["places"] @ turn + 1.0)[:, order])
        assert torch.allclose(got, right, atol=1e-3)

    def test_energies_are_about_nothing_and_of_size_one(self) -> None:
        t = _built("graph")
        energies = torch.cat([t.batch(number)["energies"] for number in range(20)])
        assert abs(float(energies.mean())) < 0.3
        assert 0.7 < float(energies.std()) < 1.4

    def test_what_is_heard_again_goes_through_few_codes_and_gradients_past_them(self) -> None:
        t = _built("codec")
        books: Any = t.model.get_submodule("codebooks")
        z = torch.randn(2, 3, 16, requires_grad=True)
        codes, ties, in_use = books(z)
        left = z.detach().clone()
        for vectors in books.vectors.detach():
            left -= vectors[(left[..., None, :] - vectors).square().sum(-1).argmin(-1)]
        assert torch.allclose(codes.detach(), z.detach() - left, atol=1e-5)
        codes.sum().backward()
        assert z.grad is not None
        assert torch.equal(z.grad, torch.ones_like(z))
        assert 0 < in_use <= 6 / 64
        assert float(ties.detach()) > 0

    def test_the_plots_say_how_well_it_is_heard_and_how_many_codes_are_in_use(self) -> None:
        t = _built("codec")
        _steps(t, 0, 2)
        assert t.log is not None
        plots = t.log(t, 1)
        assert set(plots) == {"reconstruction", "codes_in_use"}
        assert 0 < plots["codes_in_use"] <= 1


class TestSplit:
    def test_veiled_is_a_veiled_change_in_a_family_that_chose_nothing(self) -> None:
        assert {split.split_of(f, "packing") for f in ("graph", "ranker", "gemma", "bert", "ssm")} == {"veiled"}
        assert {split.split_of(f, trap="sharpness-sought") for f in ("codec", "ranker", "muon")} == {"veiled"}
        assert split.split_of("graph") == "veiled"
        assert split.split_of("llama", "packing") == split.split_of("llama", trap="sharpness-sought") == "crossed"
        assert {split.split_of("graph", g) for g in ("gathers", "epilogues", "stores", "codes")} == {"crossed"}
        assert split.split_of("codec", trap="short-last-batch") == "crossed"
        assert split.split_of("ranker", "gathers") == split.split_of("ssm", "gathers") == "sealed"

    def test_the_lists_name_what_there_is_and_nothing_else(self) -> None:
        assert set(split.VEILED_GENERATORS) <= set(generators())
        assert set(split.VEILED_TRAPS) <= set(TRAPS)
        assert set(split.VEILED_FAMILIES) <= set(families.families())
        assert len(VEILED) == 10
        older = split.DEV_FAMILIES + split.HELD_OUT_FAMILIES + split.FRESH_FAMILIES + split.UNSEEN_FAMILIES
        assert not set(split.VEILED_FAMILIES) & {*older, *split.SEALED_FAMILIES}
        assert not set(plan.VEILED_BESIDE) & {*split.DEV_FAMILIES, *split.VEILED_FAMILIES}

    def test_veiled_runs_are_planned_beside_the_older_ones_and_change_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probes = {name: _built(name) for name in ("resume", "muon", "speech", "perceiver", "graph", "codec")}
        monkeypatch.setattr(plan, "DEV_FAMILIES", ())
        monkeypatch.setattr(plan, "HELD_OUT_FAMILIES", ("resume",))
        monkeypatch.setattr(plan, "FRESH_FAMILIES", ("muon",))
        monkeypatch.setattr(plan, "UNSEEN_FAMILIES", ("speech",))
        monkeypatch.setattr(plan, "SEALED_FAMILIES", ("perceiver",))
        monkeypatch.setattr(plan, "VEILED_FAMILIES", ())
        monkeypatch.setattr(plan, "VEILED_BESIDE", ())
        monkeypatch.setattr(plan, "CONCEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "CONCEALED_BESIDE", ())
        without = plan.cases(lambda family, seed: probes[family])
        monkeypatch.setattr(plan, "VEILED_FAMILIES", ("codec", "graph"))
        monkeypatch.setattr(plan, "VEILED_BESIDE", ("perceiver", "speech"))
        cases = plan.cases(lambda family, seed: probes[family])
        veiled = [c for c in cases if plan.newer(c.change) == "veiled"]
        assert not any(plan.newer(c.change) == "veiled" for c in without)
        assert [c for c in cases if c not in veiled] == without
        assert {plan.case_split(c) for c in veiled} == {"veiled"}
        assert {c.severity for c in veiled if c.kind == "fault"} == set(SEVERITIES)
        assert {c.family for c in veiled} == {"codec", "graph", "perceiver", "speech"}
        per_change = {name: [c for c in veiled if c.change == name] for name in (*VEILED, *split.VEILED_TRAPS)}
        assert all(len({c.id for c in of}) == len(of) <= sum(plan.VEILED_PER_FAULT) for of in per_change.values())
        assert all(per_change[name] for name in VEILED)
        assert {len(per_change[name]) for name in split.VEILED_TRAPS} == {sum(plan.VEILED_PER_TRAP)}

    def test_a_healthy_run_beside_a_veiled_one_is_of_its_familys_half(self) -> None:
        assert plan.case_split(Case("codec", "healthy", "twin", "", 1)) == "veiled"
        assert plan.case_split(Case("gemma", "healthy", "twin", "", 1)) == "unseen"


class TestHealthyEvents:
    @pytest.mark.parametrize("name", split.VEILED_TRAPS)
    def test_nothing_is_changed_before_and_something_after_and_it_is_harmless(self, name: str) -> None:
        def trained(change: Change | None) -> list[tuple[float, float]]:
            torch.manual_seed(0)
            t = tiny.language()
            try:
                return _steps(t, 0, 16, change)
            finally:
                if change is not None:
                    change.undo()

        _, trap = _trap(name, 1)
        got, usual = trained(trap), trained(None)
        assert got[: trap.step] == usual[: trap.step]
        assert got[trap.step :] != usual[trap.step :]
        assert all(math.isfinite(loss) for loss, _ in got)
        assert np.mean([loss for loss, _ in got[-3:]]) < 1.15 * np.mean([loss for loss, _ in usual[-3:]])

    def test_moments_are_gone_once_and_the_rate_comes_back_from_nothing(self) -> None:
        for own_rate in (True, False):
            t, trap = _trap("moments-begun-anew")
            if not own_rate:
                t.schedule = None
            rates, counts, usual = [], [], t.optimizer.param_groups[0]["lr"]
            for step in range(trap.step + trap.length + 3):
                _steps(t, step, step + 1, trap)
                rates.append(t.optimizer.param_groups[0]["lr"] / (t.schedule(step) if t.schedule else usual))
                counts.append(int(next(iter(t.optimizer.state.values()))["step"]))
            assert counts == [*range(1, trap.step + 1), *range(1, trap.length + 4)]
            assert rates[: trap.step] == [1.0] * trap.step
            assert rates[trap.step] == pytest.approx(1 / (trap.length + 1))
            assert rates[trap.step :] == sorted(rates[trap.step :])
            assert rates[-3:] == pytest.approx([1.0] * 3)

    def test_a_block_that_is_skipped_gives_what_it_was_given_and_has_no_gradient(self) -> None:
        t, trap = _trap("layers-skipped-at-random")
        trap.share, skipped = 0.5, 0
        for step in range(trap.step, trap.step + 20):
            trap.before_step(t, step)
            t.model.zero_grad()
            t.loss(t.model, t.batch(step)).backward()
            none = [all(p.grad is None for p in t.model.get_submodule(n).parameters()) for n in trap.blocks]
            some = [any(p.grad is None for p in t.model.get_submodule(n).parameters()) for n in trap.blocks]
            assert none == some
            skipped += sum(none)
        assert 8 <= skipped <= 32
        trap.undo()
        assert all("forward" not in t.model.get_submodule(n).__dict__ for n in trap.blocks)

    def test_weights_are_moved_by_the_radius_for_the_gradient_and_put_back_for_the_update(self) -> None:
        t, trap = _trap("sharpness-sought")
        _steps(t, 0, trap.step, trap)
        was = [p.detach().clone() for p in t.model.parameters()]
        trap.before_step(t, trap.step)
        moved = torch.stack([(p.detach() - w).norm() for p, w in zip(t.model.parameters(), was, strict=True)]).norm()
        assert float(moved) == pytest.approx(trap.radius, rel=1e-2)
        trap.after_backward(t, trap.step)
        trap.before_update(t, trap.step)
        assert all(torch.equal(p, w) for p, w in zip(t.model.parameters(), was, strict=True))
