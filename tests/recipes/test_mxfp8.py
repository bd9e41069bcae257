"""MX scaling equals the oracle bit by bit, and never saturates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from quantize import oracle
from quantize.operands import DTYPES, KINDS, operand
from recipes.oracles import e8m0_byte, mxfp8

from fp8watch.kernels import reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.quantize import quantize_mxfp8
from fp8watch.quantize.mxfp8 import e8m0_scale, e8m0_scale_inv, e8m0_value

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("kind", "dtype", "fmt", "columnwise"), list(itertools.product(KINDS, DTYPES, FORMATS, (False, True)))
)
def test_equals_the_oracle(kind: str, dtype: str, fmt: str, columnwise: bool) -> None:
    x = operand(kind, dtype, (67, 5) if columnwise else (5, 67))
    along = x.t() if columnwise else x
    codes, exponents, values = mxfp8(along.float().numpy(), fmt)
    got = quantize_mxfp8(x, fmt, columnwise)
    data, scale_inv, restored = got.data, got.scale_inv, got.dequantize()
    if columnwise:
        data, scale_inv, restored = data.t(), scale_inv.t(), restored.t()
    assert np.array_equal(data.view(torch.uint8).numpy(), codes)
    assert scale_inv.dtype == torch.float8_e8m0fnu
    assert np.array_equal(scale_inv.view(torch.uint8).numpy(), exponents)
    same = (restored.numpy() == values) | (np.isnan(restored.numpy()) & np.isnan(values))
    assert same.all()
    if kind not in ("bits", "inf", "nan-and-inf"):
        assert int(got.stats.num_saturated.sum()) == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_exponent_and_the_float_beside_each_power_of_two(fmt: str) -> None:
    largest = np.float32(oracle.LARGEST[fmt])
    with np.errstate(all="ignore"):
        powers = largest * np.float32(2) ** np.arange(-140, 120, dtype=np.float32)
    amax = np.concatenate([powers, np.nextafter(powers, np.float32(INF)), np.nextafter(powers, np.float32(0))])
    amax = np.concatenate([amax, np.float32([0.0, 1e-45, 1e-38, 3.4028235e38, INF, NAN])])
    want = [e8m0_byte(a, fmt) for a in amax]
    byte = e8m0_scale_inv(torch.from_numpy(amax), FORMATS[fmt])
    assert byte.tolist() == want
    finite = (amax > largest * np.float32(2.0**-126)) & np.isfinite(amax)
    # rounded up from the exact quotient: nothing saturates, and no octave is given away
    share = amax[finite].astype(np.float64) / 2.0 ** (np.array(want)[finite] - 127.0)
    assert (share <= largest).all()
    assert (share > largest / 2).all()


def test_values_of_the_bytes() -> None:
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(e8m0_value(byte)[:255], byte.view(torch.float8_e8m0fnu).float()[:255])
    scale = e8m0_scale(byte)
    assert float(scale[0]) == 1.0  # as Transformer Engine encodes it
    assert torch.equal(scale[1:255] * e8m0_value(byte)[1:255], torch.ones(254))
    assert bool(scale[255].isnan())
    assert bool(e8m0_value(byte)[255].isnan())


def test_a_nan_takes_its_tile_along_and_no_other() -> None:
    x = torch.ones(2, 64)
    x[0, 40] = NAN
    got = quantize_mxfp8(x)
    assert got.scale_inv.view(torch.uint8).tolist() == [[119, 0xFF], [119, 119]]  # 1/448 rounded up: 2^-8
    assert got.dequantize()[0, 32:].isnan().all()
    assert torch.equal(got.dequantize()[0, :32], torch.ones(32))
    assert got.stats.num_nan.tolist() == [[0, 1], [0, 0]]


def test_a_zero_tile_has_byte_0_and_an_inf_stays_one() -> None:
    x = torch.zeros(1, 64)
    x[0, 33], x[0, 34] = -INF, 5.0
    got = quantize_mxfp8(x)
    assert got.scale_inv.view(torch.uint8).tolist() == [[0x00, 0xFE]]
    assert got.dequantize()[0, :32].tolist() == [0.0] * 32
    assert got.dequantize()[0, 33:35].tolist() == [-INF, 0.0]


@pytest.mark.parametrize("fmt", FORMATS)
def test_on_ordinary_data_it_is_blockwise_scaling_with_tiles_of_32(fmt: str) -> None:
    x = operand("wide", "float32", (40, 96))
    want, scale_inv, _ = reference.quantize(x, QuantizeJob((1, 32), FORMATS[fmt], True, 0.0))
    got = quantize_mxfp8(x, fmt)
    assert torch.equal(got.data.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(got.scale_inv.float(), scale_inv)
    assert int(got.stats.off_scale.sum()) == 0
