"""Ways through the C library that ordinary operands seldom take, and what no width of vectors changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from quantize.backends import USABLE
from quantize.operands import DTYPES, TILES, case, operand
from quantize.same_result import assert_same
from quantize.slab_rows import row_of

from fp8watch.kernels import cpu, cpu_compiler, cpu_library, reference
from fp8watch.numerics.formats import E4M3, E5M2, FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

pytestmark = pytest.mark.skipif("cpu" not in USABLE, reason="no C compiler here: set CC")


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose planes of depths are full after two times 64 vectors."""
    flags = (*cpu_compiler.flag_choices()[0], "-O0", "-DDEPTH_CARRIES=2")
    return cpu_compiler.compile_library(cpu_compiler.find_compiler(), flags, tmp_path_factory.mktemp("library"))


@contextmanager
def library(path: Path) -> Iterator[None]:
    """The cpu backend with this library."""
    loaded = cpu_library._open(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_library, "load", lambda: loaded)
        yield


def folded(x: torch.Tensor, job: QuantizeJob) -> bytes:
    """The whole record of one call, sums included."""
    stats = cpu.measure(x, job)
    return row_of(stats, 0).tobytes()


@pytest.mark.heavy(7, "fp8watch/kernels", first=True)  # a library for each width
def test_no_width_changes_a_bit_of_a_sum(width_libraries: dict[int, Path]) -> None:
    if len(width_libraries) < 2:
        pytest.skip("one width only")
    found: dict[int, list[bytes]] = {}
    for width, path in width_libraries.items():
        with library(path):
            found[width] = [
                folded(operand(kind, dtype, shape), QuantizeJob(tile, FORMATS[fmt], power_2))
                for kind in ("normal", "wide", "nan")
                for dtype in DTYPES
                for tile, shape in zip((*TILES, (1, 1000)), ((19, 650), (300, 70), (140, 200), (3, 1999)), strict=True)
                for fmt, power_2 in (("E4M3", True), ("E5M2", False))
            ]
    first, *others = found.values()
    for width, other in zip(list(found)[1:], others, strict=True):
        assert [a == b for a, b in zip(first, other, strict=True)] == [True] * len(first), width


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("values", [False, True], ids=["codes", "values"])
def test_bfloat16_is_rounded_as_float32_is(fmt: object, values: bool) -> None:
    """Blocks of normal codes, with ties, zeros and now and then a code that is subnormal or vanishes."""
    generator = torch.Generator().manual_seed(3)
    exponent = torch.randint(-13, 1, (260, 1031), generator=generator)
    mantissa = torch.randint(128, 256, exponent.shape, generator=generator)
    x = (mantissa * 2.0**exponent).to(torch.bfloat16)
    chosen = torch.rand(x.shape, generator=generator)
    x[chosen < 0.3] *= -1
    x[(chosen > 0.5) & (chosen < 0.6)] = 0
    x[chosen > 0.9995] *= 2.0**-20
    x[chosen < 0.0002] *= 2.0**-7
    x[130:, ::2] = 0  # as ReLU makes them
    function = "quantize_dequantize" if values else "quantize"
    for tile in (*TILES, (1, 32), (64, 1), (128, 2), (40, 9)):
        job = QuantizeJob(tile, fmt)
        with case(tile):
            assert_same(getattr(cpu, function)(x, job), getattr(reference, function)(x, job))
    given = torch.full((260, 9), 2.0**-9)
    job = QuantizeJob((1, 128), fmt)
    assert_same(getattr(cpu, function)(x, job, given), getattr(reference, function)(x, job, given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_results_bypass_the_caches_unchanged(dtype: torch.dtype) -> None:
    x = operand("wide", "float32", (1024, 2048)).to(dtype)
    for tile in ((1, 128), (128, 1)):
        job = QuantizeJob(tile, E4M3, stats=False)
        got, expected = cpu.quantize_dequantize(x, job)[0], reference.quantize_dequantize(x, job)[0]
        assert got.numel() * 4 >= 8 << 20
        assert torch.equal(got, expected), tile


def test_depths_beyond_what_the_planes_hold_are_counted(shallow: Path) -> None:
    x = operand("wide", "float32", (70, 2176))
    job = QuantizeJob((1, 128), E4M3)
    with library(shallow):
        assert_same(cpu.quantize(x, job), reference.quantize(x, job))


def test_depths_of_every_octave_are_counted_apart() -> None:
    octaves = torch.arange(40).repeat_interleave(torch.arange(1, 41))  # so many elements of each
    x = torch.zeros(7, 128 * 7)
    for row in range(7):
        x[row, : len(octaves)] = (
            1.5 * 2.0 ** -octaves[torch.randperm(len(octaves), generator=torch.Generator())].double()
        )
    x[:, ::128] = 1.5
    for tile in ((1, 128), (7, 1), (7, 896)):
        job = QuantizeJob(tile, E4M3)
        got = cpu.quantize(x, job)[2]
        expected = reference.quantize(x, job)[2]
        assert got is not None
        assert expected is not None
        assert got.summary()["depth_hist"].tolist() == expected.summary()["depth_hist"].tolist(), tile
        assert sum(got.summary()["depth_hist"].tolist()) == int((x != 0).sum())


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_zeros_under_an_infinite_scale_inv_are_not_numbers(dtype: torch.dtype) -> None:
    x = torch.zeros(130, 200, dtype=dtype)
    for tile in (*TILES, (64, 2)):
        scale = torch.full((-(-130 // tile[0]), -(-200 // tile[1])), 1e-44)
        job = QuantizeJob(tile, E4M3, power_2_scale=False)
        expected = reference.quantize_dequantize(x, job, scale)
        assert expected[0].isnan().all()
        with case(tile):
            assert_same(cpu.quantize_dequantize(x, job, scale), expected)
