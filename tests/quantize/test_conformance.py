"""Codes, scales and dequantised values equal the oracle's bit by bit, for every kind of operand."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
import torch
from quantize import oracle
from quantize.backends import backends, each_backend, scale_of
from quantize.epsilons import EPS
from quantize.operands import DTYPES, KINDS, SHAPES, TILES, case, operand

from fp8watch.kernels import Backend, reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

CASES = list(itertools.product(KINDS, DTYPES, EPS))


def same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    """Assert equal bits; of NaN there is one."""
    ours = got.numpy()
    where = np.argwhere(~((ours.view(np.int32) == expected.view(np.int32)) | (np.isnan(ours) & np.isnan(expected))))
    assert where.size == 0, f"at {where[0]}: {ours[tuple(where[0])]!r}, expected {expected[tuple(where[0])]!r}"


def check(
    x: torch.Tensor, tile: tuple[int, int], fmt: str, power_2: bool, eps: float, dtype: str, **options: object
) -> None:
    """Compare one operand with the oracle."""
    scale, guard = options.get("scale"), bool(options.get("guard", True))
    given = scale.numpy() if isinstance(scale, torch.Tensor) else None
    expected = oracle.quantize(x.float().numpy(), tile, fmt, power_2, eps, dtype, given, guard)
    for backend in backends():
        check_backend(backend, expected, x, tile, fmt, power_2, eps, scale, guard)


def check_backend(
    backend: Backend,
    expected: oracle.Result,
    x: torch.Tensor,
    tile: tuple[int, int],
    fmt: str,
    power_2: bool,
    eps: float,
    scale: torch.Tensor | None,
    guard: bool,
) -> None:
    """Compare what one backend makes of an operand: codes, values, and dequantised codes."""
    data, scale_inv, stats = backend.quantize(
        x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, force_scale_1=guard), scale
    )
    codes = data.view(torch.uint8).numpy()
    where = np.argwhere(codes != expected.codes)
    assert where.size == 0, (
        f"{backend.NAME}: {len(where)} codes differ, first at {where[0]}: {codes[tuple(where[0])]:#x}, "
        f"expected {expected.codes[tuple(where[0])]:#x} for {x[tuple(where[0])]}"
    )
    same_bits(scale_inv, expected.scale_inv)
    same_bits(stats.amax, expected.amax)
    if stats.tiles is not None:
        same_bits(stats.tiles.scale, expected.scale)
    values, again, none = backend.quantize_dequantize(
        x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, force_scale_1=guard, stats=False), scale
    )
    same_bits(values, expected.dequantized)
    same_bits(again, expected.scale_inv)
    same_bits(backend.dequantize(data, scale_inv, tile), expected.dequantized)
    assert none is None
    assert data.is_contiguous()
    assert values.is_contiguous()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("power_2", [True, False])
def test_equals_the_oracle(tile: tuple[int, int], fmt: str, power_2: bool) -> None:
    shapes = SHAPES[tile]
    for kind, dtype, eps in CASES:
        shape = shapes[zlib.crc32(f"{kind} {dtype} {fmt} {power_2} {eps}".encode()) % len(shapes)]
        with case(kind, dtype, shape, f"eps {eps}"):
            check(operand(kind, dtype, shape), tile, fmt, power_2, eps, dtype)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("factor", [1.0, 0.25, 2.0, 1024.0, 1e-30, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("kind", ["normal", "nan-and-inf", "zeros"])
def test_a_given_scale_is_used_as_it_is(kind: str, factor: float, fmt: str) -> None:
    x = operand(kind, "float32", (5, 300))
    scale = scale_of(x, (1, 128), FORMATS[fmt], True) * factor
    check(x, (1, 128), fmt, True, 0.0, "float32", scale=scale)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "zeros", "inf", "nan", "subnormal"])
@pytest.mark.parametrize("tile", TILES)
def test_without_the_guard_zero_tiles_become_nan(kind: str, tile: tuple[int, int], fmt: str) -> None:
    check(operand(kind, "float32", (5, 300)), tile, fmt, True, 0.0, "float32", guard=False)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_is_right_at_every_midpoint_and_beside_it(fmt: str) -> None:
    values = oracle.TABLES[fmt][: oracle.NUM_FINITE[fmt]]
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    points = np.minimum(points, np.float32(values[-1]))
    got = reference.round_to_grid(torch.from_numpy(points), FORMATS[fmt])
    same_bits(got, oracle.TABLES[fmt][oracle.encode(points, fmt)].astype(np.float32))
    # torch's own cast agrees below the limit, on every device that it has
    same_bits(torch.from_numpy(points).to(FORMATS[fmt].dtype).float(), got.numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype: str) -> None:
    base = operand("wide", dtype, (140, 140))
    views = {
        "transposed": operand("wide", dtype, (140, 60)).t(),
        "sliced": base[3:100:2, 5:],
        "expanded": base[:1].expand(40, 140),
        "expanded column": base[:, :1].expand(140, 130),
        "flipped": base.flip(0),
    }
    for view in views.values():
        check(view, (1, 128), "E4M3", True, 0.0, dtype)
        check(view, (128, 128), "E4M3", False, 0.0, dtype)


@each_backend
def test_columnwise_is_rowwise_of_the_transpose(backend: Backend) -> None:
    x = operand("wide", "float32", (300, 140))
    data, scale_inv, _ = backend.quantize(x, QuantizeJob((128, 1), FORMATS["E4M3"], True, 0.0))
    data_t, scale_inv_t, _ = backend.quantize(x.t(), QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))
    assert torch.equal(data.view(torch.uint8), data_t.view(torch.uint8).t())
    assert torch.equal(scale_inv, scale_inv_t.t())


@each_backend
def test_a_transposed_weight_has_the_same_codes_and_scales(backend: Backend) -> None:
    w = operand("normal", "bfloat16", (300, 140))
    data, scale_inv, _ = backend.quantize(w, QuantizeJob((128, 128), FORMATS["E4M3"], True, 0.0))
    data_t, scale_inv_t, _ = backend.quantize(w.t(), QuantizeJob((128, 128), FORMATS["E4M3"], True, 0.0))
    assert torch.equal(data.view(torch.uint8), data_t.view(torch.uint8).t())
    assert torch.equal(scale_inv, scale_inv_t.t())


@each_backend
def test_the_operand_is_left_alone(backend: Backend) -> None:
    x = operand("nan-and-inf", "float32", (128, 128)).requires_grad_()
    before = x.detach().clone()
    out = backend.quantize_dequantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[0]
    assert torch.equal(x.detach().view(torch.int32), before.view(torch.int32))
    assert not out.requires_grad


def test_enough_cases() -> None:
    assert len(CASES) * len(TILES) * len(FORMATS) * 2 >= 1000
