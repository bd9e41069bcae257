"""Every backend equals the reference, on operands that a machine makes up: shapes, strides, types, special values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from quantize.backends import USABLE, backends
from quantize.operands import DTYPES, KINDS, operand
from quantize.same_result import assert_same
from quantize.slab_rows import row_of

from fp8watch.kernels import reference, resolve
from fp8watch.kernels.backend import quantize_dequantize_both
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

OTHERS = [name for name in USABLE if name != "reference"]
TILES = st.one_of(
    st.sampled_from([(1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, 16), (16, 1)]),
    st.tuples(st.integers(1, 70), st.integers(1, 150)),
)
PLAIN = ["normal", "wide", "gradient", "outliers", "zeros", "all-zero", "subnormal", "huge", "ties", "powers"]


@st.composite
def operands(draw: st.DrawFn, kinds: list[str]) -> torch.Tensor:
    """An operand of up to some thousand elements, some of whose cells are special, seen through some strides."""
    rows, columns = draw(
        st.one_of(
            st.tuples(st.integers(1, 9), st.integers(1, 2200)), st.tuples(st.integers(1, 300), st.integers(1, 90))
        )
    )
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    view = draw(st.sampled_from(["plain", "transposed", "sliced", "stepped", "expanded", "column"]))
    base = operand(
        draw(st.sampled_from(kinds)),
        dtype,
        (columns, rows) if view == "transposed" else (rows, columns),
        draw(st.integers(0, 9)),
    )
    for _ in range(draw(st.integers(0, 3))):
        value = draw(
            st.sampled_from(
                [0.0, -0.0, 1e-30, 3e38, -448.0, *([np.nan, np.inf, -np.inf] if len(kinds) == len(KINDS) else [])]
            )
        )
        base.view(-1)[draw(st.integers(0, base.numel() - 1))] = value
    if view == "transposed":
        return base.t()
    if view == "sliced":
        return base[rows // 3 :, columns // 4 :]
    if view == "stepped":
        return base[::2, ::3]
    if view == "expanded":
        return base[:1].expand(rows, columns)
    if view == "column":
        return base[:, :1].expand(rows, min(columns, 300))
    return base


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(), tile=TILES, fmt=st.sampled_from(sorted(FORMATS)), power_2=st.booleans(), force_scale_1=st.booleans(),
    eps=st.sampled_from([0.0, 1e-30, 1e-12, 0.25, 1e30]), stats=st.booleans(), heavy=st.booleans(), values=st.booleans(),
)  # fmt: skip
def test_computed_scales(name: str, data: st.DataObject, tile: Any, fmt: str, values: bool, **how: Any) -> None:
    x = data.draw(operands(sorted(KINDS)))
    function = "quantize_dequantize" if values else "quantize"
    note(f"{tuple(x.shape)} {x.stride()} {x.dtype} tile={tile} {fmt} {function} {how}")
    power_2, eps = how.pop("power_2"), how.pop("eps")
    expected = getattr(reference, function)(x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, **how))
    assert_same(
        getattr(resolve(name, "cpu"), function)(x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, **how)), expected
    )


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(), tile=TILES, fmt=st.sampled_from(sorted(FORMATS)), power_2=st.booleans(), invariant=st.booleans(),
    exponents=st.tuples(st.integers(-40, 30), st.integers(0, 12)), heavy=st.booleans(), values=st.booleans(),
    special=st.sampled_from([None, 0.0, np.inf, np.nan, 3e38, 1e-44]),
)  # fmt: skip
def test_given_scales(
    name: str,
    data: st.DataObject,
    tile: Any,
    fmt: str,
    power_2: bool,
    exponents: Any,
    values: bool,
    special: Any,
    **how: Any,
) -> None:
    x = data.draw(operands(sorted(KINDS)))
    num_tiles = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
    low, width = exponents
    scale = 2.0 ** torch.randint(low, low + width + 1, num_tiles, generator=torch.Generator().manual_seed(low)).float()
    scale *= 1.0 if power_2 else 1.37
    if special is not None:
        scale[-1, -1] = special
    function = "quantize_dequantize" if values else "quantize"
    expected = getattr(reference, function)(x, QuantizeJob(tile, FORMATS[fmt], power_2, 0.0, **how), scale)
    assert_same(
        getattr(resolve(name, "cpu"), function)(x, QuantizeJob(tile, FORMATS[fmt], power_2, 0.0, **how), scale),
        expected,
    )


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128)])
def test_a_product_that_vanishes_under_an_infinite_scale_inv_adds_no_noise(name: str, tile: tuple[int, int]) -> None:
    x, fmt = torch.full((128, 128), 1.7e32), FORMATS["E4M3"]
    scale = torch.full((128 // tile[0], 128 // tile[1]), 1e-44)  # its reciprocal is Inf in float32
    expected = reference.quantize(x, QuantizeJob(tile, fmt, False, 0.0), scale)
    assert expected[2] is not None
    assert expected[2].summary()["noise_energy"] == 0
    assert_same(resolve(name, "cpu").quantize(x, QuantizeJob(tile, fmt, False, 0.0), scale), expected)


@pytest.mark.parametrize("name", USABLE)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    length=st.sampled_from([128, 32, 7]),
    power_2=st.booleans(),
    given_scales=st.booleans(),
    heavy=st.booleans(),
)
def test_both_directions_are_the_two_directions(
    name: str, data: st.DataObject, length: int, power_2: bool, given_scales: bool, heavy: bool
) -> None:
    x = data.draw(operands(sorted(KINDS)))
    tiles = (1, length), (length, 1)
    scales = None
    if given_scales:
        scales = tuple(torch.full((-(-x.shape[0] // m), -(-x.shape[1] // k)), 2.0 + m) for m, k in tiles)
    both = quantize_dequantize_both(
        resolve(name, "cpu"), x, QuantizeJob((1, length), FORMATS["E4M3"], power_2, 0.0, heavy=heavy), scales
    )
    for tile, got, scale in zip(tiles, both, scales or (None, None), strict=True):
        expected = reference.quantize_dequantize(
            x, QuantizeJob(tile, FORMATS["E4M3"], power_2, 0.0, heavy=heavy), scale
        )
        assert_same(got, expected)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize(
    ("tile", "shape"),
    [
        ((1, 128), (70, 2176)),
        ((128, 1), (300, 1100)),
        ((128, 128), (300, 700)),
        ((1, 32), (33, 1024)),
        ((300, 1100), (300, 1100)),
    ],
)
def test_large_operands(kind: str, tile: tuple[int, int], shape: tuple[int, int]) -> None:
    """Long enough for every loop: groups of tiles, stretches of columns, and what is left over of each."""
    dtype = sorted(DTYPES)[(len(kind) + tile[0]) % 3]
    x = operand(kind, dtype, shape)
    for power_2 in (True, False):
        expected = reference.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], power_2, 0.0))
        for backend in backends():
            assert_same(backend.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], power_2, 0.0)), expected)


def test_every_element_of_two_byte_types_and_every_rounding() -> None:
    """All 65536 numbers of bfloat16 and of float16, in tiles of their own magnitude."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(512, 128)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)
        for tile in ((1, 128), (1, 16), (64, 1)):
            expected = reference.quantize(x, QuantizeJob(tile, FORMATS["E5M2"], True, 0.0))
            for backend in backends():
                assert_same(backend.quantize(x, QuantizeJob(tile, FORMATS["E5M2"], True, 0.0)), expected)


@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128), (3, 50), (700, 1200)])
@pytest.mark.parametrize("values", [True, False])
def test_the_number_of_threads_changes_no_bit(tile: tuple[int, int], values: bool) -> None:
    x = operand("nan-and-inf", "float32", (700, 1200))
    x[100:] = operand("wide", "float32", (600, 1200))
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            for backend in (b for b in backends() if b.NAME == "cpu"):
                function = backend.quantize_dequantize if values else backend.quantize
                out, scale_inv, stats = function(x, QuantizeJob(tile, FORMATS["E4M3"], False, 0.0))
                assert stats is not None
                found.append(
                    [
                        *(t.contiguous().view(torch.uint8).numpy().tobytes() for t in (out, scale_inv, stats.amax)),
                        row_of(stats, 0).tobytes(),
                    ]
                )
        finally:
            torch.set_num_threads(before)
    assert all(one == found[0] for one in found)
