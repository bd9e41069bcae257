"""The Triton kernels on a GPU: the same bits as the reference on the CPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from quantize import oracle
from quantize.backends import compared, shared
from quantize.operands import DTYPES, KINDS, operand
from quantize.tolerances import gain_tolerance

from fp8watch.kernels import reference, triton
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.record import FIELDS

SUMS = {"signal_energy", "noise_energy", "tile_noise_ratio_sum", "moment2", "moment4", "tile_noise_ratio_max"}
TILES = ((1, 128), (128, 1), (128, 128))
PANELS = {(1, 128): (40, 300), (128, 1): (300, 40), (128, 128): (200, 200)}
COMBINATIONS = list(itertools.product(DTYPES, TILES, FORMATS, (True, False)))


def bits(x: torch.Tensor) -> np.ndarray:
    """Bits on the host, with one NaN."""
    values = x.detach().cpu()
    if values.dtype != torch.float32:
        return values.view(torch.uint8).numpy()
    array = values.numpy()
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    where = np.argwhere(bits(got) != bits(expected))
    assert not where.size, f"{what}: {len(where)} differ, first at {where[0]}"


def same_stats(got: TileStats, expected: TileStats) -> None:
    same(got.amax, expected.amax, "amax")
    assert torch.equal(got.counts.cpu().long(), expected.counts.long()), "counts per tile"
    assert torch.equal(got.flags().cpu(), expected.flags()), "flags"
    a, b = got.summary(), expected.summary()
    for f in FIELDS:
        if not compared(f, a["measured"], b["measured"]):
            continue
        if f.name == "measured":
            assert shared(a[f.name]) == shared(b[f.name])
        elif f.name in SUMS:
            np.testing.assert_allclose(a[f.name], b[f.name], rtol=1e-6, atol=1e-300, err_msg=f.name)
        elif f.name == "gain_energy":  # a sum of terms of both signs
            assert np.all(np.abs(a[f.name] - b[f.name]) <= gain_tolerance(b)), f.name
        elif f.name != "noise_tile":  # two tiles may be equally bad but for the last bits of a sum
            np.testing.assert_array_equal(a[f.name], b[f.name], err_msg=f.name)


@pytest.mark.parametrize(("dtype", "tile", "fmt", "power_2"), COMBINATIONS)
def test_equals_the_reference(dtype: str, tile: tuple[int, int], fmt: str, power_2: bool) -> None:
    """15 kinds of operand, three epsilons, with all statistics, light ones and none: 1620 operands in all."""
    for kind, eps in itertools.product(KINDS, (0.0, 1e-12, 0.25)):
        x = operand(kind, dtype, PANELS[tile])
        how = (tile, FORMATS[fmt], power_2, eps)
        codes, scale_inv, stats = reference.quantize(x, QuantizeJob(*how))
        values = reference.quantize_dequantize(x, QuantizeJob(*how, stats=False))[0]
        got = triton.quantize(x.cuda(), QuantizeJob(*how))
        same(got[0], codes, f"codes of {kind}, eps {eps}")
        same(got[1], scale_inv, f"scale_inv of {kind}, eps {eps}")
        same_stats(got[2], stats)
        same(
            triton.quantize_dequantize(x.cuda(), QuantizeJob(*how, stats=False))[0],
            values,
            f"values of {kind}, eps {eps}",
        )


@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (40, 300), (1, 32), (32, 1)])
@pytest.mark.parametrize("factor", [0.25, 1024.0, 1e-30, 0.0, float("inf"), float("nan")])
def test_a_given_scale_is_used_as_it_is(tile: tuple[int, int], factor: float) -> None:
    x = operand("nan-and-inf", "float32", (40, 300))
    how = (tile, FORMATS["E4M3"], True, 0.0)
    scale = reference.quantize(x, QuantizeJob(*how))[2].tiles.scale * factor
    codes, scale_inv, stats = reference.quantize(x, QuantizeJob(*how), scale)
    got = triton.quantize(x.cuda(), QuantizeJob(*how), scale.cuda())
    same(got[0], codes, "codes")
    same(got[1], scale_inv, "scale_inv")
    same_stats(got[2], stats)


@pytest.mark.parametrize("length", [128, 32])
@pytest.mark.parametrize("kind", ["wide", "nan-and-inf", "zeros"])
def test_both_directions_from_one_read(length: int, kind: str) -> None:
    x = operand(kind, "bfloat16", (700, 900))
    how = (FORMATS["E4M3"], True, 0.0)
    got = triton.quantize_both(x.cuda(), QuantizeJob((1, length), *how), transposed=True)
    for (codes, scale_inv, stats), tile in zip(got, ((1, length), (length, 1)), strict=True):
        expected = reference.quantize(x, QuantizeJob(tile, *how))
        same(codes.contiguous(), expected[0], "codes")
        same(scale_inv, expected[1], "scale_inv")
        same_stats(stats, expected[2])


def test_large_and_strided_operands() -> None:
    base = torch.randn(3000, 2500, dtype=torch.bfloat16)
    for view in (base, base.t(), base[7:, 5:], base[:1].expand(999, 2500)):
        for tile in TILES:
            expected = reference.quantize(view, QuantizeJob(tile, FORMATS["E4M3"], True, 0.0))
            got = triton.quantize(
                view.cuda() if view.stride(0) else base[:1].cuda().expand(999, 2500),
                QuantizeJob(tile, FORMATS["E4M3"], True, 0.0),
            )
            same(got[0], expected[0], f"codes in {tile}")
            same_stats(got[2], expected[2])


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_cast_instruction_equals_integer_arithmetic(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bfloat16, every midpoint between codes and its neighbours, and a million random bit patterns."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the cast instruction exists from sm_89 on")
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = oracle.TABLES[fmt][: oracle.NUM_FINITE[fmt]]
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    random = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    x = torch.cat(
        [every, torch.from_numpy(points), -torch.from_numpy(points), random.to(torch.int32).view(torch.float32)]
    )
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024)).view(-1, 1024).cuda()
    for scale in (torch.ones(x.shape[0], 8, device="cuda"), None):
        made = []
        for hardware in (False, True):
            monkeypatch.setattr(triton, "HARDWARE_CAST", hardware)
            made.append(triton.quantize(x, QuantizeJob((1, 128), FORMATS[fmt], False, 0.0), scale)[0])
        same(made[1], made[0], f"codes of the instruction, {'scale 1' if scale is not None else 'scales computed'}")


def test_torch_casts_as_we_do() -> None:
    x = torch.randn(512, 1024, device="cuda") * 100
    ones = torch.ones(512, 8, device="cuda")
    for fmt in FORMATS.values():
        codes = triton.quantize(x.clamp(-400, 400), QuantizeJob((1, 128), fmt, True, 0.0, stats=False), ones)[0]
        same(codes, x.clamp(-400, 400).to(fmt.dtype), fmt.name)
