"""Each sealed fault outside of the kernels changes what its text says, by as much, and leaves the rest."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from proving import tiny
from proving.families import build, missing, parts
from proving.faults import FAULTS
from proving.faults.conversions import HeadsInOtherOrder
from proving.loop import saved
from proving.placed import steps_of, with_fault
from proving.training import SEVERITIES, Change
from torch import Tensor, nn


def _error(wrong: Tensor, right: Tensor) -> float:
    return float((wrong - right).norm() / right.norm())


class TestGathers:
    def test_rows_are_those_of_the_batch_before(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("rows-arrive-late", "language", severity=severity)
            fault.chance, name = 1.0, fault.modules[0]
            batches = [torch.randn(8, 16, tiny.DIM) for _ in range(3)]
            got = [fault.read(name, x).flatten(0, 1) for x in batches]
            assert _error(got[0], batches[0].flatten(0, 1)) == pytest.approx(fault.error, rel=0.2, abs=0.1), severity
            now, before = batches[2].flatten(0, 1), batches[1].flatten(0, 1)
            late = (got[2] != now).any(1)
            assert torch.allclose(got[2][late], before[late], atol=1e-6)
            assert int(late.sum()) == max(1, round(fault.share[name] * len(now)))

    def test_all_that_read_the_buffer_read_the_same_and_the_gradient_passes(self) -> None:
        t = tiny.language()
        fault: Any = next(
            f
            for i in range(40)
            if (f := FAULTS["rows-arrive-late"].draw(np.random.default_rng(i), t, "medium")) is not None
            and len(f.modules) == 3  # type: ignore[attr-defined]
        )
        assert len({name.rpartition(".")[0] for name in fault.modules}) == 1
        x = torch.randn(4, 8, tiny.DIM, requires_grad=True)
        for _ in range(12):
            read = [fault.read(name, x) for name in fault.modules]
            assert torch.equal(read[0], read[1])
            assert torch.equal(read[0], read[2])
        read[0].sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))

    def test_a_part_of_one_gradient_is_that_of_its_neighbour(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("gradient-buffer-shared", "language", severity=severity)
            t.loss(t.model, t.batch(0)).backward()
            mine, others = (t.model.get_submodule(n).weight.grad for n in (fault.module, fault.other))
            was, rest = mine.clone(), {n: p.grad.clone() for n, p in t.model.named_parameters() if p.grad is not mine}
            fault.after_backward(t, fault.step - 1)
            assert torch.equal(mine, was)
            fault.after_backward(t, fault.step)
            changed = mine != was
            assert torch.equal(mine[changed], others[changed])
            assert 0.9 * fault.error < _error(mine, was) < 1.5 * fault.error + 0.1, severity
            assert all(torch.equal(p.grad, rest[n]) for n, p in t.model.named_parameters() if n in rest)


class TestChips:
    def test_tiles_of_one_core_are_off_in_every_product_and_only_now_and_then(self) -> None:
        a, b = torch.randn(256, 64), torch.randn(64, 128)
        for severity in SEVERITIES:
            _, fault = with_fault("tile-of-bad-core", "language", severity=severity)
            out, errors = a @ b, []
            own = fault.own(out)
            assert float(own.float().mean()) == pytest.approx(1 / fault.num_cores, rel=0.3)
            for _ in range(60):
                got = fault.computed("fprop", out, a, b)
                assert torch.equal(got[~own], out[~own])
                errors.append(_error(got, out))
            wrong = [e for e in errors if e > 0]
            assert np.mean(wrong) == pytest.approx(fault.error, rel=0.15), severity
            assert 0.5 * fault.chance < len(wrong) / 60 < min(1.0, 1.6 * fault.chance)

    def test_a_small_product_has_a_tile_of_that_core_too(self) -> None:
        _, fault = with_fault("tile-of-bad-core", "language")
        for shape in ((16, 16), (20, 40), (48, 32)):
            assert fault.own(torch.ones(shape)).any()


class TestConversions:
    @pytest.mark.parametrize("to_halves", [True, False])
    def test_rows_are_in_another_order_within_each_head_and_none_is_lost(self, to_halves: bool) -> None:
        t, fault = with_fault("heads-in-other-order", "language")
        assert isinstance(fault, HeadsInOtherOrder)
        fault.to_halves = to_halves
        state = saved(t, None, fault.step)
        got = fault.before_resume(t, copy.deepcopy(state))["model"]
        changed = [name for name, value in state["model"].items() if not torch.equal(got[name], value)]
        assert changed == [f"layers.{i}.attention.{n}.weight" for i in (0, 1) for n in ("wq", "wk")]
        was, now = (m["layers.0.attention.wq.weight"].unflatten(0, (2, 16)) for m in (state["model"], got))
        order = [*range(0, 16, 2), *range(1, 16, 2)] if not to_halves else [i // 2 + 8 * (i % 2) for i in range(16)]
        assert torch.equal(now, was[:, torch.tensor(order)])
        fault.to_halves = not to_halves
        back = fault.before_resume(t, {"model": got})["model"]
        assert all(torch.equal(back[name], value) for name, value in state["model"].items())

    def test_lanes_that_are_not_turned_stay(self) -> None:
        if missing("preference"):
            pytest.skip("preference needs transformers")
        t = build("preference", 2)
        fault: Any = FAULTS["heads-in-other-order"].draw(np.random.default_rng(0), t, "severe")
        name = "model.layers.0.self_attn.q_proj"
        state = saved(t, None, 0)
        heads, turned = fault.projections(t, 0)[name]
        assert (heads, turned) == (4, 16)
        got = fault.before_resume(t, copy.deepcopy(state))["model"][f"{name}.weight"].unflatten(0, (4, 32))
        was = state["model"][f"{name}.weight"].unflatten(0, (4, 32))
        assert torch.equal(got[:, turned:], was[:, turned:])
        assert not torch.equal(got[:, :turned], was[:, :turned])

    def test_gains_are_shifted_by_one_and_nothing_else_is(self) -> None:
        nums = {}
        for severity in SEVERITIES:
            t, fault = with_fault("gains-of-other-convention", "language", severity=severity)
            state = saved(t, None, fault.step)
            got = fault.before_resume(t, state)["model"]
            changed = {name for name, value in state["model"].items() if not torch.equal(got[name], value)}
            assert changed == {f"{name}.weight" for name in fault.modules}
            assert all(torch.equal(got[name], state["model"][name] + fault.shift) for name in changed)
            assert all(isinstance(t.model.get_submodule(n), parts.RMSNorm | nn.LayerNorm) for n in fault.modules)
            nums[severity] = len(changed)
        assert (nums["mild"], nums["severe"]) == (1, 5)
        assert 1 < nums["medium"] < 5


class TestTargets:
    @pytest.mark.parametrize("kind", ["language", "tied"])
    def test_a_loss_over_nothing_is_nan_and_the_step_is_skipped_or_the_weights_are_lost(self, kind: str) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("nothing-scored", kind, severity)
            fault.step, fault.until = 2, 3
            before = steps_of(t, 0, 2, fault)
            was = [p.detach().clone() for p in t.model.parameters()]
            ((loss, _),) = steps_of(t, 2, 3, fault)
            assert math.isnan(loss)
            assert all(math.isfinite(v) for v, _ in before)
            after = steps_of(t, 3, 5, fault)
            if severity == "severe":
                assert all(math.isnan(v) for v, _ in after)
            else:
                assert all(math.isfinite(v) for v, _ in after)
                assert any(not torch.equal(p, w) for p, w in zip(t.model.parameters(), was, strict=True))

    def test_some_of_the_steps_are_lost_where_it_is_medium(self) -> None:
        t, fault = with_fault("nothing-scored", "language", severity="medium")
        fault.step, fault.until = 0, 40
        lost = [math.isnan(loss) for loss, _ in steps_of(t, 0, 40, fault)]
        assert lost[0]
        assert 0.4 * fault.chance < np.mean(lost) < 2 * fault.chance + 0.1

    def test_what_is_not_found_is_zero(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("targets-defaulted", "images", severity)
            batches = [t.batch(number) for number in range(30)]
            got = [fault.on_batch(t, fault.step, b) for b in batches]
            assert all(torch.equal(g["pixels"], b["pixels"]) for g, b in zip(got, batches, strict=True))
            labels, was = (torch.cat([b["labels"] for b in of]) for of in (got, batches))
            assert (labels[labels != was] == 0).all()
            lost = float((labels[was > 0] == 0).float().mean())
            assert lost == pytest.approx(fault.share, abs=0.12), severity


class TestPasses:
    def test_an_update_is_applied_so_many_times_and_the_rate_is_what_it_was(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("update-applied-again", "language", severity=severity)
            once, fault.step = copy.deepcopy(t.model), 0
            usual, _ = with_fault("update-applied-again", "language", severity=severity)
            weight = {id(x): x.model.get_submodule("output").weight for x in (t, usual)}
            steps_of(t, 0, 1, fault)
            steps_of(usual, 0, 1, Change())
            first = once.get_submodule("output").weight
            far, near = weight[id(t)] - first, weight[id(usual)] - first
            assert torch.allclose(far, (1 + fault.again) * near, atol=1e-6), severity
            assert t.optimizer.param_groups[0]["lr"] == usual.optimizer.param_groups[0]["lr"]

    def test_a_block_gives_few_bits_and_the_gradient_passes(self) -> None:
        for severity, errors in (("mild", (0.03, 0.15)), ("medium", (0.1, 0.3))):
            t, fault = with_fault("boundary-in-few-bits", "language", severity=severity)
            x = torch.randn(512, requires_grad=True)
            got = fault.rounded(x)
            assert len((got.abs().log2() % 1).round(decimals=4).unique()) <= 2**fault.num_bits + 1
            assert errors[0] < _error(got, x.detach()) < errors[1]
            assert torch.equal(got, fault.rounded(got))
            fault.begin(t)
            y = t.model.get_submodule(fault.modules[0])(torch.randn(2, 8, tiny.DIM, requires_grad=True))
            assert torch.allclose(y, fault.rounded(y), rtol=1e-4)
            y.sum().backward()
            assert all(p.grad is not None for p in t.model.get_submodule(fault.modules[0]).parameters())
            fault.undo()
