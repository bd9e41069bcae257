"""The concealed set: its families train and go on from a checkpoint, its healthy events do what their texts say, and its runs are planned apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from proving import families, plan, split, tiny
from proving.case import Case
from proving.families import build
from proving.families.optimizers import Lion
from proving.faults import FAULTS, generators
from proving.loop import Seams, load, saved, train_step
from proving.training import SEVERITIES, Change, Training
from proving.traps import TRAPS

CONCEALED = sorted(name for name, cls in FAULTS.items() if cls.generator in split.CONCEALED_GENERATORS)
PLACES = {"samples-mixed": "images"}
"""Of `tiny.KINDS`, where an event has no place in a language model."""

needs = {
    name: pytest.mark.skipif(bool(families.missing(name)), reason=f"needs {families.missing(name)}")
    for name in split.CONCEALED_FAMILIES
}
EACH = [pytest.param(name, marks=needs[name]) for name in split.CONCEALED_FAMILIES]


def _built(family: str, seed: int = 1) -> Training:
    torch.manual_seed(seed)
    return build(family, seed)


def _steps(t: Training, first: int, last: int, change: Change | None = None) -> list[tuple[float, float]]:
    seams = Seams(Change() if change is None else change)
    return [train_step(t, t.model, step, seams, None) for step in range(first, last)]


def _trap(name: str, seed: int = 0) -> tuple[Training, Any]:
    torch.manual_seed(0)
    t = tiny.KINDS[PLACES.get(name, "language")]()
    trap = TRAPS[name].draw(np.random.default_rng(seed), t)
    assert trap is not None
    return t, trap


class TestFamilies:
    @pytest.mark.parametrize("family", EACH)
    def test_the_loss_falls(self, family: str) -> None:
        loss = [loss for loss, _ in _steps(_built(family), 0, 48)]
        floor = -2.0 if family == "flow" else 0.0  # a likelihood of densities has none; this one is never passed
        assert np.mean(loss[-8:]) - floor < 0.75 * (np.mean(loss[:2]) - floor)
        assert all(math.isfinite(v) for v in loss)

    @pytest.mark.parametrize("family", EACH)
    def test_a_checkpoint_goes_on_where_it_was(self, family: str) -> None:
        straight = _steps(_built(family), 0, 4)
        t = _built(family)
        first = _steps(t, 0, 2)
        again = _built(family)
        assert load(again, saved(t, None, 2)) == 2
        assert first + _steps(again, 2, 4) == straight

    @pytest.mark.parametrize("family", EACH)
    def test_every_role_is_of_modules_that_exist(self, family: str) -> None:
        t = _built(family)
        roles = {name: of for name, of in t.notes.items() if isinstance(of, list)}
        own = set() if family == "flow" else {"attention", "attention.out", "norm", "embedding"}
        assert {"blocks", "linears", "mlp.up", "mlp.down"} | own <= set(roles)
        assert {name for of in roles.values() for name in of} <= set(dict(t.model.named_modules()))
        assert len(roles["linears"]) >= 8

    @pytest.mark.parametrize("family", EACH)
    def test_a_batch_is_the_same_each_time_and_another_for_another_number_or_seed(self, family: str) -> None:
        t, other = _built(family), _built(family, 2)
        for name, value in t.batch(3).items():
            assert torch.equal(value, t.batch(3)[name])
            for further in (t.batch(4)[name], other.batch(3)[name]):
                assert value.shape != further.shape or not torch.equal(value, further)

    @needs["distil"]
    def test_a_teacher_is_frozen_and_knows_more_than_a_student_that_begins(self) -> None:
        t = _built("distil")
        taught = t.notes["distillation"]
        was = [p.clone() for p in taught.teacher.parameters()]
        _steps(t, 0, 2)
        assert all(torch.equal(p, w) for p, w in zip(taught.teacher.parameters(), was, strict=True))
        assert not {id(p) for p in taught.teacher.parameters()} & {id(p) for p in t.model.parameters()}
        batch = t.batch(0)
        said = taught.taught(batch["input_ids"])
        assert torch.allclose(said.exp().sum(-1), torch.ones(batch["input_ids"].shape), atol=1e-4)
        assert float(-said.gather(-1, batch["labels"][..., None]).mean()) < 0.8 * math.log(256)
        assert t.log is not None
        assert set(t.log(t, 1)) == {"teacher_kl", "agreement"}

    def test_a_density_is_that_of_the_normal_one_and_of_the_room_that_is_taken(self) -> None:
        model: Any = _built("flow").model.double()
        for coupling in model.couplings:
            torch.nn.init.normal_(coupling.down.weight, std=0.05)
            torch.nn.init.normal_(coupling.gain, std=0.1)
        x = torch.randn(64, dtype=torch.float64)

        def z(x: torch.Tensor) -> torch.Tensor:
            out = x[None]
            for coupling in model.couplings:
                out, _ = coupling(out)
            return out[0]

        room = torch.linalg.slogdet(torch.autograd.functional.jacobian(z, x)).logabsdet
        right = room - 0.5 * (z(x).square() + math.log(2 * math.pi)).sum()
        assert torch.allclose(model(x[None])[0], right, atol=1e-4)

    @needs["series"]
    def test_rows_of_series_go_on_in_the_future(self) -> None:
        batch = _built("series").batch(0)
        step = (batch["future"][:, 0] - batch["frames"][:, -1]).abs().mean()
        assert float(step) < 0.5 * float(batch["frames"].std())

    @needs["swin"]
    def test_rates_fall_from_the_head_to_the_first_layers(self) -> None:
        t = _built("swin")
        scales = {id(p): group["lr_scale"] for group in t.optimizer.param_groups for p in group["params"]}
        of = {name: scales[id(p)] for name, p in t.model.named_parameters()}
        first, second = (of[f"swin.encoder.layers.{i}.blocks.0.mlp.fc1.weight"] for i in (0, 1))
        assert of["swin.embeddings.norm.weight"] < first < second < of["classifier.weight"] == 1.0

    def test_lion_takes_signs_alone(self) -> None:
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = Lion([p], lr=0.1)
        for gradient in ([1.0, -2.0, 0.0], [-0.1, 3.0, 0.0]):
            p.grad = torch.tensor(gradient)
            optimizer.step()
        # the second step is towards 0.9 of what is kept, (0.02, −0.04, 0), and 0.1 of the gradient
        assert torch.allclose(p.detach(), torch.tensor([-0.2, 0.0, 0.0]), atol=1e-6)


class TestSplit:
    def test_concealed_is_a_concealed_change_in_a_family_that_chose_nothing(self) -> None:
        assert {split.split_of(f, "edges") for f in ("flow", "graph", "ranker", "gemma", "bert", "ssm")} == {
            "concealed"
        }
        assert {split.split_of(f, trap="samples-mixed") for f in ("swin", "codec", "muon")} == {"concealed"}
        assert split.split_of("flow") == "concealed"
        assert split.split_of("llama", "edges") == split.split_of("llama", trap="samples-mixed") == "crossed"
        assert {split.split_of("flow", g) for g in ("packing", "gathers", "epilogues", "stores", "codes")} == {
            "crossed"
        }
        assert split.split_of("series", trap="sharpness-sought") == "crossed"
        assert split.split_of("graph", "packing") == split.split_of("ssm", "packing") == "veiled"

    def test_the_lists_name_what_there_is_and_nothing_else(self) -> None:
        assert set(split.CONCEALED_GENERATORS) <= set(generators())
        assert set(split.CONCEALED_TRAPS) <= set(TRAPS)
        assert set(split.CONCEALED_FAMILIES) <= set(families.families())
        assert len(CONCEALED) == 12
        older = split.DEV_FAMILIES + split.HELD_OUT_FAMILIES + split.FRESH_FAMILIES + split.UNSEEN_FAMILIES
        assert not set(split.CONCEALED_FAMILIES) & {*older, *split.SEALED_FAMILIES, *split.VEILED_FAMILIES}
        assert not set(plan.CONCEALED_BESIDE) & {*split.DEV_FAMILIES, *split.CONCEALED_FAMILIES}

    @needs["distil"]
    @needs["swin"]
    def test_concealed_runs_are_planned_beside_the_older_ones_and_change_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = split.CONCEALED_FAMILIES
        probes = {name: _built(name) for name in ("resume", "muon", "speech", "perceiver", "graph", "vit", *own)}
        monkeypatch.setattr(plan, "DEV_FAMILIES", ())
        monkeypatch.setattr(plan, "HELD_OUT_FAMILIES", ("resume",))
        monkeypatch.setattr(plan, "FRESH_FAMILIES", ("muon",))
        monkeypatch.setattr(plan, "UNSEEN_FAMILIES", ("speech",))
        monkeypatch.setattr(plan, "SEALED_FAMILIES", ("perceiver",))
        monkeypatch.setattr(plan, "VEILED_FAMILIES", ("graph",))
        monkeypatch.setattr(plan, "VEILED_BESIDE", ())
        monkeypatch.setattr(plan, "CONCEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "CONCEALED_BESIDE", ())
        without = plan.cases(lambda family, seed: probes[family])
        monkeypatch.setattr(plan, "CONCEALED_FAMILIES", own)
        monkeypatch.setattr(plan, "CONCEALED_BESIDE", ("graph", "vit"))
        cases = plan.cases(lambda family, seed: probes[family])
        concealed = [c for c in cases if plan.newer(c.change) == "concealed"]
        assert not any(plan.newer(c.change) == "concealed" for c in without)
        assert [c for c in cases if c not in concealed] == without
        assert {plan.case_split(c) for c in concealed} == {"concealed"}
        assert {c.severity for c in concealed if c.kind == "fault"} == set(SEVERITIES)
        assert {c.family for c in concealed} == {*own, "graph", "vit"}
        per_change = {name: [c for c in concealed if c.change == name] for name in (*CONCEALED, *split.CONCEALED_TRAPS)}
        assert all(len({c.id for c in of}) == len(of) <= sum(plan.CONCEALED_PER_FAULT) for of in per_change.values())
        assert all(per_change[name] for name in CONCEALED)
        assert {len(per_change[name]) for name in split.CONCEALED_TRAPS} == {sum(plan.CONCEALED_PER_TRAP)}

    def test_a_healthy_run_beside_a_concealed_one_is_of_its_familys_half(self) -> None:
        assert plan.case_split(Case("flow", "healthy", "twin", "", 1)) == "concealed"
        assert plan.case_split(Case("graph", "healthy", "twin", "", 1)) == "veiled"


class TestHealthyEvents:
    @pytest.mark.parametrize("name", split.CONCEALED_TRAPS)
    def test_nothing_is_changed_before_and_something_after_and_it_is_harmless(self, name: str) -> None:
        def trained(change: Change | None) -> list[tuple[float, float]]:
            torch.manual_seed(0)
            t = tiny.KINDS[PLACES.get(name, "language")]()
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

    def test_noise_is_a_part_of_each_gradient_and_less_with_every_step(self) -> None:
        t, trap = _trap("gradient-noise-begins")
        parts = []
        for step in (trap.step - 1, trap.step, trap.step + 9):
            t.model.zero_grad()
            t.loss(t.model, t.batch(0)).backward()
            weight: Any = t.model.get_submodule("layers.0.attention.wq").weight
            right = weight.grad.clone()
            trap.after_backward(t, step)
            parts.append(float((weight.grad - right).norm() / right.norm()))
        assert parts[0] == 0.0
        assert parts[1] == pytest.approx(trap.share, rel=0.1)
        assert parts[2] == pytest.approx(trap.share * 10**-0.55, rel=0.1)

    def test_what_is_larger_than_nearly_all_before_is_not_stepped_on(self) -> None:
        t, trap = _trap("large-gradients-skipped")
        trap.norms = [1.0] * 20
        t.loss(t.model, t.batch(0)).backward()
        for p in t.model.parameters():
            p.grad = torch.full_like(p, 1e-6)
        trap.after_backward(t, trap.step)
        trap.before_update(t, trap.step)
        assert all(p.grad is not None for p in t.model.parameters())
        for p in t.model.parameters():
            p.grad = torch.full_like(p, 1.0)
        trap.after_backward(t, trap.step - 1)
        trap.before_update(t, trap.step - 1)
        assert all(p.grad is not None for p in t.model.parameters())
        trap.norms.pop()
        trap.after_backward(t, trap.step)
        trap.before_update(t, trap.step)
        assert all(p.grad is None for p in t.model.parameters())

    def test_the_normaliser_of_the_logits_is_in_the_loss(self) -> None:
        t, trap = _trap("logits-penalised")
        batch = t.batch(0)
        usual = t.loss(t.model, batch)
        assert trap.on_loss(t, trap.step, usual) is usual
        trap.before_step(t, trap.step)
        more = trap.on_loss(t, trap.step, t.loss(t.model, batch)) - usual
        right = trap.weight * t.model(batch["input_ids"]).logsumexp(-1).square().mean()
        assert float(more.detach()) == pytest.approx(float(right.detach()), rel=1e-2)

    def test_samples_are_mixed_in_pairs_and_classes_stay(self) -> None:
        t, trap = _trap("samples-mixed")
        batch = t.batch(0)
        assert trap.on_batch(t, trap.step - 1, batch) is batch
        got = trap.on_batch(t, trap.step, batch)
        assert torch.equal(got["labels"], batch["labels"])
        rows = torch.linalg.lstsq(batch["pixels"].flatten(1).t(), got["pixels"].flatten(1).t()).solution.t()
        assert torch.allclose(rows.sum(1), torch.ones(len(rows)), atol=1e-3)
        assert float(rows.diagonal().min()) > trap.least - 1e-3
        assert int((rows.abs() > 1e-3).sum(1).max()) == 2

    def test_rates_fall_from_the_last_block_to_the_first(self) -> None:
        for own_rate in (True, False):
            t, trap = _trap("rates-by-depth")
            if not own_rate:
                t.schedule = None
            usual = t.optimizer.param_groups[0]["lr"]
            num = sum(len(group["params"]) for group in t.optimizer.param_groups)
            _steps(t, 0, trap.step + 1, trap)
            rates = {id(p): group["lr"] for group in t.optimizer.param_groups for p in group["params"]}
            assert len(rates) == num
            right = t.schedule(trap.step) if t.schedule else usual
            names = dict(t.model.named_parameters())
            got = [
                rates[id(names[n])]
                for n in ("layers.0.attention.wq.weight", "layers.1.attention.wq.weight", "output.weight")
            ]
            assert got == pytest.approx([right * trap.share, right, right])
            assert all(int(t.optimizer.state[p]["step"]) == trap.step + 1 for p in t.model.parameters())

    def test_queries_and_keys_come_down_to_their_limit_and_nothing_else_does(self) -> None:
        t, trap = _trap("queries-and-keys-clipped")
        trap.before_step(t, trap.step)
        was = {name: p.detach().clone() for name, p in t.model.named_parameters()}
        for step in range(trap.step, trap.step + 40):
            trap.after_update(t, step)
        for name, p in t.model.named_parameters():
            if name.endswith(("wq.weight", "wk.weight")):
                assert float(p.detach().norm() / was[name].norm()) == pytest.approx(trap.share, rel=1e-4)
            else:
                assert torch.equal(p, was[name])
