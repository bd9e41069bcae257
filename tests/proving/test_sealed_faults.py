"""Each sealed fault of a kernel or a scale changes what its text says, by as much, and leaves the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from proving import tiny
from proving.faults import FAULTS
from proving.faults._kernel import KernelFault
from proving.faults._sites import WrongKernel
from proving.faults.histories import _Unwritten
from proving.faults.partials import RotatedInOneOperand
from proving.faults.products import ProductFault
from proving.placed import with_fault
from proving.training import SEVERITIES
from torch import Tensor

from fp8watch.kernels import reference
from fp8watch.numerics.formats import fp8_format
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.recipe import AmaxHistory


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _read(
    fault: KernelFault, x: Tensor, tile: tuple[int, int] = (128, 128), power_2: bool = True
) -> tuple[Tensor, Tensor]:
    """What a GEMM reads of x, wrong and right."""
    job = quantize_jobs(tile, "E4M3", power_2)[-1]
    kernel = WrongKernel(reference, lambda operand: fault.spoil("m", operand))
    return kernel.quantize_dequantize(x, job)[0], reference.quantize_dequantize(x, job)[0]


def _error(wrong: Tensor, right: Tensor) -> float:
    return float((wrong - right).norm() / right.norm())


class TestGathers:
    def test_rows_of_padding_stay_in_a_weight_and_push_the_rest_behind(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("gathered-with-padding", severity=severity)
            wrong, right = _read(fault, _normal(256, 128))
            row, num = fault.found["m", False]
            assert torch.equal(wrong[:row], right[:row])
            assert not wrong[row : row + num].any()
            assert torch.equal(wrong[row + num :], right[row : 256 - num])
            one_row = 1 / 16  # of a weight of 256: nothing less can be lost
            assert _error(wrong, right) == pytest.approx(max(one_row, fault.error), rel=0.2), severity

    def test_the_next_weight_has_its_padding_in_the_same_place(self) -> None:
        _, fault = with_fault("gathered-with-padding", severity="medium")
        _read(fault, _normal(256, 128))
        before = dict(fault.found)
        wrong, _ = _read(fault, 3 * _normal(256, 128).flip(0))
        assert fault.found == before
        row, num = fault.found["m", False]
        assert not wrong[row : row + num].any()

    @pytest.mark.parametrize("power_2", [True, False])
    def test_rows_of_other_shards_are_off_by_one_factor(self, power_2: bool) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("shards-scaled-apart", severity=severity)
            wrong, right = _read(fault, _normal(256, 128), power_2=power_2)
            ratio = torch.where(right == 0, torch.nan, wrong / right)
            said = fault.drawn["ratio"]
            rows = [float(r[~r.isnan()][0]) for r in ratio]
            assert all(r == pytest.approx(1, abs=1e-3) or r == pytest.approx(said, abs=1e-3) for r in rows)
            hit = [r != pytest.approx(1, abs=1e-3) for r in rows]
            assert sum(a != b for a, b in zip(hit, hit[1:] + hit[:1], strict=True)) in (0, 2)  # one stretch of rows
            assert _error(wrong, right) == pytest.approx(fault.error, rel=0.25), severity
            if power_2:
                assert said in (0.5, 2, 4)


class TestPartials:
    @pytest.mark.parametrize("name", ["partial-sums-in-fp8", "accumulator-of-tile-before", "store-raced-by-load"])
    def test_a_product_is_as_wrong_as_was_drawn(self, name: str) -> None:
        a, b = _normal(512, 128), _normal(128, 64)
        for severity in SEVERITIES:
            _, fault = with_fault(name, severity=severity)
            assert isinstance(fault, ProductFault)
            assert 0.4 * fault.error < _error(fault.wrong(a @ b, a, b), a @ b) < 1.4 * fault.error + 0.05, severity

    def test_parts_are_cast_one_by_one_and_the_bias_is_not(self) -> None:
        _, fault = with_fault("partial-sums-in-fp8", severity="mild")
        a, b, bias = _normal(64, 128), _normal(128, 64), _normal(64)
        fault.num_ranks, fault.octaves[64, 128] = 2, 0
        got = fault.wrong(a @ b + bias, a, b)
        parts = [a[:, :64] @ b[:64], a[:, 64:] @ b[64:]]
        largest = torch.finfo(fault.format).max
        scale = largest / torch.stack(parts).abs().max()
        cast = [(part * scale).to(fault.format).float() / scale for part in parts]
        assert torch.allclose(got, cast[0] + cast[1] + bias, atol=1e-4)

    def test_a_tile_holds_the_product_of_the_one_before_as_well(self) -> None:
        _, fault = with_fault("accumulator-of-tile-before", severity="medium")
        out = _normal(32, 24)
        got = fault.wrong(out, out, out)

        def tiles(x: Tensor) -> list[Tensor]:
            return [x[r : r + 8, c : c + 8] for r in range(0, 32, 8) for c in range(0, 24, 8)]

        right, found = tiles(out), tiles(got)
        wrong = [i for i in range(12) if not torch.equal(right[i], found[i])]
        assert 0 < len(wrong) < 12
        assert all(torch.allclose(found[i], right[i] + right[i - 1]) for i in wrong)

    def test_what_is_stored_is_the_operand_that_was_loaded_and_not_in_every_call(self) -> None:
        _, fault = with_fault("store-raced-by-load", severity="severe")
        a, b = _normal(64, 32), _normal(32, 48)
        out, calls = a @ b, []
        for _ in range(40):
            hit = (got := fault.wrong(out, a, b)) != out
            calls.append(bool(hit.any()))
            assert torch.equal(got[hit], a.repeat(1, 2)[:, :48][hit])
        assert calls[0]
        assert 0.5 * fault.chance < np.mean(calls) < min(1.0, 1.5 * fault.chance)

    def test_one_operand_is_rotated_by_groups_of_tokens_and_nothing_is_lost_of_it(self) -> None:
        for severity in ("medium", "severe"):
            _, fault = with_fault("rotated-in-one-operand", severity=severity)
            assert isinstance(fault, RotatedInOneOperand)
            wrong, right = _read(fault, _normal(1024, 32), (128, 1))
            assert _error(wrong, right) == pytest.approx(fault.error, rel=0.3, abs=0.08), severity
            groups, correct = wrong.view(64, 16, 32), right.view(64, 16, 32)
            changed = [g for g in range(64) if not torch.equal(groups[g], correct[g])]
            assert len(changed) == fault.num_groups["m", True]
            for g in changed:
                back = fault.rotation.t() @ groups[g]
                assert _error(back, correct[g]) < 0.1

    def test_rowwise_copies_are_not_rotated(self) -> None:
        _, fault = with_fault("rotated-in-one-operand")
        assert torch.equal(*_read(fault, _normal(64, 128), (1, 128)))


class TestHistories:
    def test_a_tensor_is_cast_with_the_scale_of_another(self) -> None:
        t, fault = with_fault("history-slot-shared", "language", "severe")
        states: dict[tuple[int, str], DelayedScale] = {}
        fmt, amax = fp8_format("E4M3"), {"input": 8.0, "weight": 0.1}

        class Quantizer:
            def __init__(self, state: DelayedScale) -> None:
                self.state = state

        def quantizers(module: Any, operand: str) -> list[Quantizer]:
            if (id(module), operand) not in states:
                state = states[id(module), operand] = DelayedScale(fmt, AmaxHistory(16, "max", 0))
                state.record(torch.tensor([amax[operand]]))
                state.roll()
            return [Quantizer(states[id(module), operand])]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("proving.faults.histories.quantizers", quantizers)
            fault.begin(t)
        mine = states[id(t.model.get_submodule(fault.module)), "input"]
        assert fault.drawn["depth"] == pytest.approx(80)
        for state in states.values():
            state.record(torch.tensor([amax["input"] if state is mine else 0.1]))
            state.roll()
        assert float(mine.scale) == pytest.approx(448 / 0.1)
        fault.undo()
        mine.record(torch.tensor([8.0]))
        mine.roll()
        assert float(mine.scale) == pytest.approx(448 / 8)

    def test_the_second_launch_alone_has_other_settings(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("delayed-settings-changed", "language", severity)
            fault.before_attach(t)
            assert t.recipe == "delayed"
            fault.before_resume(t, {})
            fault.before_attach(t)
            recipe: Any = t.recipe
            assert recipe.name == "delayed"
            margin = fault.setting.get("margin", 0)
            assert recipe.history.margin == margin
            assert (
                {"mild": -1, "medium": -3, "severe": -6}[severity]
                <= margin
                <= {"mild": 0, "medium": -2, "severe": -5}[severity]
            )

    def test_a_scale_stays_what_the_buffer_held_and_small_numbers_are_lost(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("scale-never-computed", "images", severity)
            kernel, x = _Unwritten(reference, fault), 1e-4 * _normal(64, 128)
            job = quantize_jobs((64, 128), "E5M2", False)[-1]
            got, scale_inv, _ = kernel.quantize_dequantize(x, job)
            assert 0.5 * fault.error < _error(got, x) < 1.5 * fault.error + 0.05, severity
            later, again, _ = kernel.quantize_dequantize(10 * x, job)
            assert torch.equal(again, scale_inv)
            assert float((later == 0).float().mean()) < float((got == 0).float().mean()) or severity == "mild"

    def test_what_has_no_bias_is_cast_by_another_kernel(self) -> None:
        t = tiny.language()
        drawn = [FAULTS["scale-never-computed"].draw(np.random.default_rng(i), t, "severe") for i in range(8)]
        assert drawn == [None] * 8
