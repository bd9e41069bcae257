"""What holds of every quantiser: silent on right ones at every size, loud on each way to be wrong."""

from __future__ import annotations

import pytest
import torch
from canary import faults
from canary.quantised_operands import BLOCK, COLUMN, REFERENCE, ROW, operand, quantised, spec_of

from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.quantize.self_consistency import Reads, check_quantiser
from fp8watch.recipe import OperandRecipe


def counts(found):
    return [*found.elements.tolist(), *found.tiles.tolist()[1:]]  # NaN, off the grid, zeroed, wrong scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("tile", [ROW, COLUMN, BLOCK])
def test_a_right_quantiser_is_right_wherever_it_is_looked_at(tile, power_2, fmt, dtype):
    x = operand(dtype=dtype)
    for reads in quantised(x, tile, fmt, power_2):
        for phase in range(12):
            found = check_quantiser(x, reads, spec_of(tile, fmt, power_2), near=torch.tensor([1, 1]), phase=phase)
            assert counts(found) == [0, 0, 0, 0]
            assert found.fault_tile.tolist() == [-1, -1]
            assert tile == BLOCK or found.tiles[0] > 20


def test_an_eps_is_part_of_the_formula():
    x = operand() * 1e-6
    for reads in quantised(x, ROW, eps=1e-3):
        assert counts(check_quantiser(x, reads, spec_of(ROW, eps=1e-3))) == [0, 0, 0, 0]
        assert sum(counts(check_quantiser(x, reads, spec_of(ROW)))) > 0


@pytest.mark.parametrize("tile", [ROW, COLUMN, BLOCK])
def test_a_scale_one_octave_off_is_wrong_in_both_forms(tile):
    x = operand(dtype=torch.bfloat16).nan_to_num(0, 0, 0)
    codes, values = quantised(x, tile)
    off = Reads(codes.data, codes.scale_inv * 2, tile), Reads(values.data * 2, None, tile)
    for reads in off:
        found = check_quantiser(x, reads, spec_of(tile))
        assert found.tiles[2] == found.tiles[0] > 0
        assert counts(found)[:3] == [0, 0, 0]
    one = codes.scale_inv.clone()
    one[0, 0] *= 2
    assert check_quantiser(x, Reads(codes.data, one, tile), spec_of(tile)).fault_tile.tolist() == [0, 0]
    shape = Reads(codes.data, codes.scale_inv.new_ones(3, 5), tile)
    assert check_quantiser(x, shape, spec_of(tile)).tiles[2] > 0


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize(
    ("fault", "which"),
    [(faults.zeroed, 2), (faults.elsewhere, 1), (faults.garbage, 1)],
    ids=["zero", "elsewhere", "garbage"],
)
def test_each_way_to_be_wrong_has_its_count(fault, which, form):
    x = operand().nan_to_num(0, 0, 0)
    for tile in (ROW, COLUMN, BLOCK):
        reads = quantised(x, tile)[form]
        found = counts(check_quantiser(x, reads._replace(data=fault(reads.data, None)[0]), spec_of(tile)))
        assert found[which] > 0, tile


def test_a_nan_of_a_finite_element_is_counted_and_one_of_a_nan_is_not():
    x = operand()
    codes, values = quantised(x, ROW)
    broken = codes.data.view(torch.uint8).clone()
    broken[0, 0] = 0x7F
    found = check_quantiser(x, codes._replace(data=broken.view(torch.float8_e4m3fn)), spec_of(ROW))
    assert counts(found) == [1, 0, 0, 0]
    broken = values.data.clone()
    broken[-1, -1] = torch.nan
    found = check_quantiser(x, values._replace(data=broken), spec_of(ROW))
    assert counts(found)[0] > 0
    assert found.fault_tile.tolist() == [259, 2]


def test_what_stands_in_a_tile_of_zeros_is_off_the_grid():
    x = torch.zeros(4, 128)
    x[0] = 1
    codes, _ = quantised(x, ROW)
    broken = codes.data.view(torch.uint8).clone()
    broken[2, 5] = 0x30
    found = check_quantiser(x, codes._replace(data=broken.view(torch.float8_e4m3fn)), spec_of(ROW))
    assert counts(found)[1] > 0
    assert found.fault_tile.tolist() == [2, 0]


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
def test_a_code_that_is_the_next_one_is_off_the_grid(fmt):
    x = operand().nan_to_num(0, 0, 0)
    codes, _ = quantised(x, ROW, fmt)
    broken = codes.data.view(torch.uint8).clone()
    broken[0, 1] ^= 1  # its neighbour, above or below
    found = check_quantiser(x, codes._replace(data=broken.view(codes.data.dtype)), spec_of(ROW, fmt))
    assert counts(found) == [0, 1, 0, 0]
    assert found.fault_tile.tolist() == [0, 0]


def test_the_tile_that_is_named_is_looked_at():
    x = operand(4000, 300)
    codes, _ = quantised(x, ROW)
    broken = codes.data.view(torch.uint8).clone()
    broken[1234] = 0
    reads = codes._replace(data=broken.view(torch.float8_e4m3fn))
    assert counts(check_quantiser(x, reads, spec_of(ROW))) == [0, 0, 0, 0]
    assert check_quantiser(x, reads, spec_of(ROW), near=torch.tensor([1234, 0])).fault_tile.tolist() == [1234, 0]


def test_a_clip_under_a_scale_with_a_history_is_no_fault():
    x = operand().nan_to_num(0, 0, 0)
    spec, scale = OperandRecipe(None, "E4M3", False, 0.0, "delayed"), torch.tensor([[448.0 / 2.0]])
    job = quantize_jobs(tuple(x.shape), "E4M3", False, 0.0, invariant=False)[0]
    values, _, _ = REFERENCE.quantize_dequantize(x, job, scale)
    assert values.abs().max() < x.abs().max()
    for phase in range(8):
        assert counts(check_quantiser(x, Reads(values, None, tuple(x.shape)), spec, scale, phase=phase)) == [0, 0, 0, 0]
    stale = check_quantiser(x, Reads(values, None, tuple(x.shape)), spec, scale * 3)
    assert sum(counts(stale)) > 0
