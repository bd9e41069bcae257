"""Each veiled fault changes what its text says, by as much, at the step where it says, and leaves the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from proving import split, tiny
from proving.data import IGNORED
from proving.faults import FAULTS
from proving.faults._kernel import KernelFault
from proving.faults._sites import WrongKernel
from proving.faults.compression import MomentBlocksShifted
from proving.faults.groups import RowsOfNextGroup
from proving.faults.orders import ShuffleLost
from proving.faults.packing import CodesReadAsIntegers, PairsSwapped
from proving.faults.saved import SavedWithOneScale
from proving.faults.workspaces import _NeverZeroed
from proving.loop import saved
from proving.placed import steps_of, with_fault
from proving.training import SEVERITIES, Change
from torch import Tensor

from fp8watch.kernels import reference
from fp8watch.numerics.quantize_job import quantize_jobs

VEILED = sorted(name for name, cls in FAULTS.items() if cls.generator in split.VEILED_GENERATORS)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _read(fault: KernelFault, x: Tensor, tile: tuple[int, int] = (1, 128), form: str = "E4M3") -> tuple[Tensor, Tensor]:
    """What a GEMM reads of x, wrong and right."""
    job = quantize_jobs(tile, form, True)[-1]
    kernel = WrongKernel(reference, lambda operand: fault.spoil("m", operand))
    return kernel.quantize_dequantize(x, job)[0], reference.quantize_dequantize(x, job)[0]


def _error(wrong: Tensor, right: Tensor) -> float:
    return float((wrong - right).norm() / right.norm())


def _rowwise(name: str, severity: str) -> Any:
    """The first draw that is of rows."""
    for seed in range(40):
        _, fault = with_fault(name, severity=severity, seed=seed)
        if fault.columnwise == (False,):
            return fault
    raise AssertionError(name)


class TestEachFault:
    @pytest.mark.parametrize(
        "name", [n for n in VEILED if FAULTS[n].generator in ("compression", "horizons", "orders")]
    )
    def test_nothing_is_changed_before_its_step(self, name: str) -> None:
        t, fault = with_fault(name, "images")
        usual, _ = with_fault(name, "images")
        if fault.resumes:
            return  # a launch is its step
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


class TestGroups:
    def test_the_last_rows_are_those_of_the_next_weight(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("rows-of-next-group", severity=severity)
            assert isinstance(fault, RowsOfNextGroup)
            mine, other = (t.model.get_submodule(n).weight.detach() for n in (fault.module, fault.following))
            own, following = (w.t() if fault.gemm == "fprop" else w for w in (mine, other))
            a, bias = _normal(1024, len(own)), 0.1 * _normal(own.shape[1])
            right = a @ own + bias
            got = fault.grouped(other, right, a, own)
            num = fault.drawn["num_rows"]
            assert torch.equal(got[:-num], right[:-num])
            assert torch.allclose(got[-num:], a[-num:] @ following + bias, atol=1e-5)
            assert _error(got, right) == pytest.approx(fault.error, rel=0.1, abs=0.02), severity

    def test_it_is_the_next_one_of_the_same_size(self) -> None:
        t = tiny.language()
        names = [str(n) for n in t.notes["linears"]]
        for name, following in RowsOfNextGroup.pairs(t, names):
            assert names.index(following) > names.index(name)
            assert t.model.get_submodule(name).weight.shape == t.model.get_submodule(following).weight.shape


class TestPacking:
    def test_neighbours_change_places_two_by_two(self) -> None:
        for severity in SEVERITIES:
            fault = _rowwise("pairs-swapped", severity)
            wrong, right = _read(fault, _normal(512, 128))
            swapped = right.unflatten(1, (-1, 2)).flip(-1).flatten(1)
            changed = wrong != right
            assert torch.equal(wrong[changed], swapped[changed])
            assert torch.equal(wrong.abs().amax(1), right.abs().amax(1))
            vectors = changed.unflatten(1, (-1, 16)).any(2).flatten().nonzero().flatten()
            gaps = vectors.diff()
            assert int((gaps > 2).sum()) <= 1  # one stretch of them, which may go on at the beginning
            assert _error(wrong, right) == pytest.approx(fault.error, rel=0.15, abs=0.05), severity

    def test_of_the_other_copy_pairs_lie_along_its_own_rows(self) -> None:
        _, fault = with_fault("pairs-swapped")
        assert isinstance(fault, PairsSwapped)
        codes = torch.arange(24, dtype=torch.uint8).view(6, 4)
        assert fault.swapped(codes, True)[:, 0].tolist() == [4, 0, 12, 8, 20, 16]
        assert fault.swapped(codes[:5], True)[:, 0].tolist() == [4, 0, 12, 8, 16]
        assert fault.swapped(codes, False)[0].tolist() == [1, 0, 3, 2]

    def test_bytes_are_read_as_whole_numbers(self) -> None:
        for severity in SEVERITIES:
            fault = _rowwise("codes-read-as-integers", severity)
            x = _normal(1024, 128)
            wrong, right = _read(fault, x)
            assert bool(wrong.isfinite().all())
            codes, scale_inv, _ = reference.quantize(x, quantize_jobs((1, 128), "E4M3", True)[-1])
            whole = codes.view(torch.int8 if fault.signed else torch.uint8).float() * scale_inv
            changed = wrong != right
            assert changed.any()
            assert torch.equal(wrong[changed], whole[changed])
            most = _error(whole, right)
            assert _error(wrong, right) == pytest.approx(min(fault.error, most), rel=0.15, abs=0.05), severity

    def test_a_gradients_bytes_become_small(self) -> None:
        _, fault = with_fault("codes-read-as-integers")
        assert isinstance(fault, CodesReadAsIntegers)
        fault.columnwise, fault.error, fault.signed = (False,), 1.0, True
        wrong, right = _read(fault, _normal(64, 128), form="E5M2")
        assert float(wrong.abs().max()) < 0.01 * float(right.abs().max())


class TestWorkspaces:
    @pytest.mark.parametrize("power_2", [True, False])
    @pytest.mark.parametrize("form", ["E4M3", "E5M2"])
    def test_what_was_there_before_sets_the_scale_and_the_slot_never_falls(self, form: str, power_2: bool) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("amax-never-zeroed", "images", severity)
            kernel, x, job = (
                _NeverZeroed(reference, fault),
                1e-4 * _normal(64, 128),
                quantize_jobs((1, 128), form, power_2)[-1],
            )
            got, scale_inv, _ = kernel.quantize_dequantize(x, job)
            assert len(scale_inv.unique()) == 1
            assert 0.5 * fault.error < _error(got, x) < 1.6 * fault.error + 0.05, severity
            _, again, _ = kernel.quantize_dequantize(0.01 * x, job)
            assert torch.equal(again, scale_inv)
            _, more, _ = kernel.quantize_dequantize(1e14 * x, job)
            assert float(more.min()) > float(scale_inv.max())
            _, after, _ = kernel.quantize_dequantize(x, job)
            assert float(after.min()) == float(more.max())

    def test_a_zero_tensor_leaves_nothing(self) -> None:
        _, fault = with_fault("amax-never-zeroed", "images")
        kernel, job = _NeverZeroed(reference, fault), quantize_jobs((1, 128), "E5M2", True)[-1]
        kernel.quantize_dequantize(torch.zeros(8, 128), job)
        assert kernel.least is None


class TestSaved:
    def test_levels_are_as_coarse_as_was_drawn_and_stay(self) -> None:
        g, x = _normal(64, 256), _normal(256, 128, seed=1)
        for severity in SEVERITIES:
            _, fault = with_fault("saved-with-one-scale", severity=severity)
            assert isinstance(fault, SavedWithOneScale)
            got = fault.wrong(g @ x, g, x)
            (step,) = fault.steps.values()
            read = fault.levels(x, step)
            assert torch.allclose(got, g @ read, atol=1e-4)
            assert _error(read, x) == pytest.approx(fault.error, rel=0.15), severity
            assert torch.allclose(read / step, (read / step).round(), atol=1e-3)
            again = fault.wrong(g @ (5 * x), g, 5 * x)
            assert torch.allclose(again, g @ fault.levels(5 * x, step), atol=1e-3)
            assert fault.levels(1e6 * x, step).abs().max() == pytest.approx(127 * step)

    def test_it_is_wgrad_alone_that_reads_it(self) -> None:
        t, fault = with_fault("saved-with-one-scale")
        assert fault.gemm == "wgrad"
        assert set(fault.modules) <= set(t.notes["linears"])

    def test_an_input_of_zeros_is_kept_as_it_is(self) -> None:
        _, fault = with_fault("saved-with-one-scale")
        assert isinstance(fault, SavedWithOneScale)
        out = torch.zeros(8, 32)
        assert torch.equal(fault.wrong(out, _normal(8, 16), torch.zeros(16, 32)), out)
        assert not fault.steps


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
