"""Each veiled fault of a kernel or a scale changes what its text says, by as much, and leaves the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proving import tiny
from proving.faults._kernel import KernelFault
from proving.faults._sites import WrongKernel
from proving.faults.buffers import SavedWithOneScale, _NeverZeroed
from proving.faults.groups import RowsOfNextGroup
from proving.faults.packing import CodesReadAsIntegers, PairsSwapped
from proving.placed import with_fault
from proving.training import SEVERITIES
from torch import Tensor

from fp8watch.kernels import reference
from fp8watch.numerics.quantize_job import quantize_jobs


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
