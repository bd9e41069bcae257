"""Codes, scales and values equal the oracle's bit by bit, for every kind of operand: tolerance 0."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from interpreter.inside.compare import check, check_with_the_oracle, same, same_stats
from quantize.epsilons import EPS
from quantize.operands import DTYPES, KINDS, SHAPES, TILES, operand

from fp8watch.kernels import reference, triton
from fp8watch.kernels.triton_fold import EXTREMES, FoldedLines
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

COMBINATIONS = list(itertools.product(DTYPES, TILES, FORMATS, (True, False), EPS))
PANELS = {(1, 128): (3, 256), (128, 1): (128, 5), (128, 128): (128, 128)}


def kinds_side_by_side(dtype: str, tile: tuple[int, int], seed: int) -> torch.Tensor:
    """One operand of every kind in one tensor, no tile of which holds two kinds: one launch quantises all of them."""
    panels = [operand(kind, dtype, PANELS[tile], seed) for kind in KINDS]
    return torch.cat(panels, dim=0 if tile == (1, 128) else 1)


def always_or_long() -> list[Any]:
    """All combinations, most of them with the long tests.

    A kernel is compiled for a tile, a format and a kind of scale: each of these twelve is run with every change, with a
    type of operand and an epsilon that take turns. In the largest epsilon most tiles are clamped.
    """
    always = set()
    for number, (tile, fmt, power_2) in enumerate(itertools.product(TILES, FORMATS, (True, False))):
        turn = number + number // 4
        always.add((list(DTYPES)[turn % 3], tile, fmt, power_2, EPS[turn % 2]))
    return [c if c in always else pytest.param(*c, marks=pytest.mark.long) for c in COMBINATIONS]


@pytest.mark.parametrize(("dtype", "tile", "fmt", "power_2", "eps"), always_or_long())
def test_equals_the_oracle(dtype: str, tile: tuple[int, int], fmt: str, power_2: bool, eps: float) -> None:
    seed = COMBINATIONS.index((dtype, tile, fmt, power_2, eps))
    check_with_the_oracle(kinds_side_by_side(dtype, tile, seed), tile, fmt, power_2, eps, dtype)


def test_each_kernel_is_run_with_every_change() -> None:
    always = [c for c in always_or_long() if not hasattr(c, "marks")]
    assert len(always) == 12
    assert len({c[1:4] for c in always}) == 12
    for one, other in (
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 4),
    ):  # each pair of values is together somewhere
        pairs = {(c[one], c[other]) for c in always}
        assert len(pairs) == len({c[one] for c in always}) * len({c[other] for c in always}), (one, other)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("index", range(7))
def test_ragged_edges(tile: tuple[int, int], index: int) -> None:
    kind = list(KINDS)[(index * 2 + tile[0]) % len(KINDS)]
    check(operand(kind, "bfloat16", SHAPES[tile][index]), tile, "E4M3", True, 0.0, heavy=index % 2 == 0)


@pytest.mark.parametrize(
    "tile", [*TILES, (150, 300), *(pytest.param(t, marks=pytest.mark.long) for t in ((1, 32), (32, 1), (16, 16)))]
)
@pytest.mark.parametrize("kind", ["wide", pytest.param("nan-and-inf", marks=pytest.mark.long)])
def test_many_programs_make_one_record(tile: tuple[int, int], kind: str, small_geometry: None) -> None:
    check(operand(kind, "float16" if kind == "wide" else "float32", (150, 300)), tile, "E4M3", False, 1e-6)


FACTORS = (0.25, 1024.0, 1e-30, 0.0, np.inf, np.nan)


@pytest.mark.parametrize(
    ("factor", "fmt"),
    [  # in turn; the other format of each with the long tests
        pytest.param(factor, fmt, marks=() if (number + other) % 2 else pytest.mark.long)
        for number, factor in enumerate(FACTORS)
        for other, fmt in enumerate(FORMATS)
    ],
)
def test_a_given_scale_is_used_as_it_is(factor: float, fmt: str) -> None:
    x = torch.cat([operand(kind, "float32", (2, 300)) for kind in ("normal", "nan-and-inf", "zeros")])
    for tile in ((1, 128), (6, 300), (128, 128)):
        scale = reference.quantize(x, QuantizeJob(tile, FORMATS[fmt], True, 0.0))[2].tiles.scale * factor
        check(x, tile, fmt, True, 0.0, scale=scale, invariant=tile != (128, 128))


@pytest.mark.parametrize("tile", [*TILES, (75, 300)])
def test_without_the_guard_zero_tiles_become_nan(tile: tuple[int, int]) -> None:
    kinds = ("normal", "zeros", "inf", "nan", "subnormal")
    x = torch.cat([operand(kind, "float32", (15, 300)) for kind in kinds])
    check(x, tile, "E4M3", True, 0.0, force_scale_1=False)
    check(torch.zeros(75, 300), tile, "E5M2", False, 0.0, force_scale_1=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operand_as_one_tile(kind: str) -> None:
    x = operand(kind, "bfloat16", (130, 40))
    check(x, (130, 40), "E5M2" if len(kind) % 2 else "E4M3", False, 0.0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tile_without_a_kernel_is_computed_by_the_reference(fmt: str) -> None:
    check(operand("wide", "float32", (9, 50)), (3, 7), fmt, True, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype: str) -> None:
    base = operand("wide", dtype, (140, 140))
    views = {
        "transposed": operand("wide", dtype, (140, 60)).t(),
        "sliced": base[3:100:2, 5:],
        "expanded": base[:1].expand(40, 140),
        "expanded column": base[:, :1].expand(140, 130),
    }
    for view, tile in zip(views.values(), (*TILES, (1, 128)), strict=True):
        check(view, tile, "E4M3", tile == (1, 128), 0.0, heavy=False)


@pytest.mark.parametrize("kind", ["wide", "nan-and-inf", pytest.param("bits", marks=pytest.mark.long)])
@pytest.mark.parametrize("length", [128, 32])
def test_both_directions_from_one_read_are_those_of_two(kind: str, length: int, small_geometry: None) -> None:
    x = operand(kind, "bfloat16", (130, 150))
    tiles = ((1, length), (length, 1))
    how = (FORMATS["E4M3"], True, 0.0)
    got = triton.quantize_dequantize_both(x, QuantizeJob((1, length), *how))
    for (values, scale_inv, stats), tile in zip(got, tiles, strict=True):
        expected = reference.quantize_dequantize(x, QuantizeJob(tile, *how))
        same(values, expected[0], "values")
        same(scale_inv, expected[1], "scale_inv")
        same_stats(stats, expected[2])


def test_both_directions_with_given_scales() -> None:
    x = operand("outliers", "float32", (140, 150))
    expected = [reference.quantize(x, QuantizeJob(tile, FORMATS["E5M2"], False, 0.0)) for tile in ((1, 128), (128, 1))]
    scales = tuple(e[2].tiles.scale * 2 for e in expected)
    got = triton.quantize_both(x, QuantizeJob((1, 128), FORMATS["E5M2"], False, 0.0), scales)
    for (codes, scale_inv, stats), tile, scale in zip(got, ((1, 128), (128, 1)), scales, strict=True):
        again = reference.quantize(x, QuantizeJob(tile, FORMATS["E5M2"], False, 0.0), scale)
        same(codes, again[0], "codes")
        same(scale_inv, again[1], "scale_inv")
        same_stats(stats, again[2])


def test_columnwise_codes_may_lie_as_a_gemm_reads_them() -> None:
    x = operand("wide", "bfloat16", (200, 300))
    _, (codes, _, _) = triton.quantize_both(
        x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0, stats=False), transposed=True
    )
    assert codes.stride() == (1, 200)
    same(
        codes.contiguous(),
        reference.quantize(x, QuantizeJob((128, 1), FORMATS["E4M3"], True, 0.0, stats=False))[0],
        "codes",
    )
    with pytest.raises(ValueError, match="length=48"):
        triton.quantize_both(x, QuantizeJob((1, 48), FORMATS["E4M3"], True, 0.0))


def test_rounding_is_right_at_every_midpoint_and_beside_it() -> None:
    from quantize import oracle

    for fmt in FORMATS:
        values = oracle.TABLES[fmt][: oracle.NUM_FINITE[fmt]]
        points = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32)
        points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
        points = np.concatenate([points, -points])
        x = torch.from_numpy(points).view(1, -1)
        scale = torch.ones(1, -(-x.shape[1] // 128))
        codes = triton.quantize(x, QuantizeJob((1, 128), FORMATS[fmt], True, 0.0, stats=False), scale)[0]
        same(codes, oracle.encode(points, fmt).reshape(1, -1), fmt)


def test_words_that_nobody_wrote_are_not_read(small_geometry: None) -> None:
    x = operand("wide", "bfloat16", (130, 150))
    how = ((1, 128), FORMATS["E4M3"], True, 0.0)
    stats, expected = (
        triton.quantize_dequantize(x, QuantizeJob(*how))[2],
        reference.quantize_dequantize(x, QuantizeJob(*how))[2],
    )
    assert stats is not None
    assert isinstance(stats.folded, FoldedLines)
    assert stats.folded.lines is not None
    stats.folded.lines.view(torch.float32)[:, int(EXTREMES.value) + 7] = math.nan
    same_stats(stats, expected)
