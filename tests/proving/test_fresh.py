"""The fresh set: its families train and go on from a checkpoint, its faults and healthy events do what their texts say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from proving import families, loop, plan, split, tiny
from proving.case import Case
from proving.families import build, parts
from proving.families.optimizers import Adafactor, Lookahead, orthogonal
from proving.faults import FAULTS, generators
from proving.faults.feeding import PositionsOffset
from proving.faults.products import ProductFault
from proving.faults.stores import _PartOfTile
from proving.faults.updates import rounded
from proving.loop import Seams, load, saved, train_step
from proving.training import SEVERITIES, Change, Fault, Training
from proving.traps import TRAPS

from fp8watch.kernels import reference
from fp8watch.numerics.quantize_job import quantize_jobs

FRESH = sorted(name for name, cls in FAULTS.items() if cls.generator in split.FRESH_GENERATORS)


def _built(family: str, seed: int = 1) -> Training:
    torch.manual_seed(seed)
    return build(family, seed)


def _steps(t: Training, first: int, last: int, change: Change | None = None) -> list[float]:
    seams = Seams(Change() if change is None else change)
    return [train_step(t, t.model, step, seams, None)[0] for step in range(first, last)]


def _fault(name: str, kind: str = "language", severity: str = "severe", seed: int = 0) -> tuple[Training, Fault]:
    torch.manual_seed(0)
    t = tiny.KINDS[kind]()
    fault = FAULTS[name].draw(np.random.default_rng(seed), t, severity)
    assert fault is not None
    return t, fault


class TestFamilies:
    @pytest.mark.parametrize("family", split.FRESH_FAMILIES)
    def test_the_loss_falls(self, family: str) -> None:
        loss = _steps(_built(family), 0, 26)
        assert np.mean(loss[-4:]) < 0.95 * np.mean(loss[:2])
        assert all(math.isfinite(v) for v in loss)

    @pytest.mark.parametrize("family", split.FRESH_FAMILIES)
    def test_a_checkpoint_carries_what_its_own_optimizer_keeps(self, family: str) -> None:
        straight = _steps(_built(family), 0, 5)
        t = _built(family)
        first = _steps(t, 0, 3)
        again = _built(family)
        assert load(again, saved(t, None, 3)) == 3
        assert first + _steps(again, 3, 5) == straight

    @pytest.mark.parametrize("family", split.FRESH_FAMILIES)
    def test_every_role_is_of_modules_that_exist(self, family: str) -> None:
        t = _built(family)
        modules = dict(t.model.named_modules())
        roles = {name: of for name, of in t.notes.items() if isinstance(of, list)}
        assert {"linears", "embedding", "mlp.up"} <= set(roles)
        assert {name for of in roles.values() for name in of} <= set(modules)

    def test_gradients_are_clipped_by_value_where_a_family_says_so(self) -> None:
        t = _built("mixer")
        t.clip_value = 1e-3
        _steps(t, 0, 1)
        largest = max(float(p.grad.abs().max()) for p in t.model.parameters() if p.grad is not None)
        assert largest == pytest.approx(1e-3)


class TestOptimizers:
    def test_newton_schulz_makes_singular_values_alike(self) -> None:
        x = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
        before, after = torch.linalg.svdvals(x), torch.linalg.svdvals(orthogonal(x))
        assert float(before.max() / before.min()) > 4
        assert 0.5 < float(after.min()) <= float(after.max()) < 1.3

    def test_lookahead_goes_a_part_of_the_way_and_comes_back(self) -> None:
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = Lookahead([p], lr=0.1, momentum=0.0, every=2, part=0.5)
        went = []
        for _ in range(2):
            p.grad = -torch.ones(3)
            optimizer.step()
            went.append(float(p[0].detach()))
        assert went == pytest.approx([0.1, 0.1])  # 0.2 would be the way, half of it is kept

    def test_a_row_of_a_table_that_was_not_read_stays(self) -> None:
        p = torch.nn.Parameter(torch.ones(4, 2))
        optimizer = Adafactor([{"params": [p], "rows": True}], lr=0.1)
        p.grad = torch.zeros(4, 2)
        p.grad[2] = 3.0
        optimizer.step()
        assert (p != 1).any(1).tolist() == [False, False, True, False]
        assert float(p[2, 0].detach()) == pytest.approx(0.9)


class TestSplit:
    def test_fresh_is_a_fresh_change_in_a_family_that_chose_nothing(self) -> None:
        assert split.split_of("bert", "stores") == split.split_of("ssm", "stores") == "fresh"
        assert split.split_of("bert") == split.split_of("bert", trap="packing-begins") == "fresh"
        assert split.split_of("ssm", trap="packing-begins") == "fresh"
        assert split.split_of("llama", "stores") == split.split_of("llama", trap="packing-begins") == "crossed"
        assert split.split_of("bert", "codes") == split.split_of("bert", "scales") == "crossed"
        assert split.split_of("ssm", "scales") == split.split_of("ssm") == "held-out"

    def test_the_lists_name_what_there_is_and_nothing_else(self) -> None:
        assert set(split.FRESH_GENERATORS) <= set(generators())
        assert set(split.FRESH_TRAPS) <= set(TRAPS)
        assert set(split.FRESH_FAMILIES) <= set(families.families())
        assert len(FRESH) >= 14
        assert not set(split.FRESH_FAMILIES) & set(split.DEV_FAMILIES + split.HELD_OUT_FAMILIES)

    def test_fresh_runs_are_planned_beside_the_older_ones_and_change_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probes = {name: _built(name) for name in ("llama", "delayed", *split.FRESH_FAMILIES)}
        monkeypatch.setattr(plan, "DEV_FAMILIES", ("llama",))
        monkeypatch.setattr(plan, "HELD_OUT_FAMILIES", ("delayed",))
        monkeypatch.setattr(plan, "UNSEEN_FAMILIES", ())
        monkeypatch.setattr(plan, "SEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "VEILED_FAMILIES", ())
        monkeypatch.setattr(plan, "VEILED_BESIDE", ())
        monkeypatch.setattr(plan, "CONCEALED_FAMILIES", ())
        monkeypatch.setattr(plan, "CONCEALED_BESIDE", ())
        cases = plan.cases(lambda family, seed: probes[family])
        fresh = [c for c in cases if plan.newer(c.change) == "fresh"]
        assert {plan.case_split(c) for c in fresh} == {"fresh"}
        assert {c.change for c in fresh} == {*FRESH, *split.FRESH_TRAPS}
        assert {c.severity for c in fresh if c.kind == "fault"} == set(SEVERITIES)
        assert not {c.family for c in cases if plan.newer(c.change) is None} & set(split.FRESH_FAMILIES)
        assert {c.family for c in fresh} == {"delayed", *split.FRESH_FAMILIES}

    def test_a_twin_that_shares_fresh_preparations_is_fresh(self) -> None:
        case = Case("ssm", "recompute-differs", "fault", "medium", 1)
        assert case.twin.setup == "recompute-differs"
        assert plan.case_split(case.twin) == "fresh"
        assert plan.case_split(Case("ssm", "fp8-not-active", "fault", "medium", 1).twin) == "held-out"


class TestStores:
    def test_a_scale_of_a_part_of_the_tile_clips_the_rest(self) -> None:
        job = quantize_jobs((1, 128), "E4M3")[-1]
        x = torch.ones(4, 256)
        x[:, 5] = 64.0
        whole = _PartOfTile(reference, 128).quantize_dequantize(x, job)[0]
        part = _PartOfTile(reference, 4).quantize_dequantize(x, job)[0]
        assert torch.equal(whole, reference.quantize_dequantize(x, job)[0])
        assert float(part[:, 5].max()) < 2
        assert torch.equal(part[:, 128:], whole[:, 128:])

    @pytest.mark.parametrize("name", ["k-block-raced", "output-on-old-contents", "output-cast-saturates"])
    def test_a_product_is_as_wrong_as_was_drawn(self, name: str) -> None:
        random = torch.Generator().manual_seed(0)
        a, b = torch.randn(64, 128, generator=random), torch.randn(128, 64, generator=random)
        for severity in SEVERITIES:
            _, fault = _fault(name, severity=severity)
            assert isinstance(fault, ProductFault)
            fault.chance = 1.0  # type: ignore[attr-defined]
            out = a @ b
            fault.wrong(torch.randn(64, 64, generator=random) * out.norm() / 64, a, b)  # what the buffer held
            if hasattr(fault, "limit"):
                fault.limit.clear()
            error = float((fault.wrong(out, a, b) - out).norm() / out.norm())
            assert 0.6 * fault.error < error < 1.6 * fault.error + 0.1, severity

    def test_equal_inputs_give_other_outputs(self) -> None:
        _, fault = _fault("k-block-raced")
        assert isinstance(fault, ProductFault)
        a, b = torch.randn(32, 64), torch.randn(64, 32)
        assert len({repr(float(fault.wrong(a @ b, a, b).sum())) for _ in range(6)}) > 1


class TestBackward:
    def test_a_recomputed_block_leaves_the_loss_and_changes_the_gradient(self) -> None:
        got: list[tuple[float, float]] = []
        for wrong in (False, True):
            t, fault = _fault("recompute-differs")
            fault.started(t)
            fault.wrong = wrong  # type: ignore[attr-defined]
            loss = t.loss(t.model, t.batch(0))
            loss.backward()
            got.append(
                (float(loss.detach()), sum(float(p.grad.norm()) for p in t.model.parameters() if p.grad is not None))
            )
            fault.undo()
        assert got[0][0] == got[1][0]
        assert got[0][1] != got[1][1]

    def test_gradients_that_are_not_zeroed_add_up(self) -> None:
        t, fault = _fault("gradients-not-zeroed")
        fault.step, t.clip_norm = 1, None
        weight = next(t.model.parameters())
        _steps(t, 0, 1, fault)
        assert weight.grad is not None
        before = weight.grad.clone()
        fault.before_step(t, 1)
        t.optimizer.zero_grad()
        assert torch.equal(weight.grad, before)
        fault.undo()
        t.optimizer.zero_grad()
        assert weight.grad is None

    def test_a_buffer_that_is_left_gives_the_gradient_of_the_step_before(self) -> None:
        t, fault = _fault("gradient-buffer-left")
        weight, kept = t.model.get_submodule(fault.expected.modules[0]).weight, []  # type: ignore[index]
        t.clip_norm = None
        for step in range(fault.step + 3):
            _steps(t, step, step + 1, fault)
            kept.append(weight.grad.clone())
        assert all(torch.equal(kept[step], kept[fault.step - 1]) for step in range(fault.step, len(kept)))


class TestUpdates:
    def test_weights_of_few_bits_lose_the_share_that_was_drawn(self) -> None:
        t, fault = _fault("master-weights-lost", severity="medium")
        _steps(t, 0, fault.step + 1, fault)
        assert fault.drawn["share"] == pytest.approx(fault.drawn["asked_share"], abs=0.25)
        weight = t.model.get_submodule("layers.0.attention.wq").weight
        assert torch.equal(rounded(weight, fault.drawn["num_bits"]), weight)

    def test_one_group_goes_at_its_own_rate_and_all_others_at_theirs(self) -> None:
        t, fault = _fault("rate-of-one-group")
        before = [list(g["params"]) for g in t.optimizer.param_groups]
        fault.step = 1
        _steps(t, 0, 2, fault)
        rates = {len(g["params"]): g["lr"] for g in t.optimizer.param_groups}
        assert max(rates.values()) == pytest.approx(fault.times * min(rates.values()))  # type: ignore[attr-defined]
        assert sum(len(g["params"]) for g in t.optimizer.param_groups) == sum(map(len, before))
        fault.undo()
        assert [[id(p) for p in g["params"]] for g in t.optimizer.param_groups] == [
            [id(p) for p in of] for of in before
        ]

    def test_rows_of_a_table_get_what_was_meant_for_others(self) -> None:
        t, fault = _fault("table-rows-misplaced")
        weight = t.model.get_submodule("tok_embeddings").weight
        fault.step = 0
        fault.before_update(t, 0)
        meant = torch.arange(1.0, 1 + weight.numel()).view_as(weight)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(meant)
        fault.after_update(t, 0)
        weight = weight.detach()
        assert float((weight - before).sum()) == pytest.approx(float(meant.sum()), rel=1e-5)
        assert 0.3 < float(((weight - before - meant).abs() > 1e-3).any(1).float().mean()) <= 1.0


class TestFeeding:
    def test_a_row_of_nan_leaves_loss_and_weights_finite_and_costs_the_step(self) -> None:
        t, fault = _fault("nan-row-left-out")
        fault.step = 0
        before = [p.detach().clone() for p in t.model.parameters()]
        assert math.isfinite(_steps(t, 0, 1, fault)[0])
        assert all(torch.equal(p, b) for p, b in zip(t.model.parameters(), before, strict=True))
        fault.undo()

    def test_keys_are_turned_further_than_their_queries(self) -> None:
        t, fault = _fault("positions-offset")
        assert isinstance(fault, PositionsOffset)
        sound, by = parts.rotate, fault.by
        x = torch.randn(4, 2, 40, 8)
        longer = torch.cat((torch.zeros(4, 2, by, 8), x), 2)
        fault.begin(t)
        try:
            query, key = parts.rotate(x), parts.rotate(x)
        finally:
            fault.undo()
        assert torch.equal(query, sound(x))
        assert torch.allclose(key[0], sound(longer)[0, :, by:], atol=1e-6)
        assert parts.rotate is sound

    def test_ids_above_a_limit_wrap_and_what_is_not_scored_stays(self) -> None:
        t, fault = _fault("ids-wrapped")
        fault.begin(t)
        batch = t.batch(3)
        got = fault.on_batch(t, fault.step, batch)
        limit = fault.drawn["limit"]
        assert int(got["input_ids"].max()) < limit
        assert torch.equal(got["labels"] == -100, batch["labels"] == -100)
        low = batch["input_ids"] < limit
        assert torch.equal(got["input_ids"][low], batch["input_ids"][low])

    def test_the_answer_stands_among_the_inputs(self) -> None:
        for family in ("bert", "mixer", "towers", "muon"):
            t = _built(family)
            fault = FAULTS["labels-leak"].draw(np.random.default_rng(0), t, "severe")
            assert fault is not None
            batch = t.batch(0)
            got = fault.on_batch(t, fault.step, batch)
            changed = [name for name in batch if not torch.equal(got[name], batch[name])]
            assert changed == [{"mixer": "pixels", "towers": "history"}.get(family, "input_ids")]

    def test_rows_are_copies_and_labels_go_with_them(self) -> None:
        t, fault = _fault("rows-of-one-seed", "images")
        got = fault.on_batch(t, fault.step, t.batch(0))
        pairs = {(repr(p.tolist()), int(y)) for p, y in zip(got["pixels"], got["labels"], strict=True)}
        assert len(pairs) < 5


Run = Callable[[Training, Any], None]


class TestHealthyEvents:
    @pytest.mark.parametrize("name", split.FRESH_TRAPS)
    def test_nothing_is_changed_before_and_something_after(self, name: str) -> None:
        def trained(change: Change | None) -> list[tuple[float, float]]:
            torch.manual_seed(0)
            t = tiny.language()
            t.clip_norm = 0.01  # such as clips
            if change is not None:
                change.before_attach(t)
            seams = Seams(Change() if change is None else change)
            return [loop.train_step(t, t.model, step, seams, None) for step in range(16)]

        trap = TRAPS[name].draw(np.random.default_rng(1), tiny.language())
        assert trap is not None
        if name == "averages-written-back":
            trap.every = 4
        got, usual = trained(trap), trained(None)
        assert got[: trap.step] == usual[: trap.step]
        assert got[trap.step :] != usual[trap.step :]
        assert all(math.isfinite(loss) for loss, _ in got)

    def test_a_group_of_its_own_follows_the_schedule_at_its_own_share(self) -> None:
        t = tiny.language()
        trap = TRAPS["param-group-added"].draw(np.random.default_rng(0), t)
        assert trap is not None
        _steps(t, 0, trap.step + 3, trap)
        rates = sorted({g["lr"] for g in t.optimizer.param_groups})
        assert rates[1] == pytest.approx(2 * rates[0])
