"""Each concealed fault of a kernel or a scale changes what its text says, by as much, and leaves the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from proving import tiny
from proving.faults._kernel import KernelFault
from proving.faults._sites import OtherScale, WrongKernel
from proving.faults.edges import PaddingCounted, RaggedTileOverread, _Overread
from proving.faults.ledgers import AmaxInFewBits
from proving.faults.stashes import ReloadNotAwaited, WgradOfCallBefore, inputs_of
from proving.faults.swizzles import ScalesOfOtherDirection, SwizzleOfOtherWidth
from proving.placed import with_fault
from proving.training import SEVERITIES
from torch import Tensor

from fp8watch.kernels import reference
from fp8watch.numerics.quantize_job import quantize_jobs


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _read(fault: KernelFault, x: Tensor, tile: tuple[int, int] = (1, 128)) -> tuple[Tensor, Tensor]:
    """What a GEMM reads of x, wrong and right."""
    job = quantize_jobs(tile, "E4M3", True)[-1]
    kernel = WrongKernel(reference, lambda operand: fault.spoil("m", operand))
    return kernel.quantize_dequantize(x, job)[0], reference.quantize_dequantize(x, job)[0]


def _error(wrong: Tensor, right: Tensor) -> float:
    return float((wrong - right).norm() / right.norm())


class TestSwizzles:
    def test_chunks_change_places_and_each_row_keeps_what_it_has(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("swizzle-of-other-width", severity=severity)
            assert isinstance(fault, SwizzleOfOtherWidth)
            fault.columnwise = (False,)
            wrong, right = _read(fault, _normal(512, 256))
            assert torch.equal(wrong.sort(1).values, right.sort(1).values)
            chunks = (wrong != right).unflatten(1, (-1, 16))
            assert bool(((chunks.float().mean(2) > 0.5) | ~chunks.any(2)).all())  # whole ones
            assert _error(wrong, right) == pytest.approx(fault.error, rel=0.15, abs=0.05), severity

    def test_a_pattern_is_that_of_hardware_and_the_other_one_is_narrower(self) -> None:
        rows = torch.arange(8)
        assert SwizzleOfOtherWidth.pattern(rows, 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert SwizzleOfOtherWidth.pattern(rows, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert SwizzleOfOtherWidth.pattern(rows, 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        assert SwizzleOfOtherWidth.pattern(rows, 1).tolist() == [0] * 8
        _, fault = with_fault("swizzle-of-other-width")
        fault.narrower = 3
        codes = (torch.arange(8 * 128) // 16 % 8).view(8, 128).to(torch.uint8)
        got = fault.read(codes, False)[:, ::16]
        assert got[0].tolist() == list(range(8))
        assert got[3].tolist() == [3, 2, 1, 0, 7, 6, 5, 4]
        assert torch.equal(fault.read(codes.t().contiguous(), True), fault.read(codes, False).t())
        assert fault.drawn["written"] == 128
        assert fault.drawn["taken"] == 16

    def test_columns_are_read_with_the_scales_of_rows(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("scales-of-other-direction", severity=severity)
            assert isinstance(fault, ScalesOfOtherDirection)
            assert fault.columnwise == (True,)
            x = _normal(256, 256) * torch.exp2(_normal(256, 1, seed=1).round())  # rows of other sizes
            wrong, right = _read(fault, x, (128, 1))
            rowwise, columnwise = (
                reference.quantize(x, quantize_jobs(tile, "E4M3", True)[-1])[1] for tile in ((1, 128), (128, 1))
            )
            ratio = rowwise.repeat_interleave(128, 1) / columnwise.repeat_interleave(128, 0)
            changed = wrong != right
            assert changed.any()
            assert torch.equal(wrong[changed], (right * ratio)[changed])
            most = _error(right * ratio, right)
            assert _error(wrong, right) == pytest.approx(min(fault.error, most), rel=0.2, abs=0.05), severity

    def test_where_one_copy_serves_both_there_is_no_place_for_it(self) -> None:
        with pytest.raises(AssertionError, match="no place"):
            with_fault("scales-of-other-direction", "delayed")


class TestEdges:
    @pytest.mark.parametrize(
        ("tile", "shape", "at"), [((1, 128), (64, 192), 128), ((128, 1), (192, 64), 128), ((1, 32), (64, 48), 32)]
    )
    def test_the_last_tile_is_flushed_and_all_others_are_right(
        self, tile: tuple[int, int], shape: tuple[int, int], at: int
    ) -> None:
        for error in (0.1, 0.3, 0.5):
            _, fault = with_fault("ragged-tile-overread", severity="mild")
            assert isinstance(fault, RaggedTileOverread)
            fault.error, fault.columnwise = error, tile[1] == 1
            kernel, x, job = _Overread(reference, fault), _normal(*shape), quantize_jobs(tile, "E4M3", True)[-1]
            got, scale_inv, _ = kernel.quantize_dequantize(x, job)
            right, right_inv, _ = reference.quantize_dequantize(x, job)
            along = 0 if fault.columnwise else 1
            assert torch.equal(got.narrow(along, 0, at), right.narrow(along, 0, at))
            assert not torch.equal(scale_inv, right_inv)
            assert _error(got, x) == pytest.approx(error, rel=0.35), error
            again = kernel.quantize_dequantize(3 * x, job)[1]
            assert float((again / reference.quantize(3 * x, job)[1]).max()) == 2.0**fault.octaves

    def test_what_divides_evenly_and_the_other_copy_are_left_alone(self) -> None:
        _, fault = with_fault("ragged-tile-overread", severity="mild")
        fault.columnwise = False
        kernel, job = _Overread(reference, fault), quantize_jobs((1, 128), "E4M3", True)[-1]
        for x, of in ((_normal(64, 256), job), (_normal(192, 64), job.transposed()), (torch.zeros(8, 192), job)):
            assert torch.equal(kernel.quantize_dequantize(x, of)[0], reference.quantize_dequantize(x, of)[0])

    def test_only_tiles_that_are_ragged_and_hold_enough_are_places(self) -> None:
        t = tiny.language()  # 32 or 64 columns, 48 rows
        places = RaggedTileOverread.places(t, 0.9)
        assert set(places) == {(o, c) for o in ("input", "weight", "grad_output") for c in (False, True)} - {
            ("weight", True)
        }
        t.recipe = "mxfp8"
        # 16 of 48 rows, and keys and values of 16 columns
        assert set(RaggedTileOverread.places(t, 0.5)) == {
            ("input", True),
            ("grad_output", True),
            ("grad_output", False),
        }
        assert set(RaggedTileOverread.places(t, 0.7)) == {("grad_output", False)}
        t.recipe = "current"
        assert not RaggedTileOverread.places(t, 0.1)

    def test_copies_of_the_last_row_count_for_the_weight(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("padding-counted", severity=severity)
            assert isinstance(fault, PaddingCounted)
            g, x = _normal(256, 32), _normal(256, 64, seed=1)
            g[-3:] = 0.0  # not scored
            right = g.t() @ x
            got = fault.wrong(right, g.t(), x)
            assert torch.allclose(got, right + fault.num * torch.outer(g[-4], x[-4]), atol=1e-4)
            assert _error(got, right) == pytest.approx(fault.error, rel=0.5), severity
            num = fault.num
            fault.wrong(2 * right, 2 * g.t(), x)
            assert fault.num == num
            assert torch.equal(fault.wrong(0 * right, 0 * g.t(), x), 0 * right)


class TestLedgers:
    @pytest.mark.parametrize("power_2", [True, False])
    @pytest.mark.parametrize("form", ["E4M3", "E5M2"])
    def test_an_amax_is_cut_off_and_never_makes_more_room(self, form: str, power_2: bool) -> None:
        shares = []
        for num_bits in (0, 1, 2, 3, 4):
            _, fault = with_fault("amax-in-few-bits", "current")
            assert isinstance(fault, AmaxInFewBits)
            fault.num_bits = num_bits
            x, job = _normal(512, 128), quantize_jobs((1, 128), form, power_2)[-1]
            x[3] = 0.0
            _, got, _ = OtherScale(reference, fault.of_kept, unrounded=True).quantize_dequantize(x, job)
            _, right, _ = reference.quantize_dequantize(x, job)
            ratio = right / got
            assert float(ratio.min()) == pytest.approx(1.0, abs=1e-6)
            assert float(ratio[3]) == pytest.approx(1.0)
            if power_2:
                assert set(ratio.flatten().tolist()) <= {1.0, 2.0}
            else:
                assert float(ratio.max()) < 1 + 2.0**-num_bits
                kept = job.fmt.max_finite * got[got != 1.0].double()
                mantissa = torch.frexp(kept)[0] * 2.0 ** (num_bits + 1)
                assert torch.allclose(mantissa, mantissa.round(), atol=1e-4)
            shares.append(float((ratio > 1.0001).float().mean()))
        assert shares == sorted(shares, reverse=True)
        assert shares[2] > (0.01 if power_2 else 0.5)

    def test_bits_are_those_of_the_severity(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("amax-in-few-bits", "current", severity)
            assert fault.num_bits in AmaxInFewBits.bits[severity]
            assert fault.expected.modes[0] == "scale-rounding"

    def test_under_scales_that_are_powers_of_two_it_is_mild(self) -> None:
        for severity in ("medium", "severe"):
            with pytest.raises(AssertionError, match="no place"):
                with_fault("amax-in-few-bits", "language", severity)
        for seed in range(20):
            assert with_fault("amax-in-few-bits", "language", "mild", seed)[1].operand != "weight"


class TestStashes:
    def test_rows_are_those_of_the_call_before(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("wgrad-of-call-before", severity=severity)
            assert isinstance(fault, WgradOfCallBefore)
            calls = [_normal(1024, 64, seed=seed) for seed in range(4)]
            nothing: Any = None
            assert torch.equal(fault.popped("m", calls[0], nothing, nothing), calls[0])
            assert torch.equal(fault.popped("m", calls[1], nothing, nothing), calls[1])
            fault.begin(t)
            got = fault.popped("m", calls[2], nothing, nothing)
            rows = (got != calls[2]).any(1)
            assert torch.equal(got[rows], calls[1][rows])
            assert _error(got, calls[2]) == pytest.approx(fault.error, rel=0.1, abs=0.05), severity
            later = fault.popped("m", calls[3], nothing, nothing)
            assert torch.equal(later[rows], calls[2][rows])
            assert torch.equal(later[~rows], calls[3][~rows])
            fault.undo()
            assert torch.equal(fault.popped("m", calls[0], nothing, nothing), calls[0])

    def test_rows_of_an_input_are_those_of_another_layer(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("reload-not-awaited", severity=severity)
            assert isinstance(fault, ReloadNotAwaited)
            fault.chance, fault.start = 1.0, 0.5
            g, x, other = _normal(256, 32), _normal(256, 64, seed=1), _normal(256, 64, seed=2)
            right = g.t() @ x
            assert torch.equal(fault.reloaded(right, g.t(), x), right)
            assert torch.equal(fault.left(right, g.t(), other), right)
            got = fault.reloaded(right, g.t(), x)
            num = fault.drawn["num_rows"]
            came_back = x.clone()
            came_back[128 : 128 + num] = other[128 : 128 + num]
            came_back[: max(0, num - 128)] = other[: max(0, num - 128)]
            assert torch.allclose(got, g.t() @ came_back, atol=1e-4)
            assert _error(came_back, x) == pytest.approx(fault.error, rel=0.1, abs=0.03), severity
            fault.chance = 0.0  # from the second call on
            assert torch.equal(fault.reloaded(right, g.t(), x), right)

    def test_a_buffer_is_of_a_layer_whose_input_is_unlike(self) -> None:
        t = tiny.language()
        names = [str(n) for n in t.notes["linears"]]
        read = inputs_of(t, names)
        pairs = ReloadNotAwaited.pairs(t, names, 0.2)
        assert pairs
        for name, following in pairs:
            assert names.index(following) > names.index(name)
            assert _error(read[following], read[name]) > 0.2
        q, k = "layers.1.attention.wq", "layers.1.attention.wk"
        assert torch.equal(read[q], read[k])
        assert (q, k) not in pairs
        assert not ReloadNotAwaited.pairs(t, names, math.inf)

    def test_it_cannot_be_told_whether_fp8_is_the_cause(self) -> None:
        for name in ("wgrad-of-call-before", "reload-not-awaited"):
            _, fault = with_fault(name)
            assert fault.expected.fp8 is None
            assert fault.expected.modules
