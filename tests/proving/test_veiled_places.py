"""Each veiled fault outside of the kernels changes what its text says, by as much, at the step where it says, and leaves the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from proving import split
from proving.data import IGNORED
from proving.faults import FAULTS
from proving.faults.compression import MomentBlocksShifted
from proving.faults.orders import ShuffleLost
from proving.loop import saved
from proving.placed import steps_of, with_fault
from proving.training import SEVERITIES, Change
from torch import Tensor

VEILED = sorted(name for name, cls in FAULTS.items() if cls.generator in split.VEILED_GENERATORS)


class TestEachFault:
    @pytest.mark.parametrize("name", ["error-feedback-lost", "rate-below-zero", "shuffle-lost"])
    def test_nothing_is_changed_before_its_step(self, name: str) -> None:
        t, fault = with_fault(name, "images")
        usual, _ = with_fault(name, "images")
        fault.step, fault.until = 3, None
        got, right = steps_of(t, 0, 6, fault), steps_of(usual, 0, 6, Change())
        assert got[:3] == right[:3]
        assert got[3:] != right[3:]

    @pytest.mark.parametrize("name", VEILED)
    def test_what_is_expected_was_said_before_it_ran(self, name: str) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault(name, severity=severity)
            assert fault.expected.modes
            assert set(fault.expected.modules or ()) <= {n for n, _ in t.model.named_modules()}
            assert fault.drawn


class TestRelaunches:
    def test_shards_come_in_the_order_of_their_names(self) -> None:
        nums = {}
        for severity in SEVERITIES:
            t, fault = with_fault("shards-sorted-by-name", "language", severity)
            steps_of(t, 0, 2, Change())
            fault.num_ranks, fault.moments_too = 16, severity != "mild"
            state = saved(t, None, fault.step)
            got = fault.before_resume(t, copy.deepcopy(state))
            changed = {n for n, v in state["model"].items() if not torch.equal(got["model"][n], v)}
            assert changed == {f"{name}.weight" for name in fault.modules}
            was, now = (s["model"][f"{fault.modules[0]}.weight"].tensor_split(16) for s in (state, got))
            order = [0, 1, 10, 11, 12, 13, 14, 15, 2, 3, 4, 5, 6, 7, 8, 9]
            assert all(torch.equal(now[i], was[rank]) for i, rank in enumerate(order))
            moved = [
                not torch.equal(got["optimizer"]["state"][i]["exp_avg"], of["exp_avg"])
                for i, of in state["optimizer"]["state"].items()
            ]
            assert sum(moved) == (len(fault.modules) if fault.moments_too else 0)
            t.optimizer.load_state_dict(got["optimizer"])
            nums[severity] = len(fault.modules)
        assert nums["mild"] == 1 < nums["medium"] < nums["severe"]

    def test_moments_go_with_their_weight(self) -> None:
        t, fault = with_fault("shards-sorted-by-name", "language")
        steps_of(t, 0, 2, Change())
        fault.moments_too, name = True, f"{fault.modules[0]}.weight"
        state = saved(t, None, fault.step)
        params = [p for group in t.optimizer.param_groups for p in group["params"]]
        i = next(i for i, p in enumerate(params) if p is dict(t.model.named_parameters())[name])
        got = fault.before_resume(t, copy.deepcopy(state))
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                got["optimizer"]["state"][i][moment], fault.sorted(state["optimizer"]["state"][i][moment])
            )


class TestHorizons:
    @pytest.mark.parametrize("own", [True, False])
    def test_rates_are_negative_from_its_step_on_and_come_to_a_part_of_the_right_ones(self, own: bool) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("rate-below-zero", "images", severity)
            fault.step, fault.until, fault.num_steps = 3, 10, 4
            usual = [group["lr"] for group in t.optimizer.param_groups]
            if not own:
                t.schedule = None
            factors = []
            for step in range(12):
                steps_of(t, step, step + 1, fault)
                right = t.schedule(step) if t.schedule else usual[0]
                factors.append(t.optimizer.param_groups[0]["lr"] / right)
            line = [-fault.part * n / 4 for n in (1, 2, 3, 4, 4, 4, 4)]
            assert factors == pytest.approx([1.0] * 3 + line + [1.0] * 2), severity
        assert 0.1 < fault.part < 2

    def test_the_loss_goes_uphill(self) -> None:
        t, fault = with_fault("rate-below-zero", "language")
        fault.step, fault.until, fault.part, fault.num_steps = 12, None, 1.0, 4
        batch = t.batch(0)
        t.batch = lambda number: batch
        loss = [value for value, _ in steps_of(t, 0, 24, fault)]
        assert loss[0] > loss[11] + 0.05
        assert loss[-1] > loss[11] + 0.05


class TestCompression:
    def test_the_largest_elements_are_sent_and_nothing_else(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("error-feedback-lost", "language", severity)
            fault.way = "largest"
            t.loss(t.model, t.batch(0)).backward()
            right = {n: p.grad.clone() for n, p in t.model.named_parameters()}
            fault.after_backward(t, fault.step - 1)
            assert all(torch.equal(p.grad, right[n]) for n, p in t.model.named_parameters())
            fault.after_backward(t, fault.step)
            for n, p in t.model.named_parameters():
                left = p.grad != 0
                assert torch.equal(p.grad[left], right[n][left])
                if p.ndim < 2:
                    assert torch.equal(p.grad, right[n])
                elif not left.all():
                    assert float(p.grad[left].abs().min()) >= float(right[n][~left].abs().max())
            assert fault.drawn["error"] == pytest.approx(fault.error, rel=0.1, abs=0.01), severity

    def test_signs_have_one_size(self) -> None:
        t, fault = with_fault("error-feedback-lost", "language")
        fault.way = "signs"
        t.loss(t.model, t.batch(0)).backward()
        weight: Any = t.model.get_submodule("layers.0.attention.wq").weight
        signs = weight.grad.sign()
        fault.after_backward(t, fault.step)
        assert torch.equal(weight.grad.sign(), signs)
        assert len(weight.grad.abs().unique()) == 1

    def test_blocks_of_moments_have_the_largest_numbers_of_others(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("moment-blocks-shifted", "language", severity)
            assert isinstance(fault, MomentBlocksShifted)
            steps_of(t, 0, 4, Change())
            state = saved(t, None, fault.step)
            got = fault.before_resume(t, copy.deepcopy(state))["optimizer"]["state"]
            for k in ("exp_avg", "exp_avg_sq", "step"):
                was, now = (
                    torch.cat([of[k].flatten() for of in s.values()]) for s in (state["optimizer"]["state"], got)
                )
                assert torch.equal(was, now) == (k not in fault.concerned)
                assert torch.equal(was.sign(), now.sign())
                if k in fault.concerned:
                    whole = len(was) // fault.size * fault.size
                    largest, wrong = (x[:whole].view(-1, fault.size).abs().amax(1) for x in (was, now))
                    hit = ((largest - wrong).abs() > 1e-5 * largest).nonzero().flatten()
                    assert 0 < len(hit) <= fault.drawn["num_blocks"]
                    further = hit + int(fault.drawn["by"])
                    known = further < len(largest)
                    assert torch.allclose(wrong[hit][known], largest[further[known]], rtol=1e-4)
            reached = fault.error if severity != "severe" else min(fault.error, 4.0)  # of few steps' moments
            assert 0.6 < float(fault.drawn["error"]) / reached < 2.5, severity


class TestOrders:
    @pytest.mark.parametrize(("kind", "micro"), [("images", 1), ("tied", 2)])
    def test_the_same_samples_come_sorted(self, kind: str, micro: int) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("shuffle-lost", kind, severity)
            assert isinstance(fault, ShuffleLost)
            fault.until = None
            given, first = [], -(-fault.step * micro // fault.num) * fault.num
            for step in range(fault.step, (first + fault.num) // micro + 1):
                fault.before_step(t, step)
                given += [fault.on_batch(t, step, t.batch(step * micro + i)) for i in range(micro)]
            got = given[first - fault.step * micro :][: fault.num]
            right = [t.batch(number) for number in range(first, first + fault.num)]
            keys = torch.cat([self._key(b["labels"]) for b in got])
            assert torch.equal(keys, torch.cat([self._key(b["labels"]) for b in right]).sort().values)
            name = "pixels" if kind == "images" else "input_ids"
            rows, all_rows = (sorted(map(str, torch.cat([b[name] for b in of]).tolist())) for of in (got, right))
            assert rows == all_rows

    def test_nothing_is_sorted_before(self) -> None:
        t, fault = with_fault("shuffle-lost", "images")
        fault.before_step(t, fault.step - 1)
        batch = t.batch(0)
        assert fault.on_batch(t, fault.step - 1, batch) is batch

    @staticmethod
    def _key(labels: Tensor) -> Tensor:
        rows = labels.float().unflatten(0, (len(labels), -1)).flatten(1)
        scored = rows != IGNORED
        return (rows * scored).sum(1) / scored.sum(1)
